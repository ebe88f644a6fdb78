"""The thirty scripted scenarios, and six on the emulated accelerator."""

from __future__ import annotations

from dataclasses import dataclass

from scripted import CAUSES, Scenario, Waiting

COMPUTE_MS = 61.0  # of a step. The training thread runs ahead by less than two, so that much hides a wait.


def scripted() -> list[Scenario]:
    """Each cause alone, hidden, partly hidden, in pairs, and all of that with jitter."""
    alone = [Scenario(f"{cause} alone", "alone", (Waiting(cause, 40.0),)) for cause in CAUSES]
    hidden = [
        Scenario(f"{cause} hidden", "hidden", (Waiting(cause, 30.0, synchronized=False),))
        for cause in ("host", "d2h", "data", "comm")
    ]
    partly = [
        Scenario("host partly hidden", "partly", (Waiting("host", COMPUTE_MS + 25, synchronized=False),)),
        Scenario(
            "h2d by the stream", "partly", (Waiting("h2d", 2 * COMPUTE_MS + 25, by_stream=True, synchronized=False),)
        ),
        Scenario(
            "comm by the stream", "partly", (Waiting("comm", 2 * COMPUTE_MS + 35, by_stream=True, synchronized=False),)
        ),
        Scenario("comm by the stream, hidden", "hidden", (Waiting("comm", 30.0, by_stream=True, synchronized=False),)),
        Scenario("data partly hidden", "partly", (Waiting("data", COMPUTE_MS + 25, synchronized=False),)),
        Scenario("short waits", "partly", tuple(Waiting("select", 0.2) for _ in range(8))),
    ]
    pairs = [
        Scenario("d2h, then host", "pair", (Waiting("d2h", 15.0), Waiting("host", 45.0))),
        Scenario("host, then h2d", "pair", (Waiting("host", 30.0), Waiting("h2d", 20.0, by_stream=True))),
        Scenario("data and host", "pair", (Waiting("data", 20.0), Waiting("host", 35.0))),
        Scenario(
            "comm hides d2h", "pair", (Waiting("comm", 50.0, by_stream=True), Waiting("d2h", 30.0, synchronized=False))
        ),
        Scenario("select, then comm", "pair", (Waiting("select", 5.0), Waiting("comm", 25.0))),
        Scenario("h2d, then data", "pair", (Waiting("data", 30.0, synchronized=False), Waiting("h2d", 20.0))),
    ]
    chosen = (alone[0], alone[5], hidden[1], partly[0], partly[2], pairs[0], pairs[1], pairs[3])
    jittered = [
        Scenario(f"{s.name}, jitter", "jitter", s.waits, jitter=0.3, kernels=s.kernels, kernel_ms=s.kernel_ms)
        for s in chosen
    ]
    return [*alone, *hidden, *partly, *pairs, *jittered]


@dataclass(frozen=True, slots=True)
class Synchronous:
    """ZeRO-Offload on a rig, gradients sent only by `step()`: D2H, host and H2D follow one another, all exposed."""

    name: str
    d2h_ms: float
    host_ms: float
    h2d_ms: float


EMULATED = (
    Synchronous("emulated: host", 4, 300, 4),
    Synchronous("emulated: d2h", 200, 60, 4),
    Synchronous("emulated: h2d", 4, 60, 200),
    Synchronous("emulated: d2h and host", 120, 240, 4),
    Synchronous("emulated: host and h2d", 4, 240, 120),
    Synchronous("emulated: all three", 100, 200, 100),
)
