"""Part 2: published step times with upstream's byte counts; what is not published is fitted on Qwen2.5-1.5B.

Upstream moves, of each rank's own elements and step: as ZeRO-Offload 4 bytes down (fp32), 28 through the host, 2 up; as
ZenFlow with k = 0.1 and S = 4 on average 5 over the link (the old sum up, the new one down, fp32 at a boundary), and at
a boundary 6 through the host while the GPU waits (the stale copy cast to bf16); the update itself (36 a window) is
hidden where it fits into the window. Counts from reading the code; see the field notes.
"""

from __future__ import annotations

from dataclasses import dataclass

from zftune.planner.model import ModelFacts

A100_GBPS = 1555.0
_DOWN, _UP, _HOST = 4, 2, 28
_ZENFLOW_LINK, _ZENFLOW_CAST, _ZENFLOW_HOST, _WINDOW = 5, 6, 36, 4


@dataclass(frozen=True, slots=True)
class Fitted:
    """What is not published: rates of one of the two ranks, and the compute of an element."""

    link_gbps: float
    host_gbps: float
    compute_ns: float
    """Forward and backward of the batch, per parameter: 10^-9 s."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """A published figure and what follows for it."""

    what: str
    published_ms: float
    predicted_ms: float
    note: str
    fitted: bool = False

    @property
    def off(self) -> float:
        """Relative."""
        return self.predicted_ms / self.published_ms - 1


def fit(without_ms: float, zero_offload_ms: float, zenflow_ms: float, *, ranks: int = 2) -> Fitted:
    """Two rates from two step times.

    Args:
        without_ms: step without offloading; its update on the GPU is taken off.
        zero_offload_ms: step of ZeRO-Offload.
        zenflow_ms: step of ZenFlow.
        ranks: that the elements are divided among.
    """
    parameters = ModelFacts.from_name("Qwen2.5-1.5B").parameters
    own = parameters / ranks
    compute = without_ms - _HOST * own / A100_GBPS / 1e6
    # a x + b y = r for x = own / link, y = own / host
    a1, b1, r1 = _DOWN + _UP, _HOST, zero_offload_ms - compute
    a2, b2, r2 = _ZENFLOW_LINK, _ZENFLOW_CAST / _WINDOW, zenflow_ms - compute
    determinant = a1 * b2 - a2 * b1
    x, y = (r1 * b2 - r2 * b1) / determinant, (a1 * r2 - a2 * r1) / determinant
    return Fitted(own / x / 1e6, own / y / 1e6, compute / parameters * 1e6)


def zero_offload_ms(fitted: Fitted, own: float, compute_ms: float) -> float:
    """Nothing overlaps."""
    link = (_DOWN + _UP) * own / fitted.link_gbps / 1e6
    return compute_ms + link + _HOST * own / fitted.host_gbps / 1e6


def zenflow_ms(fitted: Fitted, own: float, compute_ms: float) -> float:
    """A window's mean step: what is not hidden, or the host where it does not fit into the window."""
    shown = compute_ms + _ZENFLOW_LINK * own / fitted.link_gbps / 1e6
    shown += _ZENFLOW_CAST * own / fitted.host_gbps / 1e6 / _WINDOW
    return max(shown, _ZENFLOW_HOST * own / fitted.host_gbps / 1e6 / _WINDOW)


def comparisons() -> tuple[Fitted, list[Comparison]]:
    """All published figures that can be compared."""
    fitted = fit(240.0, 1365.0, 569.0)
    small, middle, large = (
        ModelFacts.from_name(name).parameters for name in ("Qwen2.5-1.5B", "Qwen2.5-3B", "Llama-2-7B")
    )
    found = []
    for name, parameters, zero, zen, fitted_here in (
        ("Qwen2.5-1.5B", small, (1365.0,), (569.0,), True),
        ("Qwen2.5-3B", middle, (2497.0, 2887.0), (1116.0, 1419.0), False),
    ):
        compute = fitted.compute_ns * parameters / 1e6
        for note, value in zip(("bound", "unbound"), zero, strict=False):
            step = zero_offload_ms(fitted, parameters / 2, compute)
            found.append(Comparison(f"{name}, 2 A100, ZeRO-Offload", value, step, note, fitted_here))
        for note, value in zip(("bound", "unbound"), zen, strict=False):
            step = zenflow_ms(fitted, parameters / 2, compute)
            found.append(Comparison(f"{name}, 2 A100, ZenFlow", value, step, note, fitted_here))
    return fitted, found + _llama(fitted, large)


def _llama(fitted: Fitted, parameters: int) -> list[Comparison]:
    """Figure 3 of the blog (4 A100, its forward and backward taken as published), and the example's log (2 GPUs)."""
    quarter, half = parameters / 4, parameters / 2
    # The host's rate is the machine's: four ranks share what two had.
    four = Fitted(fitted.link_gbps, fitted.host_gbps / 2, fitted.compute_ns)
    down, up = _DOWN * quarter / four.link_gbps / 1e6, _UP * quarter / four.link_gbps / 1e6
    host = _HOST * quarter / four.host_gbps / 1e6
    what = "Llama-2-7B, 4 A100, ZeRO-Offload"
    return [
        Comparison(f"{what}: gradients down", 500.0, down, "figure 3"),
        Comparison(f"{what}: update", 4600.0, host, "figure 3; its host is not named"),
        Comparison(f"{what}: weights up", 500.0, up, "figure 3"),
        Comparison(f"{what}: step", 7145.0, 2045.0 + host + up, "figure 3, gradients down within backward"),
        Comparison(
            "Llama-2-7B, 2 GPUs, ZenFlow",
            1010.5,
            zenflow_ms(fitted, half, 0.0),
            "the example's log; neither GPU, host nor tokens are named: compute counted as 0",
        ),
    ]
