"""Sharded runs that are saved on the way, and others that go on from there: on as many ranks, on others, in torch."""

from __future__ import annotations

import io
import os
import resource
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.support.tiers import fast
from tests.support.zenflow.fsdp_cases import (
    AUTO,
    CLIPPED,
    OVERLAPPED,
    STEPS,
    Case,
    Odd,
    Run,
    loss_of,
    model_of,
    my_part,
    sharded,
    tokens_of,
    whole,
)
from zenflow import ZenFlowAdamW, ZenFlowConfig, ZenFlowError, distributed

FOLDER = "ZENFLOW_TEST_CHECKPOINTS"
"""The environment's: where they are."""

ALL_CASES = {
    "overlapped": Case(replace(OVERLAPPED, bucket_bytes=100, look_ahead="coast")),
    "twin flow": Case(replace(CLIPPED, offload_ratio=0.5, update_interval=5, apply_lag=4), rule="lion"),
    "auto": Case(AUTO),
    "staggered": Case(replace(OVERLAPPED, bucket_bytes=100, look_ahead="guess", window_phase="staggered")),
    "mean": Case(replace(CLIPPED, deferred_update="mean", select_interval=2)),
    "knobs": Case(OVERLAPPED, knobs={3: {"topk_ratio": 0.6}, 6: {"offload_ratio": 0.7, "update_interval": 4}}),
    "whole": Case(replace(OVERLAPPED, topk_ratio=0.2)),
}
"""Saved in the middle of a window, with buckets in flight and a selection or a change of knobs pending."""
CASES = fast({"overlapped": ALL_CASES["overlapped"]}, all_of=ALL_CASES)
WHOLE = ("whole",)
"""Not sharded where it is saved: each rank has all of it."""
FLUSHED = ("mean",)
"""Saved while the model holds what a flush would make of it."""
STOPS = fast((5,), all_of=(5, 7))
"""After which they are saved."""
ON_FOUR = ("overlapped", "mean")
"""Of these, runs of four ranks are saved too, of which one has no row of some weights."""
GONE_ON = [(name, stop) for name in CASES for stop in (STOPS if name == "overlapped" else STOPS[-1:])]
"""What is taken up on other ranks."""


def folder_of(name: str, ranks: int, stop: int) -> Path:
    """Where the run of so many ranks was saved."""
    return Path(os.environ[FOLDER]) / f"{name} on {ranks}" / f"after {stop}"


def begun(name: str, rank: int, *, shards: bool = True) -> Run:
    """A run of this rank's rows."""
    model = model_of()
    return Run(CASES[name], sharded(model) if shards else model, my_part(rank))


def alone(name: str) -> Run:
    """A run of one process that has no process group."""
    return Run(CASES[name], model_of(), slice(None))


def save_at_stops(name: str, run: Run, ranks: int) -> Iterator[int]:
    """Run to the end, save at each stop, and say that it was saved."""
    for number in range(1, STEPS + 1):
        run.step(number)
        if number in STOPS:
            if number + 1 in run.case.knobs:
                run.optimizer.set_knobs(**run.case.knobs[number + 1])
            with run.optimizer.flushed_weights() if name in FLUSHED else nullcontext():
                distributed.save(run.model, run.optimizer, folder_of(name, ranks, number))
            yield number


def resumed(run: Run, name: str, ranks: int, stop: int) -> dict[str, Any]:
    """What a new run comes to that goes on from where so many ranks were saved."""
    distributed.load(run.model, run.optimizer, folder_of(name, ranks, stop))
    return run.steps(stop + 1, STEPS).found()


def saved(name: str, rank: int) -> dict[str, Any]:
    """What it comes to where it is not interrupted, what was open at each stop, and what differs where it was."""
    ranks, begin = torch.distributed.get_world_size(), partial(begun, name, rank, shards=name not in WHOLE)
    run, files, flushed, open_at = begin(), {}, {}, {}
    for stop in save_at_stops(name, run, ranks):
        files[stop] = _own_file(run)
        flushed[stop] = _flushed(run)
        training = run.optimizer._training
        flying = sum(len(weight.in_flight) for weight in training.model.weights)
        pending = any(weight.pending for weight in training.model.weights) or training.coming is not None
        open_at[stop] = (training.clock.window_steps, flying, pending)
    found = run.found()
    differing = [f"after {stop}" for stop in STOPS if not same(found, resumed(begin(), name, ranks, stop))]
    last = STOPS[-1]
    state, weights = torch.load(io.BytesIO(files[last]), weights_only=True)
    other = begin()
    other.model.load_state_dict(weights)
    other.optimizer.load_state_dict(state)
    if any(not torch.equal(value, flushed[last][key]) for key, value in _flushed(other).items()):
        differing.append("flushed, before its first step")
    if not same(found, other.steps(last + 1, STEPS).found()):
        differing.append("from a file of its own")
    return {**found, "differing": differing, "open": open_at}


