"""How several ranks change knobs after the same step, or not at all, and how their messages travel.

Messages are one all-reduce on the host a step, in a group of its own, that nobody waits for. It is begun after a step
and looked at after the next one, in which the ranks have averaged their gradients: by then all have begun it. Under
DistributedDataParallel on GPUs the host of a rank may be a step ahead of another's: then it waits here for the other's
host, as its GPU would have done a little later.

A rank that does not receive a round cannot know what the others make of it. So nobody acts on a round before it has
been settled where all look (`RankChannel.settle`, the store that the ranks met in): those that received it settle what
is to be done, those that did not settle that nothing is, and the first one counts for all. Who was not heard leaves.
"""

from __future__ import annotations

import json
import logging
import socket
import struct
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass
from datetime import timedelta
from statistics import fmean
from typing import Any

import torch

from zenflow import ConfigError
from zenflow.optimizer import ZenFlowOptimizer
from zftune.errors import BadInputError
from zftune.quality import went_wrong
from zftune.tuner.executor import Change, Changes, Verdict, change_knobs, leave_tried
from zftune.tuner.setup import WorldInfo
from zftune.tuner.space import Setting

MOST_TALK_BYTES = 2048
"""Two settings as JSON take some 500."""
PATIENCE_S = 60.0
"""How long ranks wait for one that is not there; then they tune no more."""
_WORD = struct.Struct("<2q?2q")
_POLL_S = 0.01
_VOID = "void"
_LATE = 4  # steps of which the last are not measured yet
_ROUNDS = 64  # whose times are averaged
_logger = logging.getLogger("zftune")


@dataclass(frozen=True, slots=True)
class RankMessage:
    """The message of every rank after a step; 0 is "none" or "not known"."""

    step: int
    acknowledged: int = 0
    """Number of the proposal that it is ready for."""
    leaves: bool = False
    """Whether nothing is to be tuned any more; its last message."""
    wrong_at: int = 0
    """Step at which its loss showed that training goes wrong."""
    own_us: int = 0
    """Its newest measured step without its waits in collectives, microseconds."""


@dataclass(frozen=True, slots=True)
class LeaderMessage:
    """What rank 0 adds."""

    number: int = 0
    knobs: Mapping[str, Any] | None = None
    keeps: Mapping[str, Any] | None = None
    """Knobs to be left with at the end; None: as they are."""


def room(ranks: int) -> torch.Tensor:
    """The room for all ranks' messages, uint8: each rank writes its own part, and the bytes' maxima are everybody's."""
    return torch.zeros(ranks * _WORD.size + MOST_TALK_BYTES, dtype=torch.uint8)


def fill(room: torch.Tensor, rank: int, word: RankMessage, talk: LeaderMessage | None = None) -> None:
    """Write a rank's part into a room of zeros; `talk` is rank 0's alone. Raises ValueError if it is too long."""
    whole = room.numpy().data
    _WORD.pack_into(whole, rank * _WORD.size, *astuple(word))
    text = b"" if talk is None else json.dumps([talk.number, talk.knobs, talk.keeps]).encode()
    if len(text) > MOST_TALK_BYTES:
        raise ValueError(f"a proposal has {len(text)} bytes, more than {MOST_TALK_BYTES}")
    begin = len(whole) - MOST_TALK_BYTES
    whole[begin : begin + len(text)] = text


def read(room: torch.Tensor) -> tuple[list[RankMessage], LeaderMessage]:
    """The messages of all ranks, from a room that all have filled."""
    whole = room.numpy().tobytes()
    words, text = whole[:-MOST_TALK_BYTES], whole[-MOST_TALK_BYTES:].rstrip(b"\0")
    return [RankMessage(*word) for word in _WORD.iter_unpack(words)], LeaderMessage(*json.loads(text))


class UnheardError(Exception):
    """Not all ranks could be heard."""


