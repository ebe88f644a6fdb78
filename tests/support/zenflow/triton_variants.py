"""What Triton would compile for a GPU that is not there: its own keys, one for each variant of a kernel."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.compiler import ASTSource
from triton.runtime import driver

from zenflow.kernels import Kernels
from zenflow.kernels.base import ColumnUpdate
from zenflow.kernels.triton_launch import TritonKernels
from zenflow.rules import Hyper, Rule
from zenflow.state import ColumnState


class NoDriver(DriverBase):  # type: ignore[misc]
    """Says what GPU it is for, and can launch nothing."""

    @classmethod
    def is_active(cls) -> bool:
        return True

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def map_python_to_cpp_type(self, ty: str) -> str:
        raise NotImplementedError

    def get_benchmarker(self) -> Any:
        raise NotImplementedError


class CountedKernels(Kernels):
    """Triton's kernels up to where one would be compiled or launched, then others, which do the work.

    Args:
        working: the others.
    """

    name = "counted"

    def __init__(self, working: Kernels) -> None:
        self._triton, self._working = TritonKernels(), working
        self.variants: dict[tuple[str, str], tuple[ASTSource, dict[str, Any]]] = {}
        """By kernel and Triton's key, what the compiler is given: source and options."""
        driver.set_active(NoDriver())
        knobs.runtime.jit_cache_hook = self._asked

    @property
    def of_each(self) -> dict[str, int]:
        """How many there are of each kernel."""
        return dict(Counter(name for name, _ in self.variants))

    def compiled(self, capability: int, wanted: Callable[[int, dict[str, Any]], bool]) -> list[str]:
        """Compile variants, down to what a GPU executes.

        Args:
            capability: of the GPU, as 90.
            wanted: which of them, by their numbers and constants.

        Returns:
            The PTX of each.
        """
        made = [
            triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
            for number, (source, options) in enumerate(self.variants.values())
            if wanted(number, {source.fn.arg_names[place]: value for (place,), value in source.constants.items()})
        ]
        assert all(one.asm["cubin"] for one in made)
        return [one.asm["ptx"] for one in made]

    def _asked(self, *, key: str, fn: Any, **asked: Any) -> bool:
        given = asked["compile"]
        source = ASTSource(fn.jit_function, given["signature"], given["constants"], given["configs"][0])
        self.variants[fn.name, key] = source, {name: given[name] for name in ("enable_fp_fusion", "num_warps")}
        return True  # which leaves it uncompiled

    def importance(self, matrix: torch.Tensor) -> torch.Tensor:
        self._triton.importance(matrix)
        return self._working.importance(matrix)

    def energies(self, matrix: torch.Tensor) -> torch.Tensor:
        self._triton.energies(matrix)
        return self._working.energies(matrix)

    def pack(self, matrix: torch.Tensor, columns: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor:
        self._triton.pack(matrix, columns, into)
        return self._working.pack(matrix, columns, into)

    def scatter(self, matrix: torch.Tensor, columns: torch.Tensor, rows: torch.Tensor) -> None:
        self._triton.scatter(matrix, columns, rows)
        self._working.scatter(matrix, columns, rows)

    def update(
        self,
        rule: Rule,
        state: ColumnState,
        gradient: torch.Tensor,
        weights: torch.Tensor | None,
        hyper: Hyper,
        *,
        columns: torch.Tensor | None = None,
        factor: torch.Tensor | None = None,
        skip: torch.Tensor | None = None,
    ) -> None:
        self.update_many(rule, [ColumnUpdate(state, gradient, weights, hyper, columns)], factor=factor, skip=skip)

    def update_many(
        self,
        rule: Rule,
        updates: Sequence[ColumnUpdate],
        *,
        factor: torch.Tensor | None = None,
        skip: torch.Tensor | None = None,
    ) -> None:
        self._triton.update_many(rule, updates, factor=factor, skip=skip)
        self._working.update_many(rule, updates, factor=factor, skip=skip)
