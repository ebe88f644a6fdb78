"""Weights for use without their optimizer: they lack nothing, and taking them changes no bit of the training."""

from __future__ import annotations

import copy
import gc
import io
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from tests.support.tiers import combinations, fast
from tests.support.zenflow.script_cases import Setting, ours, setting, with_module
from tests.support.zenflow.small import Stack, seeded, tokens_of
from zenflow import ZenFlowAdamW, ZenFlowConfig
from zenflow.device import Transfer

STEPS = 10


__all__ = ["setting", "with_module"]


LAST = fast((2, 7), all_of=(2, 5, 6, 7))
"""Steps after which a file is saved."""


def train(model: nn.Module, optimizer: ZenFlowAdamW, last: int) -> None:
    for step in range(optimizer.steps, last):
        model(tokens_of(step)).backward()
        optimizer.step()
        optimizer.zero_grad()


def begun(setting: Setting, last: int, *, with_module: bool, dtype: torch.dtype) -> tuple[nn.Module, ZenFlowAdamW]:
    model = seeded(Stack, dtype, depth=1)
    optimizer = ours(setting, with_module=with_module)(model)
    train(model, optimizer, last)
    return model, optimizer


def weights_of(model: nn.Module) -> list[Tensor]:
    return [weight.detach().clone() for weight in model.parameters()]