class RankChannel:
    """Carries messages over torch.distributed's default group; all ranks make it at the same time. Raises BadInputError
    if one has not come after `patience_s`, or cannot be reached.
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
        ends_s, here = time.monotonic() + patience_s, self._store.add(f"{self._prefix}/here", 1)
        while here < self.size:  # a group is made by all of them; nobody could be told any more who is missing then
            if time.monotonic() > ends_s:
                raise BadInputError(f"zftune.attach was called on {here} of {self.size} ranks; call it on all of them")
            time.sleep(_POLL_S)
            here = self._store.add(f"{self._prefix}/here", 0)
        self._group = distributed.new_group(backend="gloo", timeout=self._patience)
        names = hosts_of_ranks(self._group)
        self.company = WorldInfo(self.size, names.count(names[self.rank]), len(set(names)))
        self._work: Any = None
        self._said: torch.Tensor | None = None

    def say(self, word: RankMessage, talk: LeaderMessage | None) -> None:
        self._said = room(self.size)
        fill(self._said, self.rank, word, talk)
        try:
            self._work = torch.distributed.all_reduce(
                self._said, torch.distributed.ReduceOp.MAX, group=self._group, async_op=True
            )
        except (RuntimeError, ValueError) as error:
            raise UnheardError(_line(error)) from error

    def hear(self) -> tuple[list[RankMessage], LeaderMessage]:
        """The last messages of all. Raises UnheardError, which others may not have got."""
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
        """Let the last message get to the others, within some seconds."""
        if self._work is not None:
            with suppress(RuntimeError, ValueError):
                self._work.wait(timedelta(seconds=most_s))


def hosts_of_ranks(group: Any = None) -> list[str]:
    """The names of the machines of the ranks, by rank; to be called on all of them. `group` None: torch's default."""
    names: list[Any] = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(names, socket.gethostname(), group=group)
    return names


def _line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


