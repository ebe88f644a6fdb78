"""Runs that are saved and loaded again on the way: how the state gets from one optimizer to another, and when."""

from __future__ import annotations

import copy
import io
import random
import tempfile
import warnings
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, Literal

import torch

from tests.support.zenflow.cases import Case, Make, Session, Trace, Transfer, case_of, draw_case
from tests.support.zenflow.family_cases import OURS, draw_rule
from tests.support.zenflow.knob_cases import with_auto, with_changes, with_joins

Place = Literal["at once", "before", "after"]
"""Straight after the step, or before or after what happens between it and the next."""
Stop = tuple[int, Place]


def by_dict(old: Any, new: Any) -> None:
    new.load_state_dict(old.state_dict())


def by_copy(old: Any, new: Any) -> None:
    new.load_state_dict(copy.deepcopy(old.state_dict()))


def by_file(old: Any, new: Any) -> None:
    buffer = io.BytesIO()
    torch.save(old.state_dict(), buffer)
    buffer.seek(0)
    new.load_state_dict(torch.load(buffer, weights_only=True))


def by_distributed_checkpoint(old: Any, new: Any) -> None:
    """As an object that saves itself, without a process group."""
    from torch.distributed.checkpoint.state_dict_loader import load
    from torch.distributed.checkpoint.state_dict_saver import save

    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no process group
        save({"optimizer": old}, checkpoint_id=folder)
        load({"optimizer": new}, checkpoint_id=folder)


def draw_stops(rng: random.Random, case: Case) -> list[Stop]:
    """One to three places at which a run is saved and loaded."""
    places: list[Place] = ["at once", "before", "after", "after"]
    return [(rng.randint(0, case.steps), rng.choice(places)) for _ in range(rng.choice([1, 1, 2, 3]))]


def run_with_stops(
    case: Case,
    stops: Collection[Stop],
    transfer: Transfer = by_dict,
    *,
    make: Make | None = None,
    session: type[Session] = Session,
    at_stop: Callable[[Session], None] | None = None,
) -> Trace:
    """The trace of a run that is saved and loaded at these stops.

    Args:
        transfer: how the state gets across.
        make: builds the optimizer under test; the default is ours of the case's rule.
        session: what runs the case.
        at_stop: done instead of saving and loading.
    """
    running = session(case, make or OURS[case.rule])

    def stop(place: Place) -> None:
        if (running.step, place) not in stops:
            return
        if at_stop is not None:
            at_stop(running)
            return
        draw = random.Random(f"{running.step} {place}")
        config = draw.choice([running.built, running.config])  # the script as it was, or one with the knobs of today
        running.renew(transfer, config, weights_last=draw.random() < 0.5)

    stop("before")
    running.do_what_is_due()
    stop("after")
    for _ in range(case.steps):
        running.make_step(lambda *_: stop("at once"))
        stop("before")
        running.do_what_is_due()
        stop("after")
    return running.end()


def draw_eventful(rng: random.Random) -> Case:
    """A case in which anything may happen between the steps."""
    case = draw_case(rng, rule=draw_rule(rng), steps=rng.choice([2, 7, 11, 16]))
    case = with_auto(rng, case) if rng.random() < 0.3 else case
    case = with_joins(rng, case) if rng.random() < 0.25 else case
    return with_changes(rng, case) if rng.random() < 0.5 else case


def eventful(seed: int, **fixed: Any) -> Case:
    rng = random.Random(seed)
    case = with_joins(rng, case_of(seed, steps=12, **fixed)) if seed % 3 == 0 else case_of(seed, steps=12, **fixed)
    return with_changes(rng, case) if seed % 2 == 0 else case


def process_case(seed: int) -> Case:
    """What is saved in one process and goes on in another: knobs that have changed and a group that has joined."""
    rng = random.Random(seed)
    case = case_of(seed, steps=14, topk_ratio=0.3, offload_ratio=0.9, update_interval=4, overlap_step=True)
    return with_changes(rng, with_joins(rng, case))


def save_session(session: Session, path: Path) -> None:
    """Everything that a fresh process needs beside the case."""
    torch.save(
        {
            "step": session.step,
            "groups": session.group_order,
            "weights": [weight.detach().clone() for weight in session.weights],
            "requires_grad": [weight.requires_grad for weight in session.weights],
            "optimizer": session.optimizer.state_dict(),
        },
        path,
    )


def go_on(seed: int, path: Path) -> Trace:
    """Load what `save_session` wrote into a session that has seen nothing, and run it to its end."""
    saved = torch.load(path, weights_only=True)
    session = Session(process_case(seed), OURS["adamw"])
    session.step, session.group_order = saved["step"], saved["groups"]
    for weight, data, requires_grad in zip(session.weights, saved["weights"], saved["requires_grad"], strict=True):
        weight.requires_grad_(requires_grad).detach().copy_(data)
    session.renew(lambda _, new: new.load_state_dict(saved["optimizer"]))
    session.do_what_is_due()
    while session.step < session.case.steps:
        session.make_step()
        session.do_what_is_due()
    return session.end()


def go_on_into(seed: int, saved: str, trace: str) -> None:
    """For a process of its own: `go_on` with a saved session, and the trace into a file."""
    torch.set_num_threads(1)
    torch.save(go_on(seed, Path(saved)), trace)