@cache
def uninterrupted(setting: Setting, *, with_module: bool, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    """The weights after the last step as training sees them, and after the end."""
    model, optimizer = begun(setting, STEPS, with_module=with_module, dtype=dtype)
    seen = weights_of(model)
    optimizer.close()
    return seen, weights_of(model)


def same(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("dtype", fast([torch.bfloat16], all_of=[torch.float32, torch.bfloat16]))
def test_the_weights_are_those_of_a_flush_and_training_does_not_notice(
    setting: Setting, with_module: bool, dtype: torch.dtype
) -> None:
    _, ended = uninterrupted(setting, with_module=with_module, dtype=dtype)
    model, optimizer = begun(setting, 0, with_module=with_module, dtype=dtype)
    for last in fast((1, 3, 4, 5, 8, STEPS), all_of=range(1, STEPS + 1)):
        train(model, optimizer, last)
        twin, twin_optimizer = begun(setting, last, with_module=with_module, dtype=dtype)
        seen = weights_of(model)
        assert same(seen, weights_of(twin))
        twin_optimizer.close()
        with optimizer.flushed_weights() as steps:
            assert same(weights_of(model), weights_of(twin))
            assert (steps > 0) == (not same(seen, weights_of(twin)))
            with optimizer.flushed_weights() as again:
                assert again == 0
        assert same(weights_of(model), seen)
    optimizer.close()
    assert same(weights_of(model), ended)


def resumed(
    setting: Setting, saved: dict[str, Any], *, with_module: bool, dtype: torch.dtype, first: str
) -> tuple[nn.Module, ZenFlowAdamW]:
    torch.manual_seed(99)
    model = Stack(depth=1).to(dtype)
    optimizer = ours(setting, with_module=with_module)(model)
    for part in ("model", "optimizer") if first == "model" else ("optimizer", "model"):
        (model if part == "model" else optimizer).load_state_dict(copy.deepcopy(saved[part]))
    return model, optimizer


def resuming(*few: tuple[torch.dtype, str, str]) -> pytest.MarkDecorator:
    """In which type, what is loaded first, and how the model's file was saved."""
    every = combinations(
        dtype=[torch.bfloat16, torch.float32],
        first=["optimizer", "model"],
        model_file=["flushed", "as training sees it"],
    )
    return pytest.mark.parametrize(("dtype", "first", "model_file"), fast([*few], all_of=every))


@resuming((torch.bfloat16, "optimizer", "flushed"), (torch.float32, "model", "as training sees it"))
def test_a_run_goes_on_bit_for_bit_from_a_file_that_can_be_used_alone(
    setting: Setting, with_module: bool, dtype: torch.dtype, first: str, model_file: str
) -> None:
    expected, ended = uninterrupted(setting, with_module=with_module, dtype=dtype)
    for last in LAST:
        model, optimizer = begun(setting, last, with_module=with_module, dtype=dtype)
        seen = copy.deepcopy(model.state_dict())
        with optimizer.flushed_weights():
            saved = {"optimizer": optimizer.state_dict(), "model": copy.deepcopy(model.state_dict())}
        optimizer.close()
        assert same(weights_of(model), list(saved["model"].values()))
        if model_file != "flushed":
            saved["model"] = seen
        model, optimizer = resumed(setting, saved, with_module=with_module, dtype=dtype, first=first)
        assert same(weights_of(model), list(seen.values()))
        train(model, optimizer, STEPS)
        assert same(weights_of(model), expected)
        optimizer.close()
        assert same(weights_of(model), ended)


def both(model: nn.Module, optimizer: ZenFlowAdamW) -> dict[str, Any]:
    return {"optimizer": optimizer.state_dict(), "model": copy.deepcopy(model.state_dict())}


@resuming((torch.bfloat16, "model", "flushed"), (torch.float32, "optimizer", "as training sees it"))
def test_nothing_is_missing_in_a_file_that_is_saved_before_the_first_step_after_loading(
    setting: Setting, with_module: bool, dtype: torch.dtype, first: str, model_file: str
) -> None:
    """As one does to take the weights out of a checkpoint; what is saved then resumes as well."""
    _, ended = uninterrupted(setting, with_module=with_module, dtype=dtype)
    for last in LAST:
        model, optimizer = begun(setting, last, with_module=with_module, dtype=dtype)
        seen = copy.deepcopy(model.state_dict())
        with optimizer.flushed_weights() if model_file == "flushed" else nullcontext():
            saved = both(model, optimizer)
        with optimizer.flushed_weights() as pending:
            pass
        optimizer.flush()
        flushed = weights_of(model)
        optimizer.close()
        model, optimizer = resumed(setting, saved, with_module=with_module, dtype=dtype, first=first)
        assert optimizer._training.model.has_pending == optimizer._training.model.may_lack_updates == (pending > 0)
        for _ in range(2):
            with optimizer.flushed_weights() as steps:
                assert steps == pending
                assert same(weights_of(model), flushed)
            assert same(weights_of(model), list(seen.values()))
        with optimizer.flushed_weights() as steps:
            assert steps == pending
            again = both(model, optimizer)
        optimizer.close()
        model, optimizer = resumed(setting, again, with_module=with_module, dtype=dtype, first=first)
        train(model, optimizer, STEPS)
        optimizer.close()
        assert same(weights_of(model), ended)


@pytest.mark.parametrize("model_file", ["flushed", "as training sees it"])
def test_a_file_that_is_saved_before_the_model_is_loaded_changes_nothing(setting: Setting, model_file: str) -> None:
    _, ended = uninterrupted(setting, with_module=True, dtype=torch.bfloat16)
    model, optimizer = begun(setting, 6, with_module=True, dtype=torch.bfloat16)
    with optimizer.flushed_weights() if model_file == "flushed" else nullcontext():
        saved = both(model, optimizer)
    optimizer.close()
    model = Stack(depth=1).to(torch.bfloat16)
    optimizer = ours(setting, with_module=True)(model)
    other = weights_of(model)
    optimizer.load_state_dict(saved["optimizer"])
    with optimizer.flushed_weights():
        pass
    assert same(weights_of(model), other)
    model.load_state_dict(saved["model"])
    train(model, optimizer, STEPS)
    optimizer.close()
    assert same(weights_of(model), ended)


@pytest.mark.parametrize("model_file", ["flushed", "as training sees it"])
def test_what_is_written_after_loading_is_in_a_file_that_is_saved_then(setting: Setting, model_file: str) -> None:
    """And what was saved then trains on with it, as if nothing had been saved."""
    results = []
    for saves in (True, False):
        model, optimizer = begun(setting, 6, with_module=True, dtype=torch.float32)
        with optimizer.flushed_weights() if model_file == "flushed" else nullcontext():
            saved = both(model, optimizer)
        optimizer.close()
        model, optimizer = resumed(setting, saved, with_module=True, dtype=torch.float32, first="optimizer")
        first_rows = [weight[:1].zero_() for weight in map(Tensor.detach, model.parameters())]
        if saves:
            with optimizer.flushed_weights():
                assert not any(bool(row.count_nonzero()) for row in first_rows)
                saved = both(model, optimizer)
            optimizer.close()
            model, optimizer = resumed(setting, saved, with_module=True, dtype=torch.float32, first="optimizer")
        train(model, optimizer, STEPS)
        optimizer.close()
        results.append(weights_of(model))
    assert same(*results)


def test_a_state_that_is_saved_again_before_the_model_is_loaded_keeps_the_mark(setting: Setting) -> None:
    """As Accelerate does, which saves and loads an optimizer where it prepares one."""
    _, ended = uninterrupted(setting, with_module=True, dtype=torch.float32)
    model, optimizer = begun(setting, 6, with_module=True, dtype=torch.float32)
    with optimizer.flushed_weights():
        saved = {"optimizer": optimizer.state_dict(), "model": copy.deepcopy(model.state_dict())}
    optimizer.close()
    model, optimizer = resumed(setting, saved, with_module=True, dtype=torch.float32, first="optimizer")
    optimizer.load_state_dict(optimizer.state_dict())
    model.load_state_dict(saved["model"])
    train(model, optimizer, STEPS)
    optimizer.close()
    assert same(weights_of(model), ended)


@pytest.mark.parametrize("model_file", ["flushed", "as training sees it"])
def test_what_is_written_after_loading_counts(setting: Setting, model_file: str) -> None:
    results = []
    for saves in (True, False):
        model, optimizer = begun(setting, 6, with_module=True, dtype=torch.float32)
        if saves:
            with optimizer.flushed_weights() if model_file == "flushed" else nullcontext():
                saved = {"optimizer": optimizer.state_dict(), "model": copy.deepcopy(model.state_dict())}
            optimizer.close()
            model, optimizer = resumed(setting, saved, with_module=True, dtype=torch.float32, first="optimizer")
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(0.5)
        train(model, optimizer, STEPS)
        optimizer.close()
        results.append(weights_of(model))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_an_error_within_leaves_the_training_as_it_was(setting: Setting) -> None:
    model, optimizer = begun(setting, 6, with_module=True, dtype=torch.float32)
    seen = weights_of(model)
    with pytest.raises(OSError, match="no room"), optimizer.flushed_weights():
        raise OSError("no room")
    assert same(weights_of(model), seen)
    optimizer.close()


class Attending(nn.Module):
    """Gives several weights to one function, of which one belongs to a layer that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(2, 5, 8, generator=generator)
        found: Tensor = self.attention(x, x, x, need_weights=False)[0]
        return found.square().mean()


def test_weights_that_one_function_takes_together_are_all_given_back() -> None:
    def made() -> tuple[nn.Module, ZenFlowAdamW]:
        torch.manual_seed(3)
        model = Attending()
        config = ZenFlowConfig(topk_ratio=0.25, update_interval=4)
        return model, ZenFlowAdamW(model.parameters(), lr=1e-2, config=config, module=model)

    def go_on(model: nn.Module, optimizer: ZenFlowAdamW, last: int) -> list[float]:
        losses = []
        for step in range(optimizer.steps, last):
            loss = model(step)
            losses.append(loss.item())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return losses

    model, optimizer = made()
    go_on(model, optimizer, 7)
    with optimizer.flushed_weights() as steps:
        assert steps
        files = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    again, resumed = made()
    again.load_state_dict(files[0])
    resumed.load_state_dict(files[1])
    assert go_on(again, resumed, 10) == go_on(model, optimizer, 10)
    assert same(weights_of(again), weights_of(model))
    for one in (optimizer, resumed):
        one.close()


Save = Callable[[nn.Module, ZenFlowAdamW], dict[str, Any]]
LATE = ZenFlowConfig(topk_ratio=0.25, update_interval=4, select_interval=4, bucket_bytes=256)
EXACT = ZenFlowConfig(topk_ratio=0.25, update_interval=1, overlap_step=False, bucket_bytes=256)


def plainly(model: nn.Module, _: ZenFlowAdamW) -> dict[str, Any]:
    return copy.deepcopy(model.state_dict())


def within_a_wrapper(model: nn.Module, _: ZenFlowAdamW) -> dict[str, Any]:
    whole = copy.deepcopy(nn.Sequential(model).state_dict())
    return {name.removeprefix("0."): value for name, value in whole.items()}


def by_torchs_function(model: nn.Module, _: ZenFlowAdamW) -> dict[str, Any]:
    return copy.deepcopy(get_model_state_dict(model))


def pickled(model: nn.Module, _: ZenFlowAdamW) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(model, file)
    loaded: dict[str, Any] = torch.load(io.BytesIO(file.getvalue()), weights_only=False).state_dict()
    return loaded


def read_directly(model: nn.Module, _: ZenFlowAdamW) -> dict[str, Any]:
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def before_a_flush(model: nn.Module, optimizer: ZenFlowAdamW) -> dict[str, Any]:
    saved = plainly(model, optimizer)
    optimizer.flush()
    optimizer.state_dict()
    return saved


def after_a_checkpoint(model: nn.Module, optimizer: ZenFlowAdamW) -> dict[str, Any]:
    """As a Trainer that saves at its last step, and `save_model()` after it."""
    plainly(model, optimizer)
    optimizer.state_dict()
    return plainly(model, optimizer)


def after_a_look(model: nn.Module, optimizer: ZenFlowAdamW) -> dict[str, Any]:
    """As `save_pretrained` and some kernels, which ask for memory to write to and only read."""
    for parameter in model.parameters():
        parameter.data_ptr()
    return plainly(model, optimizer)


def after_a_flush(model: nn.Module, optimizer: ZenFlowAdamW) -> dict[str, Any]:
    plainly(model, optimizer)
    optimizer.flush()
    return plainly(model, optimizer)


def flushed_for_the_time(model: nn.Module, optimizer: ZenFlowAdamW) -> dict[str, Any]:
    with optimizer.flushed_weights():
        return plainly(model, optimizer)


def looked_at_before(model: nn.Module, optimizer: ZenFlowAdamW) -> dict[str, Any]:
    """As for an evaluation by a copy, before the save or after it."""
    plainly(model, optimizer)
    saved = flushed_for_the_time(model, optimizer)
    plainly(model, optimizer)
    return saved


def after_its_end(model: nn.Module, optimizer: ZenFlowAdamW) -> dict[str, Any]:
    optimizer.close()
    return plainly(model, optimizer)


def beside_the_state(model: nn.Module, optimizer: ZenFlowAdamW) -> dict[str, Any]:
    return {"model": plainly(model, optimizer), "optimizer": optimizer.state_dict()}


def beside_the_state_before(model: nn.Module, optimizer: ZenFlowAdamW) -> dict[str, Any]:
    return {"optimizer": optimizer.state_dict(), "model": plainly(model, optimizer)}


def saved_at_the_end(
    save: Save, caplog: pytest.LogCaptureFixture, config: ZenFlowConfig = LATE, steps: int = 6
) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """What was saved after the last step, the weights in the end, and what was said."""
    caplog.clear()
    model = seeded(Stack, torch.float32, depth=1)
    optimizer = ZenFlowAdamW(model.parameters(), lr=0.02, config=config, module=model)
    train(model, optimizer, 3)
    plainly(model, optimizer)  # in mid-run: it says nothing of the end
    train(model, optimizer, steps)
    saved = save(model, optimizer)
    del optimizer
    gc.collect()
    return saved, model.state_dict(), [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize("steps", [6, 8])  # within a window, and where one is closed: all of its updates are late then
@pytest.mark.parametrize(
    "save", [plainly, within_a_wrapper, by_torchs_function, before_a_flush, after_a_checkpoint, after_a_look]
)
def test_a_last_save_that_lacks_updates_is_told_at_the_end(
    save: Save, steps: int, caplog: pytest.LogCaptureFixture
) -> None:
    saved, last, said = saved_at_the_end(save, caplog, steps=steps)
    assert saved.keys() == last.keys()
    assert any(not torch.equal(saved[name], last[name]) for name in last)
    assert len(said) == 1
    assert said[0] == (
        f"what model.state_dict() gave after step {steps}, the last one, lacks updates that were still pending: "
        "call the optimizer's flush() before the last save, or save within its flushed_weights()"
    )


@pytest.mark.parametrize("save", [pickled, read_directly])
def test_other_ways_to_read_weights_lack_updates_and_are_not_noticed(
    save: Save, caplog: pytest.LogCaptureFixture
) -> None:
    saved, last, said = saved_at_the_end(save, caplog)
    assert any(not torch.equal(saved[name], last[name]) for name in last)
    assert not said


@pytest.mark.parametrize("save", [after_a_flush, flushed_for_the_time, looked_at_before, after_its_end])
def test_a_last_save_that_lacks_nothing_is_not_spoken_of(save: Save, caplog: pytest.LogCaptureFixture) -> None:
    saved, last, said = saved_at_the_end(save, caplog)
    assert all(torch.equal(saved[name], last[name]) for name in last)
    assert not said


@pytest.mark.parametrize("save", [plainly, within_a_wrapper, by_torchs_function, read_directly])
def test_weights_that_arrive_when_they_are_used_lack_nothing(save: Save, caplog: pytest.LogCaptureFixture) -> None:
    saved, last, said = saved_at_the_end(save, caplog, EXACT)
    assert all(torch.equal(saved[name], last[name]) for name in last)
    assert not said


def test_weights_that_were_loaded_after_the_last_step_lack_none_of_its_updates(
    caplog: pytest.LogCaptureFixture,
) -> None:
    best = copy.deepcopy(seeded(Stack, torch.float32, depth=1).state_dict())

    def load_the_best(model: nn.Module, optimizer: ZenFlowAdamW) -> dict[str, Any]:
        plainly(model, optimizer)  # what is saved of the last step is told once, and that of the best is not
        model.load_state_dict(best)
        return plainly(model, optimizer)

    def first(model: nn.Module, optimizer: ZenFlowAdamW) -> dict[str, Any]:
        model.load_state_dict(best)
        return plainly(model, optimizer)

    saved, _, said = saved_at_the_end(first, caplog)
    assert all(torch.equal(saved[name], best[name]) for name in best)
    assert not said
    assert len(saved_at_the_end(load_the_best, caplog)[2]) == 1


IN_TIME = replace(LATE, overlap_step=False)
WHOLE = replace(LATE, apply_lag=4, topk_ratio=0.5)


@pytest.mark.parametrize(
    ("config", "dtype", "steps"),
    combinations(
        config=[LATE, IN_TIME, WHOLE],
        dtype=[torch.float32, torch.bfloat16],
        steps=(2, 3, 5, 7, 11)[:: fast(3, all_of=1)],
    ),
)
def test_who_has_only_looked_at_memory_has_loaded_nothing(
    steps: int, dtype: torch.dtype, config: ZenFlowConfig, caplog: pytest.LogCaptureFixture
) -> None:
    """At a step where nothing is in flight, too, and nothing was kept of what the weights were."""

    def lacking(change: Callable[[torch.Tensor], object]) -> tuple[bool, bool]:
        """Whether what is saved after all weights were changed lacks updates, and whether that was told."""
        caplog.clear()
        model = seeded(Stack, dtype, depth=1)
        optimizer = ZenFlowAdamW(model.parameters(), lr=0.02, config=config, module=model)
        train(model, optimizer, steps)
        for parameter in model.parameters():
            change(parameter)
        saved = plainly(model, optimizer)
        pending = optimizer._training.model.has_pending
        del optimizer
        gc.collect()
        lacks = pending and any(not torch.equal(saved[name], value) for name, value in model.state_dict().items())
        return lacks, bool(caplog.records)

    for look in (lambda _: None, torch.Tensor.data_ptr):
        lacks, told = lacking(look)
        assert told == lacks
    for write in (lambda one: one.data.fill_(0.5), lambda one: setattr(one, "data", torch.ones_like(one))):
        assert not lacking(write)[1]


def test_the_best_weights_may_hold_a_layer_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    """One that is not used: in what is saved then, nothing is missing."""
    model = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 8), nn.Linear(8, 16))
    optimizer = ZenFlowAdamW(model.parameters(), lr=0.02, weight_decay=0.0, config=LATE, module=model)
    best: dict[str, Any] = {}
    for step in range(6):
        hidden = model[1](model[0](torch.randn(4, 16)))
        (hidden.square().mean() + 0 * model[2](hidden).sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 2:
            best = flushed_for_the_time(model, optimizer)
    assert torch.equal(best["2.weight"], dict(model.named_parameters())["2.weight"])
    model.load_state_dict(best)
    plainly(model, optimizer)
    assert optimizer._training.model.has_pending
    del optimizer
    gc.collect()
    assert not caplog.records


class OnceWaited(Transfer):
    """A transfer that has not arrived before somebody waits for it."""

    def __init__(self, of: Transfer) -> None:
        self.begin, self.end, self.nbytes = of.begin, of.end, of.nbytes
        self._of, self._waited = of, False

    def wait(self) -> None:
        self._of.wait()
        self._waited = True

    def done(self) -> bool:
        return self._waited


def test_a_step_that_was_skipped_is_not_pending(caplog: pytest.LogCaptureFixture) -> None:
    model = seeded(Stack, torch.float32, depth=1)
    optimizer = ZenFlowAdamW(model.parameters(), lr=0.02, config=replace(LATE, skip_nonfinite=True), module=model)
    train(model, optimizer, 5)
    optimizer.flush()
    model(tokens_of(5)).mul(float("inf")).backward()
    optimizer.step()
    for weight in optimizer._training.model.weights:
        for entry in weight.pending_entries():
            assert entry.control is not None
            entry.control.transfer = OnceWaited(entry.control.transfer)  # ranks hear of it at other times
    with optimizer.torch_state():
        optimizer.state_dict()
    model.state_dict()
    del optimizer
    gc.collect()
    assert not caplog.records


@pytest.mark.parametrize("save", [beside_the_state, beside_the_state_before])
def test_a_checkpoint_has_what_is_pending_in_the_optimizers_part(save: Save, caplog: pytest.LogCaptureFixture) -> None:
    saved, last, said = saved_at_the_end(save, caplog)
    assert not said
    model = seeded(Stack, torch.float32, depth=1)
    optimizer = ZenFlowAdamW(model.parameters(), lr=0.02, config=LATE, module=model)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    optimizer.close()
    assert all(torch.equal(value, last[name]) for name, value in model.state_dict().items())
