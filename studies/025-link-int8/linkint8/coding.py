"""Codes of one byte an element for gradients on the link: blocks of a column that share a scale."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor

LARGEST = {"int8": 127.0, "e4m3": 448.0}
"""Of each kind of element."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Code:
    """How a gradient's deferred columns are written. A block lies within a column, whose last block may be short.

    `power` scales are powers of two, of one byte: then code times scale is a bf16 number, and any kernel decodes it
    exactly. Others are the block's largest entry over the largest code, of two bytes.
    """

    block: int
    rounding: Literal["nearest", "stochastic"] = "nearest"
    feedback: bool = False
    """Whether the device keeps what an entry lost, and adds it to the next one."""
    element: Literal["int8", "e4m3"] = "int8"
    power: bool = True

    @property
    def name(self) -> str:
        scale = "" if self.power else ", fine scales"
        return f"{self.element} in {self.block}, {self.rounding}{', feedback' * self.feedback}{scale}"

    def bytes_of(self, rows: int) -> int:
        """Of a column of so many elements, with its scales."""
        return rows + -(-rows // self.block) * (1 if self.power else 2)

    def coded(self, columns: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """What the host reads of columns, and the distance between two codes there (int8; of e4m3 the smallest one).

        Args:
            columns: [n, rows] fp32, finite.
            generator: of stochastic rounding.

        Returns:
            Both [n, rows] fp32.
        """
        rows = columns.shape[1]
        blocks = F.pad(columns, (0, -rows % self.block)).unflatten(1, (-1, self.block))
        scale = self._scale(blocks.abs().amax(2, keepdim=True))
        quotient = blocks / scale
        if self.element == "e4m3":
            if self.rounding != "nearest":
                raise ValueError(f"rounding is {self.rounding}; it must be nearest where elements are e4m3")
            codes = quotient.to(torch.float8_e4m3fn).float()
            smallest = scale * 2.0**-9
        else:
            even = torch.rand(quotient.shape, generator=generator) if self.rounding == "stochastic" else None
            codes = (quotient.round() if even is None else (quotient + even).floor()).clamp_(-127, 127)
            smallest = scale
        return (codes * scale).flatten(1)[:, :rows], smallest.expand_as(blocks).flatten(1)[:, :rows]

    def _scale(self, largest: Tensor) -> Tensor:
        """The least of its kind with which no entry is cut off; 1 where all of a block is 0."""
        least = largest / LARGEST[self.element]
        if self.power:
            mantissa, exponent = torch.frexp(least)
            least = torch.ldexp(torch.ones_like(least), exponent - (mantissa == 0.5).int())
        return torch.where(largest > 0, least, 1.0)


FACTORIAL = tuple(
    Code(block=block, rounding=rounding, feedback=feedback)
    for block in (64, 32, 256)
    for feedback in (True, False)
    for rounding in ("nearest", "stochastic")
)
FINE = Code(block=64, power=False)
FLOAT8 = Code(block=64, element="e4m3")
FEW = (FACTORIAL[0], Code(block=64), FLOAT8)
"""With and without feedback, and one whose steps grow with the entry."""
