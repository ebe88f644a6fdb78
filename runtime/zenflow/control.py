"""A step's factor on the gradient and its skip flag: device scalars that `step()` never reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from zenflow.host.tasks import Control
from zenflow.sharded import local_rows

# torch.nn.utils.clip_grad_norm_ uses the same.
_NORM_EPS = 1e-6


@dataclass(slots=True)
class StepControl:
    """Clip and unscale factor, and whether the step is skipped."""

    factor: torch.Tensor
    """0-dim fp32."""
    skip: torch.Tensor | None
    """0-dim bool; None where nothing can skip."""
    norm: torch.Tensor | None = None
    """0-dim fp32: of the unscaled gradient, before it is clipped; None where nothing asked for it."""
    host: Control | None = None
    """The same on its way to the host; None where nothing is deferred."""

    def is_skipped(self) -> bool:
        """Whether the step was skipped; waits for the device."""
        if self.host is None or self.skip is None:
            return self.skip is not None and bool(self.skip)
        self.host.transfer.wait()
        return not self.host.live()[1]

    def packed(self) -> torch.Tensor:
        """[2] fp32: factor, skip."""
        skip = torch.zeros_like(self.factor) if self.skip is None else self.skip.float()
        return torch.stack([self.factor, skip])


def step_control(
    norms: Callable[[], torch.Tensor],
    device: torch.device,
    *,
    max_grad_norm: float | None,
    skip_nonfinite: bool,
    grad_scale: torch.Tensor | None,
    found_inf: torch.Tensor | None,
) -> StepControl | None:
    """Factor and skip flag of a step, without reading them; None where the factor is 1 and nothing can be skipped.

    Args:
        norms: [n] fp32, the L2 norm of each gradient, not finite where the gradient is not; asked for where needed.
        max_grad_norm: clip the global L2 norm of the unscaled gradient to this.
        skip_nonfinite: skip where that norm is not finite.
        grad_scale: what the loss was multiplied with (GradScaler's protocol).
        found_inf: not 0 where GradScaler found a non-finite gradient.
    """
    if max_grad_norm is None and not skip_nonfinite and grad_scale is None and found_inf is None:
        return None
    factor = torch.ones((), dtype=torch.float32, device=device)
    skip = norm = None
    if grad_scale is not None:
        factor = torch.as_tensor(grad_scale, device=device).float().reshape(()).reciprocal()
    if found_inf is not None:
        skip = as_flag(found_inf, device)
    if max_grad_norm is not None or skip_nonfinite:
        norm = torch.linalg.vector_norm(norms()) * factor
        if skip_nonfinite:
            nonfinite = ~torch.isfinite(norm)
            skip = nonfinite if skip is None else skip | nonfinite
        if max_grad_norm is not None:
            factor = factor * (max_grad_norm / (norm + _NORM_EPS)).clamp(max=1.0)
    return StepControl(factor, skip, norm)


def as_flag(value: torch.Tensor, device: torch.device) -> torch.Tensor:
    """0-dim bool on a device: whether `value`, of one element on any device and perhaps a DTensor, is not 0."""
    return torch.as_tensor(local_rows(value), device=device).reshape(()) != 0


def scaled_control(control: StepControl | None, factor: torch.Tensor | None) -> StepControl | None:
    """The control of a weight whose gradient was multiplied with `factor`, 0-dim fp32, but without its elements."""
    if factor is None:
        return control
    if control is None:
        return StepControl(factor, None)
    return StepControl(factor * control.factor, control.skip)
