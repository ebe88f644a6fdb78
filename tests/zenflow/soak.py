"""Thousands of random operations on small models, each compared with the reference at once: `make soak`.

`python -m tests.zenflow.soak --operations 10000 --seeds 20 --first 0` splits the operations among models of their own
rule, shapes and knobs, prints what it did in one line, and fails where a weight differs or the ledger does not balance.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import Counter
from dataclasses import replace
from typing import Any

import torch

from tests.zenflow.cases import Case, Session, assert_same, draw_case
from tests.zenflow.checkpoint_cases import by_copy, by_distributed_checkpoint, by_file
from tests.zenflow.family_cases import OURS, REFERENCE, draw_rule
from tests.zenflow.knob_cases import draw_knobs, with_auto, with_joins

# How often each is drawn; a step is skipped where the case says so.
WEIGHTS = {"step": 70, "knobs": 9, "flush": 5, "save and load": 6, "eval forward": 8, "new group": 2}


def soak_case(rng: random.Random, operations: int) -> Case:
    """A case that can go on for as many steps and stay finite."""
    case = draw_case(rng, rule=draw_rule(rng), steps=5, skip_nonfinite=False)
    case = with_auto(rng, case) if rng.random() < 0.3 else case
    groups = tuple({**group, "lr": min(group["lr"], 1e-2 if case.rule != "sgd" else 1e-3)} for group in case.groups)
    skipped = frozenset(step for step in range(1, operations + 1) if rng.random() < 0.12)
    config = replace(case.config, ledger=True)
    case = replace(
        case, groups=groups, config=config, rounded_grads=False, found_inf_at=skipped, flush_after=frozenset()
    )
    return with_joins(rng, case)


class Pair:
    """Our optimizer and the reference, each over weights of its own, told the same."""

    def __init__(self, rng: random.Random, operations: int) -> None:
        self.rng = rng
        self.case = soak_case(rng, operations)
        self.ours = Session(self.case, OURS[self.case.rule])
        self.theirs = Session(self.case, REFERENCE[self.case.rule])
        self.to_join = sorted(self.case.joining)

    def operate(self, kind: str) -> str:
        """One operation on both; returns what it was."""
        kind = "step" if kind == "new group" and not self.to_join else kind
        if kind == "step":
            self.both("make_step")
            return "skip" if self.ours.step in self.case.found_inf_at else "step"
        if kind == "knobs":
            self.both("do", "knobs", draw_knobs(self.rng, self.ours.config))
        elif kind == "new group":
            self.both("do", "join", self.to_join.pop(self.rng.randrange(len(self.to_join))))
        elif kind == "flush":
            self.both("do", "flush")
        elif kind == "eval forward":
            for session in (self.ours, self.theirs):
                with torch.no_grad():
                    session.module.eval()
                    session.record(kind)
                    session.module.train()
        else:
            transfer = self.rng.choice([by_copy, by_copy, by_file, by_distributed_checkpoint])
            config = self.rng.choice([self.ours.built, self.ours.config])
            self.ours.renew(transfer, config, weights_last=self.rng.random() < 0.5)
            self.both("record", kind)
        return kind

    def both(self, method: str, *arguments: Any) -> None:
        """Call it on ours, then on theirs."""
        for session in (self.ours, self.theirs):
            getattr(session, method)(*arguments)

    @property
    def hinges_on_an_ulp(self) -> bool:
        """Whether a window's end was decided by rounding: either decision is right, and what follows may differ."""
        return bool(self.theirs.optimizer.events["decisions on an ulp"])

    def compare(self, balance: bool) -> None:
        """Bitwise equality of what was recorded since the last time, and that nothing was lost."""
        assert_same(self.case, self.ours.trace, self.theirs.trace)
        self.ours.trace.clear()
        self.theirs.trace.clear()
        if balance:
            balances = self.ours.optimizer.ledger()
            assert all(balance.balanced for balance in balances.values()), balances

    def finish(self) -> None:
        """A last flush: nothing is pending, nothing was lost, and the weights are still numbers."""
        self.both("do", "flush")
        self.compare(balance=True)
        assert all(balance.pending == 0 for balance in self.ours.optimizer.ledger().values())
        assert all(bool(weight.isfinite().all()) for weight in self.ours.weights)
        self.both("end")


def soak_one(seed: int, operations: int) -> Counter[str]:
    """How often each kind of operation was done on the models of one seed."""
    rng, done = random.Random(seed), Counter[str]()
    pair = Pair(rng, operations)
    for _ in range(operations):
        done[pair.operate(rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0])] += 1
        if pair.hinges_on_an_ulp:
            done["started over"] += 1
            pair.ours.optimizer.close()
            pair = Pair(rng, operations)
        pair.compare(balance=rng.random() < 0.05)
    pair.finish()
    return done


def soak(operations: int, seeds: range) -> str:
    """Do so many operations, split among these seeds; returns a line of figures.

    Raises:
        AssertionError: a weight differs from the reference's, or the ledger does not balance; a note names the seed.
    """
    began, total = time.perf_counter(), Counter[str]()
    for seed in seeds:
        share = operations // len(seeds) + (seed - seeds.start < operations % len(seeds))
        try:
            total += soak_one(seed, share)
        except BaseException as error:
            error.add_note(f"soak: seed {seed}, {share} operations")
            raise
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(total.items()))
    return f"soak: {operations} operations on {len(seeds)} models in {time.perf_counter() - began:.1f} s: {kinds}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--operations", type=int, default=10_000)
    parser.add_argument("--seeds", type=int, default=20, help="models")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(soak(options.operations, range(options.first, options.first + options.seeds)))
