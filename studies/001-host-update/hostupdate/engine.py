"""This project's host engine as a contender: one weight of many columns, without the runtime around it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from hostupdate.contenders import HYPERPARAMETERS, Contender, Inputs, Outcome, UnavailableError
from hostupdate.machine import COLUMN
from zenflow.errors import HostEngineError
from zenflow.host.native import load_native
from zenflow.rules import RULES

if TYPE_CHECKING:
    from zenflow import _native

NAME = "zenflow engine"
_RULE = RULES["adamw"]
_POLL_S = 1.0


def engine(cores: Sequence[int]) -> Contender:
    """The native engine with one thread on each of these cores (-1: wherever the scheduler puts it).

    Raises:
        UnavailableError: the native module is missing.
    """
    try:
        load_native()
    except HostEngineError as error:
        raise UnavailableError(f"{NAME} is left out: {error}") from error
    return EngineContender(cores)


class EngineContender:
    """The threads are the engine's; the thread that applies a window only waits."""

    name = NAME
    coast = 0.0
    """How many times a window's last update is added to its result."""

    def __init__(self, cores: Sequence[int]) -> None:
        self._native = load_native()
        self._engine: _native.Engine = self._native.Engine(list(cores))
        self._hyper = _RULE.hyper(HYPERPARAMETERS)

    def prepare(self, inputs: Inputs) -> None:
        n = inputs.master.numel()
        self._log = inputs.log
        self._master = self._memory(n, torch.float32).copy_(inputs.master)
        self._moments = [self._memory(n, torch.float32).copy_(moment) for moment in inputs.moments]
        self._result = self._memory(n, torch.bfloat16)
        self._count = torch.full((n // COLUMN,), inputs.updates, dtype=torch.int32)
        self._weight = self._engine.register(
            _RULE.name,
            n // COLUMN,
            COLUMN,
            self._master.data_ptr(),
            [moment.data_ptr() for moment in self._moments],
            self._count.data_ptr(),
        )
        self._part = functools.cache(self._make_part)

    def apply(self, interval: int, *, replay: bool, times: int = 1) -> None:
        for ticket in [self._submit(interval, replay) for _ in range(times)]:
            while self._engine.wait(ticket, _POLL_S) is None:
                pass

    def outcome(self) -> Outcome:
        return Outcome(self._master, self._result)

    def close(self) -> None:
        self._engine.close()

    def _submit(self, interval: int, replay: bool) -> int:
        hyper = self._hyper
        return self._engine.update(
            self._weight,
            [self._part(interval)],
            mean=None if replay else (hyper.numbers, hyper.decay),  # one update's decay, as with the others
            weights=(self._result.data_ptr(), "bf16"),
            packed=None,
            coast=self.coast,
        )

    def _memory(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        nbytes = elements * dtype.itemsize
        return torch.from_numpy(self._engine.allocate(nbytes, nbytes)).view(dtype)

    def _make_part(self, interval: int) -> _native.Part:
        hyper, log = (self._hyper.numbers, self._hyper.decay), self._log[:interval]
        entries = [self._native.Entry([(g.data_ptr(), g.numel())], "bf16", hyper, 1.0, None) for g in log]
        return self._native.Part(0, len(self._count), entries, None, None)