def _own_file(run: Run) -> bytes:
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that torch.distributed.checkpoint could not load it
        torch.save([run.optimizer.state_dict(), run.model.state_dict()], buffer)
    return buffer.getvalue()


def _flushed(run: Run) -> dict[str, Tensor]:
    with run.optimizer.flushed_weights() as steps:
        assert steps
        return run.weights()


def same(found: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether weights and norms are the same to the bit, and what was selected and balanced is."""
    weights = all(torch.equal(value, other["weights"][key]) for key, value in found["weights"].items())
    last = (found[key][len(found[key]) - len(other[key]) :] == other[key] for key in ("selected", "norms"))
    return weights and all(last) and found["unbalanced"] == other["unbalanced"] == []


def gone_on(name: str, rank: int, *, ranks: int) -> dict[int, Any]:
    """By stop: what a run comes to that goes on from a checkpoint of so many ranks."""
    return {stop: resumed(begun(name, rank), name, ranks, stop) for one, stop in GONE_ON if one == name}


def sharded_later(rank: int) -> dict[str, Any]:
    """The same where the model is sharded after the optimizer was made, as Accelerate does it."""
    name, stop = "overlapped", STOPS[0]
    run = begun(name, rank, shards=False)
    run.optimizer.param_groups[0]["params"] = [*sharded(run.model).parameters()]
    return resumed(run, name, torch.distributed.get_world_size(), stop)


# --- refused and failed ----------------------------------------------------------------------------------------------


def said(do: Callable[[], object]) -> str:
    """The sentence of an error."""
    try:
        do()
    except ZenFlowError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@contextmanager
def small_files(*, here: bool) -> Iterator[None]:
    """Files of this rank may have no more than a few bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 if here else before[0], before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def failures(rank: int) -> dict[str, Any]:
    """What is said about each failure, and whether it has changed anything."""
    top, first = Path(os.environ[FOLDER]) / "failures", rank == 0
    folder, config = top / "checkpoint", CASES["overlapped"].config
    run = begun("overlapped", rank).steps(1, 4)
    distributed.save(run.model, run.optimizer, folder)
    run.step(5)
    before, files = _own_file(run), _contents(top)
    found: dict[str, Any] = {}
    outside = torch.nn.Parameter(run.model.frozen.weight.detach().clone())
    foreign = ZenFlowAdamW([outside], config=ZenFlowConfig())
    found["foreign"] = said(lambda: distributed.save(run.model, foreign, folder))
    foreign.abandon()
    with small_files(here=rank == 1):
        found["disk"] = said(lambda: distributed.save(run.model, run.optimizer, folder))
    found["missing"] = said(lambda: distributed.load(run.model, run.optimizer, top / "nowhere"))
    torch.distributed.barrier()
    found["files kept"] = _contents(top) == files
    torch.distributed.barrier()
    if first:
        (top / "notes").mkdir()
        (top / "notes" / "thesis.tex").write_text("chapter 1")
        (top / "plain").mkdir()
    torch.distributed.barrier()
    found["other folder"] = said(lambda: distributed.save(run.model, run.optimizer, top / "notes"))
    found["thesis"] = (top / "notes" / "thesis.tex").read_text()
    from torch.distributed.checkpoint.state_dict_saver import save

    save({"model": run.model.state_dict()}, checkpoint_id=top / "plain")
    found["only a model"] = said(lambda: distributed.load(run.model, run.optimizer, top / "plain"))
    for name, size in (("__1_0.distcp", 300), (".metadata", 100)):
        torch.distributed.barrier()
        content = (folder / name).read_bytes()
        torch.distributed.barrier()
        if first:
            (folder / name).write_bytes(content[:size])
        torch.distributed.barrier()
        found[name] = said(lambda: distributed.load(run.model, run.optimizer, folder))
        torch.distributed.barrier()
        if first:
            (folder / name).write_bytes(content)
    torch.distributed.barrier()
    other = Run(Case(config, rule="sgd"), sharded(model_of()), my_part(rank))
    found["another rule"] = said(lambda: distributed.load(other.model, other.optimizer, folder))
    other.optimizer.abandon()
    thinner = sharded(Thinner())
    of_thinner = ZenFlowAdamW(thinner.parameters(), config=config, module=thinner)
    found["another model"] = said(lambda: distributed.load(thinner, of_thinner, folder))
    of_thinner.abandon()
    state = run.optimizer.state_dict() if rank else {}
    found["one rank's"] = said(lambda: run.optimizer.load_state_dict(state))
    found["changed nothing"] = _own_file(run) == before
    run.optimizer.abandon()
    return found


def _contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


class Thinner(Odd):
    """With fewer rows in one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].up = torch.nn.Linear(10, 6)
        self.blocks[1].conv = torch.nn.Conv1d(6, 5, 2, padding=1)


# --- exchange with torch ---------------------------------------------------------------------------------------------

HYPER: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1}
Trained = tuple[Odd, Any]
Transfer = Callable[[Trained, Trained, Path], None]
"""From one run, to another, by files in a folder."""


def _train(trained: Trained, rank: int, first: int, last: int) -> None:
    model, optimizer = trained
    for number in range(first, last + 1):
        optimizer.zero_grad()
        loss_of(model, tokens_of(number, 0)[my_part(rank)], recompute=False).backward()
        optimizer.step()


def _ours() -> Trained:
    model = sharded(model_of())
    config = ZenFlowConfig.zero_offload(topk_ratio=0.25, update_interval=3)
    return model, ZenFlowAdamW(model.parameters(), **HYPER, config=config, module=model)


def _exactly_ours() -> Trained:
    model = sharded(model_of())
    return model, ZenFlowAdamW(model.parameters(), **HYPER, config=ZenFlowConfig.zero_offload(), module=model)


def _torchs() -> Trained:
    model = sharded(model_of())
    return model, torch.optim.AdamW(model.parameters(), **HYPER)


def _as_torch(optimizer: Any) -> Any:
    return optimizer.torch_state() if isinstance(optimizer, ZenFlowAdamW) else nullcontext()


def _by_names(before: Trained, after: Trained, folder: Path) -> None:
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

    with _as_torch(before[1]):
        state = get_optimizer_state_dict(*before)
    with _as_torch(after[1]):
        set_optimizer_state_dict(*after, state)
    after[0].load_state_dict(before[0].state_dict())


def _by_files(before: Trained, after: Trained, folder: Path) -> None:
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.checkpoint.state_dict_loader import load
    from torch.distributed.checkpoint.state_dict_saver import save

    with _as_torch(before[1]):
        model, optimizer = get_state_dict(*before)
    save({"model": model, "optimizer": optimizer}, checkpoint_id=folder)
    with _as_torch(after[1]):
        model, optimizer = get_state_dict(*after)
        load({"model": model, "optimizer": optimizer}, checkpoint_id=folder)
        set_state_dict(*after, model_state_dict=model, optim_state_dict=optimizer)


def exchanged(rank: int, *, transfers: Sequence[Transfer]) -> dict[str, Any]:
    """How far weights are from those of torch's optimizer where it trains half of the steps only."""
    top = Path(os.environ[FOLDER]) / f"exchanged on {torch.distributed.get_world_size()}"
    found: dict[str, Any] = {}
    expected = _torchs()
    _train(expected, rank, 1, 6)
    for name, (first, second) in {
        "to torch": (_exactly_ours, _torchs),
        "from torch": (_torchs, _exactly_ours),
        "and back": (_exactly_ours, _exactly_ours),
    }.items():
        for transfer in transfers:
            before, after = first(), second()
            _train(before, rank, 1, 3)
            transfer(before, after, top / name)
            _train(after, rank, 4, 6)
            found[f"{name} {transfer.__name__}"] = _distance(after[0], expected[0])
            for _, optimizer in (before, after):
                if isinstance(optimizer, ZenFlowAdamW):
                    optimizer.abandon()
    return found


def _distance(model: Odd, other: Odd) -> float:
    theirs = other.state_dict()
    return max(float((whole(value) - whole(theirs[name])).abs().max()) for name, value in model.state_dict().items())


def in_torchs_words(rank: int) -> dict[str, Any]:
    """What is said about an open window, and what torch's own functions make of the state after a flush."""
    from torch.distributed.checkpoint.state_dict_loader import load
    from torch.distributed.checkpoint.state_dict_saver import save

    folder = Path(os.environ[FOLDER]) / f"plain on {torch.distributed.get_world_size()}"
    trained = _ours()
    model, optimizer = trained
    found: dict[str, Any] = {}
    _train(trained, rank, 1, 5)

    def pending() -> None:
        with optimizer.torch_state():
            optimizer.state_dict()

    found["pending"] = said(pending)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        save({"optimizer": optimizer}, checkpoint_id=folder / "open")
    found["warned"] = [str(one.message) for one in caught if "middle of a window" in str(one.message)]
    other = _ours()
    found["open"] = said(lambda: load({"optimizer": other[1]}, checkpoint_id=folder / "open"))
    optimizer.flush()
    save({"optimizer": optimizer, "model": model.state_dict()}, checkpoint_id=folder / "flushed")
    weights = other[0].state_dict()
    load({"optimizer": other[1], "model": weights}, checkpoint_id=folder / "flushed")
    for one in (trained, other):
        _train(one, rank, 6, 9)
        one[1].flush()
    found["distance"] = _distance(model, other[0])
    found["of one's own"] = said(lambda: _load_own_as_torchs(optimizer))
    for _, one in (trained, other):
        one.abandon()
    return found


def _load_own_as_torchs(optimizer: ZenFlowAdamW) -> None:
    state = optimizer.state_dict()
    with optimizer.torch_state():
        optimizer.load_state_dict(state)


# --- one parameter ---------------------------------------------------------------------------------------------------


def read_and_set(rank: int) -> dict[str, Any]:
    """The whole state of each parameter after some steps, and weights after it was set in two ways."""
    run = begun("overlapped", rank).steps(1, 4)
    model, optimizer = run.model, run.optimizer
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    states = {name: optimizer.full_state(parameter) for name, parameter in named}
    kinds = {type(value).__name__ for state in states.values() for key, value in state.items() if key != "step"}
    found: dict[str, Any] = {"kinds": kinds, "state": {}}
    for name, state in states.items():
        found["state"][name] = {key: whole(value) for key, value in state.items() if key != "step"}
    shown = [whole(value) for _, parameter in named for value in optimizer.state[parameter].values()]
    found["shown"] = len(shown)
    before = _own_file(run)
    for name, parameter in named:
        for key, value in states[name].items():
            if key != "step":
                optimizer.set_full_state(parameter, key, value)
    found["setting it changes nothing"] = _own_file(run) == before
    moment: Any = states["blocks.0.down.weight"]["exp_avg"]
    parameter = dict(named)["blocks.0.down.weight"]
    optimizer.set_full_state(parameter, "exp_avg", moment + 1.0)
    as_whole: Tensor = whole(optimizer.full_state(parameter)["exp_avg"])
    optimizer.set_full_state(parameter, "exp_avg", moment.to_local() + 1.0)
    found["set"] = torch.equal(as_whole, whole(moment) + 1.0) and torch.equal(
        as_whole, whole(optimizer.full_state(parameter)["exp_avg"])
    )
    optimizer.abandon()
    return found


def state_alone() -> dict[str, dict[str, Tensor]]:
    """The same of one process."""
    run = alone("overlapped").steps(1, 4)
    state = {
        name: {key: value for key, value in run.optimizer.full_state(parameter).items() if key != "step"}
        for name, parameter in run.model.named_parameters()
        if parameter.requires_grad
    }
    run.optimizer.abandon()
    return state


WORK: dict[str, Callable[[int], Any]] = {
    **{f"saved {name}": partial(saved, name) for name in CASES},
    **{f"{name} from {ranks}": partial(gone_on, name, ranks=ranks) for name in CASES for ranks in (1, 2, 4)},
    "sharded later": sharded_later,
    "failures": failures,
    "exchanged": partial(exchanged, transfers=[_by_names, _by_files]),
    "exchanged by files": partial(exchanged, transfers=[_by_files]),
    "in torch's words": in_torchs_words,
    "read and set": read_and_set,
}
