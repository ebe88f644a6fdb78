"""How words get from rank to rank: an all-reduce on the host a step, in a group of its own, that nobody waits for.

It is begun after a step and looked at after the next one, in which the ranks have averaged their gradients: by then all
have begun it. Under DistributedDataParallel on GPUs the host of a rank may be a step ahead of another's: then it waits
here for the other's host, as its GPU would have done a little later.
"""

from __future__ import annotations

import json
import logging
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass
from datetime import timedelta
from typing import Any

import torch

from zftune.errors import BadInputError
from zftune.tuner.training_info import WorldInfo

MOST_TALK_BYTES = 2048
"""Two settings as JSON take some 500."""
_WORD = struct.Struct("<5q")
_LENGTH = struct.Struct("<q")


@dataclass(frozen=True, slots=True)
class RankMessage:
    """What every rank says."""

    step: int
    """That was just taken."""
    acknowledged: int = 0
    """Number of the proposal that it is ready for; 0: none."""
    leaves: bool = False
    """Whether nothing is to be tuned any more; its last word."""
    wrong_at: int = 0
    """Step at which its loss showed that training goes wrong; 0: it does not."""
    own_us: int = 0
    """What its newest measured step took without its waits in collectives, microseconds; 0: not known."""


@dataclass(frozen=True, slots=True)
class LeaderMessage:
    """What rank 0 says besides."""

    number: int = 0
    """Of its newest proposal."""
    knobs: Mapping[str, Any] | None = None
    """The proposal, where it is new."""
    keeps: Mapping[str, Any] | None = None
    """Knobs to be left with at the end; None: as they are."""


@dataclass(frozen=True, slots=True)
class StepMessages:
    """What all have said after a step."""

    words: Sequence[RankMessage]
    """By rank."""
    talk: LeaderMessage


def room(ranks: int) -> torch.Tensor:
    """The room for all ranks' words, uint8: with `fill` each rank writes its own part, and the bytes' maxima are
    everybody's.
    """
    return torch.zeros(ranks * _WORD.size + MOST_TALK_BYTES, dtype=torch.uint8)


def fill(room: torch.Tensor, rank: int, word: RankMessage, talk: LeaderMessage | None = None) -> None:
    """Write a rank's part into a room of zeros; `talk` is rank 0's alone.

    Raises:
        ValueError: it is too long.
    """
    whole = room.numpy().data
    _WORD.pack_into(whole, rank * _WORD.size, *astuple(word))
    if talk is None:
        return
    text = json.dumps([talk.number, talk.knobs, talk.keeps]).encode()
    begin = len(whole) - MOST_TALK_BYTES
    if len(text) > MOST_TALK_BYTES - _LENGTH.size:
        raise ValueError(f"a proposal has {len(text)} bytes, more than {MOST_TALK_BYTES - _LENGTH.size}")
    _LENGTH.pack_into(whole, begin, len(text))
    whole[begin + _LENGTH.size : begin + _LENGTH.size + len(text)] = text


def read(room: torch.Tensor) -> StepMessages:
    """The words of all ranks, from a room that all have filled."""
    whole = room.numpy().data
    begin = len(whole) - MOST_TALK_BYTES
    words = [
        RankMessage(step, acknowledged, bool(leaves), wrong_at, own_us)
        for step, acknowledged, leaves, wrong_at, own_us in _WORD.iter_unpack(whole[:begin])
    ]
    (length,) = _LENGTH.unpack_from(whole, begin)
    number, knobs, keeps = json.loads(bytes(whole[begin + _LENGTH.size : begin + _LENGTH.size + length]))
    return StepMessages(words, LeaderMessage(number, knobs, keeps))


PATIENCE_S = 60.0
"""How long ranks wait for one that is not there; then they tune no more."""
_POLL_S = 0.01
_logger = logging.getLogger("zftune")


class UnheardError(Exception):
    """Not all ranks could be heard."""


class RankChannel:
    """Carries words over torch.distributed's default group; all ranks make it at the same time. Waits `patience_s` for
    an absent rank.

    Raises:
        BadInputError: not all ranks have come, or there is no way to talk to them.
    """

    def __init__(self, patience_s: float = PATIENCE_S) -> None:
        distributed = torch.distributed
        self.rank, self.size = distributed.get_rank(), distributed.get_world_size()
        if not distributed.is_gloo_available():
            raise BadInputError(f"{self.size} ranks are tuned by way of gloo, which this torch was built without")
        self._patience = timedelta(seconds=patience_s)
        # What is settled has to be the same for all, whoever of them is slow: only one place can decide that.
        self._store = distributed.distributed_c10d._get_default_store()
        # Which of this rank's it is: all ranks make as many.
        self._prefix = f"zftune/{self._store.add(f'zftune/of-rank-{self.rank}', 1)}"
        self._await_all(patience_s)
        self._group = distributed.new_group(backend="gloo", timeout=self._patience)
        names = hosts_of_ranks(self._group)
        self.company = WorldInfo(self.size, names.count(names[self.rank]), len(set(names)))
        self._work: Any = None
        self._said: torch.Tensor | None = None

    def say(self, word: RankMessage, talk: LeaderMessage | None) -> None:
        """Send this rank's; returns at once. Raises UnheardError."""
        self._said = room(self.size)
        fill(self._said, self.rank, word, talk)
        try:
            self._work = torch.distributed.all_reduce(
                self._said, torch.distributed.ReduceOp.MAX, group=self._group, async_op=True
            )
        except (RuntimeError, ValueError) as error:
            raise UnheardError(_line(error)) from error

    def hear(self) -> StepMessages:
        """What all have said the last time. Raises UnheardError, which others may not have got."""
        assert self._said is not None
        try:
            self._work.wait(self._patience)
            return read(self._said)
        except (RuntimeError, ValueError) as error:
            raise UnheardError(_line(error)) from error

    def settle(self, number: int, wish: str) -> str:
        """What holds for a number: the first wish of any rank for it. Raises UnheardError."""
        try:
            return bytes(self._store.compare_set(f"{self._prefix}/{number}", "", wish)).decode()
        except (RuntimeError, ValueError) as error:
            raise UnheardError(_line(error)) from error

    def agree(self, *, well: bool) -> bool:
        """Whether all ranks are well; waits for them."""
        asked = torch.tensor([int(well)])
        try:
            torch.distributed.all_reduce(asked, torch.distributed.ReduceOp.MIN, group=self._group)
        except RuntimeError as error:
            _logger.debug("The ranks could not be asked: %s.", error)
            return False
        return bool(asked)

    def close(self, most_s: float) -> None:
        """Let what was said last get to the others, within some seconds."""
        if self._work is not None:
            with suppress(RuntimeError, ValueError):
                self._work.wait(timedelta(seconds=most_s))

    def _await_all(self, most_s: float) -> None:
        """A group is made by all of them; nobody could be told any more who is missing then."""
        key = f"{self._prefix}/here"
        ends_s = time.monotonic() + most_s
        self._store.add(key, 1)
        while (here := self._store.add(key, 0)) < self.size:
            if time.monotonic() > ends_s:
                raise BadInputError(f"zftune.attach was called on {here} of {self.size} ranks; call it on all of them")
            time.sleep(_POLL_S)


def hosts_of_ranks(group: Any = None) -> list[str]:
    """The names of the machines of the ranks, by rank; to be called on all of them. `group` None: torch's default."""
    names: list[Any] = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(names, socket.gethostname(), group=group)
    return names


def _line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
