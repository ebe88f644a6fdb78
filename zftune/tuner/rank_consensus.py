"""What the ranks agree on, worked out by each of them from the same words.

A rank that does not hear a round cannot know what the others make of it. So nobody acts on a round before it has been
settled where all look (`RankChannel.settle`, the store that the ranks met in): those that heard it settle what is to be
done, those that did not settle that nothing is, and the first one counts for all. Who was unheard leaves.
"""

from __future__ import annotations

import json
import logging
from collections import deque
from collections.abc import Mapping
from statistics import fmean
from typing import Any

from zenflow import ConfigError
from zenflow.optimizer import ZenFlowOptimizer
from zftune.tuner.executor import Change, Changes, Verdict, change_knobs
from zftune.tuner.rank_channel import LeaderMessage, RankChannel, RankMessage, StepMessages, UnheardError
from zftune.tuner.space import Setting
from zftune.tuner.warm_up import go_back

_VOID = "void"
_FIRST = 0
_SPIKE_STEPS = 4  # the guard looks at so many losses
_LATE = 4  # steps of which the last are not measured yet
_ROUNDS = 64  # whose times are averaged
_logger = logging.getLogger("zftune")


class KnobConsensus(Changes):
    """One rank's part of it. Every step calls `hear` and `say`, on all ranks, until it is over. `on_change` gets every
    change of this rank.
    """

    def __init__(self, optimizer: ZenFlowOptimizer, exchange: RankChannel, on_change: Change | None = None) -> None:
        self.over = False
        """Whether nothing is agreed on any more."""
        self.reason = ""
        """Why it is over, a sentence; "": this rank left."""
        self.wrong = ""
        """What the loss of a rank shows, a sentence; "": nothing is wrong."""
        self.wrong_at = 0
        """The step at which this rank's loss showed that; 0: it has not."""
        self.keeps: Mapping[str, Any] | None = None
        """Knobs to be left with at the end; on all ranks as rank 0 says. None: as they are."""
        self.back = ""
        """What a saved state was left for, a sentence; whoever says it empties it."""
        self._optimizer, self._exchange, self._on_change = optimizer, exchange, on_change
        self._leaves = False
        self._round = 0
        """Number of the words that were said last; 0: none were."""
        self._open: LeaderMessage | None = None
        """The proposal that is acknowledged in this round."""
        self._ready = False
        """Whether this rank acknowledges it."""
        self._number = 0
        """Of the newest proposal of rank 0, there."""
        self._wish: Mapping[str, Any] | None = None
        self._asked = False
        """Whether there is a verdict to come."""
        self._withdrawn = False
        self._applied: Mapping[str, Any] | None = None
        self._loaded = False
        """Whether a saved state was loaded that may name knobs to go back to."""
        self._own_us: deque[list[int]] = deque(maxlen=_ROUNDS)
        """Of each rank, by round."""
        self._untold: list[tuple[int, Mapping[str, Any]]] = []
        """Changes, until the user's own code is told: once all is as it has to be, since that may raise anything."""

    @property
    def is_first(self) -> bool:
        """Whether this rank proposes."""
        return self._exchange.rank == _FIRST

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

    # --- every rank --------------------------------------------------------------------------------------------------

    def leave(self) -> None:
        """Tune no more: all ranks hear of it in the next words, and set the knobs that are to be kept."""
        self._leaves = True

    def go_on_from_saved(self) -> None:
        """A saved state was loaded, on all ranks: it has knobs of its own, and may name others to go back to."""
        self._applied, self._loaded = None, True

    def close(self, most_s: float) -> None:
        """At the end of the process: nothing changes any more, but others may still listen, for `most_s` at most."""
        self.over = True
        self._exchange.close(most_s)

    def hear(self) -> None:
        """Hear what all have said after the step before, and do what was agreed.

        Raises:
            HostEngineError: host work failed.
        """
        if self.over or self._round == 0:
            return
        try:
            heard = self._exchange.hear()
        except UnheardError as error:
            self._part(f"Tuning ended: not all ranks can be heard ({error}).")
        else:
            self._take(heard)
        while self._untold and self._on_change is not None:
            self._on_change(*self._untold.pop(0))

    def say(self) -> None:
        """Say this rank's words; returns at once."""
        if self.over:
            return
        self._round += 1
        try:
            self._exchange.say(self._word(), self._talk() if self.is_first else None)
        except UnheardError as error:
            self._part(f"Tuning ended: the other ranks cannot be reached ({error}).")

    def _word(self) -> RankMessage:
        number = self._open.number if self._open is not None and self._ready and not self._leaves else 0
        if self._withdrawn:
            number = 0
        return RankMessage(self._optimizer.steps, number, self._leaves, self.wrong_at, self._measured_us())

    def _measured_us(self) -> int:
        for one in reversed(self._optimizer.history(after=self._optimizer.steps - _LATE)):
            if one.step_ms is not None and one.stall_ms is not None:
                return round(1e3 * (one.step_ms - one.stall_ms.get("comm", 0.0)))
        return 0

    def _talk(self) -> LeaderMessage:
        wish = None
        if self._open is None and not self._leaves:
            wish, self._wish = self._wish, None
        if wish is not None:
            self._number += 1
        return LeaderMessage(self._number, wish, self.keeps)

    # --- what was heard ----------------------------------------------------------------------------------------------

    def _take(self, heard: StepMessages) -> None:
        try:
            self._act(heard)
        except UnheardError as error:  # of the store: without it training has ended, too
            self._end(f"Tuning ended: the ranks cannot agree any more ({error}).")

    def _act(self, heard: StepMessages) -> None:
        words, talk = heard.words, heard.talk
        proposal, self._open = self._open, None
        if len({word.step for word in words}) > 1:
            self._end("Tuning ended: the ranks have not taken the same steps.")
            return
        if all(word.own_us for word in words):
            self._own_us.append([word.own_us for word in words])
        self.wrong = next((_wrong(rank, word.wrong_at) for rank, word in enumerate(words) if word.wrong_at), self.wrong)
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
            self._judge(proposal, words)
        else:
            if talk.keeps is None:  # the same to all that hear this round
                self._go_back()
            if talk.knobs is not None:
                self._open, self._ready = talk, self._is_ready(talk.knobs)

    def _go_back(self) -> None:
        """From a setting that was tried when the state was saved that was loaded, if one was."""
        if self._loaded:
            self._loaded = False
            self.back = go_back(self._optimizer, None, self._change_if_agreed)

    def _judge(self, proposal: LeaderMessage, words: Any) -> None:
        missing = [rank for rank, word in enumerate(words) if word.acknowledged != proposal.number]
        if missing:
            self._decide(Verdict(void=f"rank {missing[0]} did not acknowledge the change"))
            return
        verdict = self._change_if_agreed(proposal.knobs)
        self._decide(verdict or Verdict(void="a rank was not heard"))

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
        if knobs is None:
            return None
        return self._change(self._exchange.settle(self._round, json.dumps(knobs)))

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
        if self._applied is not None:
            return self._applied
        config = self._optimizer.config
        return None if config.update_interval == "auto" else Setting.of(config).knobs()

    # --- the end -----------------------------------------------------------------------------------------------------

    def _part(self, reason: str) -> None:
        """Go without having heard what others may have; they must not act alone, neither now nor on the farewell."""
        try:
            settled = self._exchange.settle(self._round, _VOID)
            self._exchange.settle(self._round + 1, _VOID)
            self._change(settled)
            self._exchange.say(
                RankMessage(self._optimizer.steps, leaves=True), LeaderMessage() if self.is_first else None
            )
        except UnheardError as error:
            _logger.debug("The other ranks were told nothing: %s.", error)
        self._end(reason)

    def _end(self, reason: str) -> None:
        self.over, self.reason, self._open = True, reason, None
        self._decide(Verdict(void="tuning has ended"))


def _wrong(rank: int, step: int) -> str:
    return (
        f"Stopped at step {step}: the loss of rank {rank} is not a number or a spike; the settings at the start "
        f"are back, and the last good checkpoint is the newest from before step {max(1, step - _SPIKE_STEPS + 1)}."
    )