class KnobConsensus(Changes):
    """One rank's part in changing knobs. Every step calls `hear` and `say`, on all ranks, until it is over."""

    def __init__(self, optimizer: ZenFlowOptimizer, exchange: RankChannel, on_change: Change | None = None) -> None:
        super().__init__(optimizer)
        self.over, self.reason = False, ""
        """Why it is over, a sentence; "": this rank left."""
        self.wrong, self.wrong_at = "", 0
        """Why training goes wrong, and the step at which this rank's loss showed that; 0: it has not."""
        self.keeps: Mapping[str, Any] | None = None
        """Knobs to be left with at the end; on all ranks as rank 0 decides. None: as they are."""
        self.back = ""
        """What a saved state was left for, a sentence; its reader empties it."""
        self.is_first = exchange.rank == 0
        """Whether this rank proposes."""
        self._exchange, self._on_change = exchange, on_change
        self._leaves = False
        self._round = 0
        self._open: LeaderMessage | None = None
        """The proposal that is acknowledged in this round, if this rank is ready for it."""
        self._ready = False
        self._number = 0
        """Of the newest proposal of rank 0, there."""
        self._wish: Mapping[str, Any] | None = None
        self._asked = self._withdrawn = False
        """Whether there is a verdict to come, and whether nobody wants the change any more."""
        self._applied: Mapping[str, Any] | None = None
        self._loaded = False
        """Whether a saved state was loaded that may name knobs to go back to."""
        self._own_us: deque[list[int]] = deque(maxlen=_ROUNDS)
        """Of each rank, by round."""
        self._untold: list[tuple[int, Mapping[str, Any]]] = []
        """Changes, until the user's own code is told: once all is as it has to be, since that may raise anything."""

    # --- rank 0 ------------------------------------------------------------------------------------------------------

    def ask(self, knobs: Mapping[str, Any]) -> None:
        self._wish, self._asked, self._withdrawn = knobs, True, False

    def withdraw(self) -> None:
        if self._wish is not None:  # nobody has heard of it
            self._wish = None
            self._decide(Verdict(void="it was withdrawn"))
        self._withdrawn = True

    def ranks_ms(self) -> tuple[float, ...]:
        return tuple(1e-3 * fmean(own) for own in zip(*self._own_us, strict=True))

    def leave(self) -> None:
        self._leaves = True

    def resume_from_saved(self) -> None:
        """A saved state was loaded, on all ranks: it has knobs of its own, and may name others to go back to."""
        self._applied, self._loaded = None, True

    def close(self, most_s: float) -> None:
        """At the end of the process: nothing changes any more, but others may still listen, for `most_s` at most."""
        self.over = True
        self._exchange.close(most_s)

    def hear(self) -> None:
        """Receive the messages of the step before, and do what was agreed."""
        if self.over or self._round == 0:
            return
        try:
            words, talk = self._exchange.hear()
        except UnheardError as error:
            self._part(f"Tuning ended: not all ranks can be heard ({error}).")
        else:
            try:
                self._act(words, talk)
            except UnheardError as error:  # of the store: without it training has ended, too
                self._end(f"Tuning ended: the ranks cannot agree any more ({error}).")
        while self._untold and self._on_change is not None:
            self._on_change(*self._untold.pop(0))

    def say(self) -> None:
        if self.over:
            return
        self._round += 1
        is_ready = self._ready and not self._leaves and not self._withdrawn
        number = self._open.number if self._open is not None and is_ready else 0
        newest = self._optimizer.history(after=self._optimizer.steps - _LATE)
        own_ms = [one.step_ms - (one.stall_ms or {}).get("comm", 0.0) for one in newest if one.step_ms]
        own_us = round(1e3 * own_ms[-1]) if own_ms else 0
        word = RankMessage(self._optimizer.steps, number, self._leaves, self.wrong_at, own_us)
        talk = None
        if self.is_first:
            wish = None
            if self._open is None and not self._leaves:
                wish, self._wish = self._wish, None
            self._number += wish is not None
            talk = LeaderMessage(self._number, wish, self.keeps)
        try:
            self._exchange.say(word, talk)
        except UnheardError as error:
            self._part(f"Tuning ended: the other ranks cannot be reached ({error}).")

    # --- the messages of a round -------------------------------------------------------------------------------------

    def _act(self, words: Sequence[RankMessage], talk: LeaderMessage) -> None:
        proposal, self._open = self._open, None
        if len({word.step for word in words}) > 1:
            self._end("Tuning ended: the ranks have not taken the same steps.")
            return
        if all(word.own_us for word in words):
            self._own_us.append([word.own_us for word in words])
        for rank, word in ((rank, word) for rank, word in enumerate(words) if word.wrong_at):
            self.wrong = went_wrong(word.wrong_at, f"the loss of rank {rank} is not a number or a spike")
        if not self.is_first:
            self.keeps = talk.keeps
        leaver = next((rank for rank, word in enumerate(words) if word.leaves), None)
        if leaver is not None:
            self._decide(Verdict(void=f"rank {leaver} tunes no more"))
            if talk.keeps is None:
                self._go_back()
            elif talk.keeps != self._in_force:
                self._change_if_agreed(talk.keeps)
            self._end("" if leaver == self._exchange.rank else f"Tuning ended: rank {leaver} tunes no more.")
        elif proposal is not None:
            missing = next((rank for rank, word in enumerate(words) if word.acknowledged != proposal.number), None)
            made = self._change_if_agreed(proposal.knobs) if missing is None else None
            reason = "a rank was not heard" if missing is None else f"rank {missing} did not acknowledge the change"
            self._decide(made or Verdict(void=reason))
        else:
            if talk.keeps is None:  # the same to all that hear this round
                self._go_back()
            if talk.knobs is not None:
                self._open, self._ready = talk, self._is_ready(talk.knobs)

    def _go_back(self) -> None:
        """From a setting that was tried when the state was saved that was loaded, if one was."""
        if self._loaded:
            self._loaded = False
            self.back = leave_tried(self._optimizer, None, self._change_if_agreed)

    def _is_ready(self, knobs: Mapping[str, Any]) -> bool:
        try:
            self._optimizer.config.changed(knobs)
        except ConfigError as error:
            _logger.debug("Settings are not acknowledged: %s.", error)
            return self.is_first  # where all ranks say the same, they had better say why
        return True

    def _decide(self, verdict: Verdict) -> None:
        if self._asked:
            self._asked, self._withdrawn = False, False
            self._verdict = verdict

    def _change_if_agreed(self, knobs: Mapping[str, Any] | None) -> Verdict | None:
        """Do it where no rank has settled otherwise; None: nothing was done."""
        return None if knobs is None else self._change(self._exchange.settle(self._round, json.dumps(knobs)))

    def _change(self, settled: str) -> Verdict | None:
        if settled == _VOID:
            return None
        knobs = json.loads(settled)
        verdict = change_knobs(self._optimizer, knobs)
        if verdict.step is not None:
            self._applied = knobs
            self._untold.append((verdict.step, knobs))
        return verdict

    @property
    def _in_force(self) -> Mapping[str, Any] | None:
        """As was agreed last, even if the next step has yet to begin with it."""
        known = Setting.known(self._optimizer.config) if self._applied is None else None
        return self._applied if known is None else known.knobs()

    # --- the end -----------------------------------------------------------------------------------------------------

    def _part(self, reason: str) -> None:
        """Leave without what others may have received; they must not act alone, neither now nor on the farewell."""
        try:
            settled = self._exchange.settle(self._round, _VOID)
            self._exchange.settle(self._round + 1, _VOID)
            self._change(settled)
            farewell = RankMessage(self._optimizer.steps, leaves=True)
            self._exchange.say(farewell, LeaderMessage() if self.is_first else None)
        except UnheardError as error:
            _logger.debug("The other ranks were told nothing: %s.", error)
        self._end(reason)

    def _end(self, reason: str) -> None:
        self.over, self.reason, self._open = True, reason, None
        self._decide(Verdict(void="tuning has ended"))
