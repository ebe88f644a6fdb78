"""Scripts that read and write weights as they like: each reads the weights of that step, and is obeyed."""

from __future__ import annotations

import copy
import gc
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, parametrizations, parametrize, prune, vector_to_parameters
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.support.oracle import ReferenceAdamW
from tests.support.zenflow.script_cases import (
    SETTINGS,
    Run,
    Script,
    Setting,
    assert_same_reads,
    oracle,
    ours,
    setting,
    with_module,
)
from tests.support.zenflow.small import Flat, Stack, seeded, tokens_of
from zenflow import UnsupportedError, ZenFlowError
from zenflow.standin import GradientPlaceholder

__all__ = ["setting", "with_module"]


def stack() -> nn.Module:
    return seeded(Stack, depth=1)


def flat() -> Flat:
    model = seeded(Flat)
    assert isinstance(model, Flat)
    return model


def compare(script: Script, setting: Setting, *, with_module: bool, build: Callable[[], nn.Module] = stack) -> None:
    runs = []
    for make in (ours, oracle):
        run = Run(build(), make(setting, with_module=with_module))
        script(run)
        run.note(run.weights)
        if isinstance(run.optimizer, torch.optim.AdamW):
            run.note(run.weights)
        else:
            run.optimizer.flush()
            run.note(run.weights)
        runs.append(run)
    runs[0].optimizer.close()
    assert_same_reads(*runs)


# --- reads -----------------------------------------------------------------------------------------------------------


def test_every_way_to_read_sees_the_step(setting: Setting, with_module: bool) -> None:
    def script(run: Run) -> None:
        for _ in range(6):
            run.step()
            run.note([parameters_to_vector(run.model.parameters())])
            run.step()
            run.note([run.weights[0][1, 2], *copy.deepcopy(run.model).parameters()])
            run.step()
            run.note(run.model.state_dict().values())
            run.step()
            run.note(torch._foreach_norm([weight.data for weight in run.weights]))
            run.step()
            run.note([torch.tensor(weight.tolist()) for weight in run.weights])

    compare(script, setting, with_module=with_module)


def test_an_average_of_weights(setting: Setting, with_module: bool) -> None:
    def script(run: Run) -> None:
        average = AveragedModel(run.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        mine = [weight.detach().clone() for weight in run.weights]
        for _ in range(9):
            run.step()
            average.update_parameters(run.model)
            for kept, weight in zip(mine, run.weights, strict=True):
                kept.mul_(0.9).add_(weight.data, alpha=0.1)
        run.note(average.parameters())
        run.note(mine)

    compare(script, setting, with_module=with_module)


def test_a_penalty_that_is_computed_before_the_forward(setting: Setting, with_module: bool) -> None:
    def script(run: Run) -> None:
        for _ in range(9):
            penalty = 0.1 * sum(weight.square().sum() for weight in run.weights)
            (penalty + run.loss()).backward()
            run.take()
            run.optimizer.zero_grad()

    compare(script, setting, with_module=with_module)


@pytest.mark.parametrize("normed", ["hook", "parametrization", "spectral"])
@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated:FutureWarning")
def test_weights_that_are_computed_from_others(setting: Setting, with_module: bool, normed: str) -> None:
    def build() -> nn.Module:
        model = flat()
        if normed == "hook":
            nn.utils.weight_norm(model.head)
        elif normed == "parametrization":
            parametrizations.weight_norm(model.head)
        else:
            nn.utils.spectral_norm(model.head)
        return model

    compare(lambda run: run.train(9), setting, with_module=with_module, build=build)


def test_aliases_that_are_held_over_steps(setting: Setting, with_module: bool) -> None:
    def script(run: Run) -> None:
        run.train(2)
        aliases = [*run.model.state_dict().values(), run.weights[0].detach().view(-1)[3:9]]
        for _ in range(6):
            run.step()
            run.note(aliases)

    compare(script, setting, with_module=with_module)


def test_a_functional_call_with_weights_of_its_own(setting: Setting, with_module: bool) -> None:
    def script(run: Run) -> None:
        for _ in range(6):
            run.step()
            half = {name: weight * 0.5 for name, weight in run.model.named_parameters()}
            (
                run.loss() + torch.func.functional_call(run.model, half, (torch.zeros(1, 3, dtype=torch.long),))
            ).backward()
            run.take()
            run.optimizer.zero_grad()

    compare(script, setting, with_module=with_module)


def test_another_thread_reads(setting: Setting) -> None:
    def script(run: Run) -> None:
        for _ in range(6):
            run.step()
            reader = threading.Thread(target=lambda: run.note(weight.clone() for weight in run.weights))
            reader.start()
            reader.join()

    compare(script, setting, with_module=True)


@pytest.fixture
def _threads_take_turns_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("_threads_take_turns_often")
def test_another_thread_reads_during_the_next_forward(setting: Setting) -> None:
    def script(run: Run) -> None:
        for _ in range(12):
            run.step()
            reader = threading.Thread(target=lambda: run.note(weight.detach() for weight in run.weights))
            reader.start()
            run.loss()
            reader.join()

    compare(script, setting, with_module=True, build=lambda: seeded(Stack, depth=2))


def test_another_process_reads_shared_memory(setting: Setting, with_module: bool) -> None:
    def build() -> nn.Module:
        return stack().share_memory()

    def script(run: Run) -> None:
        storage: Any = torch.UntypedStorage
        handles = [storage._share_fd_cpu_(weight.untyped_storage()) for weight in run.weights]
        mapped = [torch.tensor([]).set_(storage._new_shared_fd_cpu(*handle)) for handle in handles]  # as a process does
        for _ in range(9):
            run.step()
            run.note(mapped)

    compare(script, setting, with_module=with_module, build=build)


def test_a_compiled_twin_shares_the_weights(setting: Setting, with_module: bool) -> None:
    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 8)
            self.outer = nn.Linear(8, 5)

        def forward(self, tokens: Tensor) -> Tensor:
            loss: Tensor = self.outer(torch.tanh(self.inner(tokens[:, :3].float()))).square().mean()
            return loss

    def script(run: Run) -> None:
        for _ in range(9):
            run.step()
            with torch.no_grad():
                run.note([twins[-1](tokens_of(99))])

    twins: list[nn.Module] = []

    def build() -> nn.Module:
        model = seeded(Small)
        twins.append(torch.jit.script(model))  # reads weights in C++, without torch functions
        return model

    compare(script, setting, with_module=with_module, build=build)


# --- writes ----------------------------------------------------------------------------------------------------------


def clamp(weight: nn.Parameter) -> None:
    with torch.no_grad():
        weight.clamp_(-0.3, 0.3)


def clamp_data(weight: nn.Parameter) -> None:
    weight.data.clamp_(-0.3, 0.3)


def rebind(weight: nn.Parameter) -> None:
    weight.data = weight.data.clamp(-0.3, 0.3)


def write_a_view(weight: nn.Parameter) -> None:
    with torch.no_grad():
        weight.view(-1)[::2] *= 0.5


def write_by_index(weight: nn.Parameter) -> None:
    weight.data[0] = 0.1


def write_through_numpy(weight: nn.Parameter) -> None:
    weight.detach().numpy()[...] *= 0.9


WRITES = [clamp, clamp_data, rebind, write_a_view, write_by_index, write_through_numpy]


@pytest.mark.parametrize("write", WRITES, ids=lambda write: write.__name__)
def test_every_way_to_write_is_obeyed(
    setting: Setting, with_module: bool, write: Callable[[nn.Parameter], None]
) -> None:
    def script(run: Run) -> None:
        for step in range(1, 12):
            run.step()
            if step % 3 != 0:
                for weight in run.weights:
                    write(weight)
                run.note(run.weights)

    compare(script, setting, with_module=with_module)


@pytest.mark.parametrize("write", WRITES, ids=lambda write: write.__name__)
def test_a_write_between_backward_and_step(
    setting: Setting, with_module: bool, write: Callable[[nn.Parameter], None]
) -> None:
    def script(run: Run) -> None:
        for _ in range(9):
            run.loss().backward()
            for weight in run.weights:
                write(weight)
            run.take()
            run.optimizer.zero_grad()
            run.note(run.weights)

    compare(script, setting, with_module=with_module)


def test_what_is_rebound_and_restored_changes_nothing(setting: Setting, with_module: bool) -> None:
    def script(run: Run) -> None:
        for _ in range(6):
            run.step()
            old = [weight.data.clone() for weight in run.weights]
            for weight, value in zip(run.weights, old, strict=True):
                weight.data.add_(1)
                weight.data = value

    compare(script, setting, with_module=with_module)


def test_memory_that_a_weight_had_before_stays_as_it_was(setting: Setting, with_module: bool) -> None:
    def script(run: Run) -> None:
        run.train(3)
        before = [weight.data for weight in run.weights]
        for weight in run.weights:
            weight.data = weight.data * 0.5
        kept = [value.clone() for value in before]
        run.train(5)
        for value, copied in zip(before, kept, strict=True):
            assert torch.equal(value, copied)
        run.note(before)

    compare(script, setting, with_module=with_module)


def test_an_alias_that_is_written_to_steps_later(setting: Setting, with_module: bool) -> None:
    def script(run: Run) -> None:
        run.train(2)
        data = [weight.data for weight in run.weights]
        for _ in range(6):
            run.step()
            torch._foreach_mul_(data, 0.9)
            run.note(run.weights)

    compare(script, setting, with_module=with_module)


def test_an_average_is_swapped_in_and_out(setting: Setting, with_module: bool) -> None:
    def script(run: Run) -> None:
        average = [weight.detach().clone() for weight in run.weights]
        for _ in range(9):
            run.step()
            torch._foreach_lerp_(average, [weight.detach() for weight in run.weights], 0.1)
            backup = [weight.detach().clone() for weight in run.weights]
            with torch.no_grad():
                for weight, value in zip(run.weights, average, strict=True):
                    weight.copy_(value)
                run.note([run.loss()])
                for weight, value in zip(run.weights, backup, strict=True):
                    weight.copy_(value)

    compare(script, setting, with_module=with_module)


def test_sharpness_aware_minimisation(setting: Setting, with_module: bool) -> None:
    def script(run: Run) -> None:
        for _ in range(6):
            run.loss().backward()
            norm = nn.utils.clip_grad_norm_(run.weights, 1e9)
            run.optimizer.zero_grad()
            old = [weight.data.clone() for weight in run.weights]
            with torch.no_grad():
                torch._foreach_add_([*run.weights], float(0.01 / norm))
            run.loss().backward()
            for weight, value in zip(run.weights, old, strict=True):
                weight.data = value
            run.take()
            run.optimizer.zero_grad()

    compare(script, setting, with_module=with_module)


def test_a_vector_of_all_weights_is_loaded(setting: Setting, with_module: bool) -> None:
    def script(run: Run) -> None:
        for _ in range(4):
            run.train(2)
            vector_to_parameters(0.5 * parameters_to_vector(run.weights), run.weights)

    compare(script, setting, with_module=with_module)


def test_a_state_dict_is_loaded(setting: Setting, with_module: bool) -> None:
    def script(run: Run) -> None:
        run.train(3)
        saved = copy.deepcopy(run.model.state_dict())
        for _ in range(3):
            run.train(3)
            run.model.load_state_dict(saved)
        run.train(2)

    compare(script, setting, with_module=with_module)


def test_pruning(setting: Setting, with_module: bool) -> None:
    def script(run: Run) -> None:
        run.train(3)
        assert isinstance(run.model, Flat)
        head = run.model.head
        prune.l1_unstructured(head, "weight", amount=0.5)
        run.train(4)
        prune.remove(head, "weight")
        run.note([head.weight])
        run.train(3)

    compare(script, setting, with_module=with_module, build=flat)


def test_an_embedding_with_a_greatest_norm(setting: Setting, with_module: bool) -> None:
    def build() -> nn.Module:
        model = flat()
        model.embedding.max_norm = 0.5
        return model

    compare(lambda run: run.train(9), setting, with_module=with_module, build=build)


class WritesItself(Flat):
    """Layers that constrain their own weight in their forward."""

    def forward(self, tokens: Tensor) -> Tensor:
        self.head.weight.data = torch.renorm(self.head.weight.data, 2, 0, 0.5)
        self.embedding.weight.data.clamp_(-0.5, 0.5)
        loss: Tensor = super().forward(tokens)
        return loss


def test_a_forward_that_writes(setting: Setting, with_module: bool) -> None:
    compare(lambda run: run.train(9), setting, with_module=with_module, build=lambda: seeded(WritesItself))


def test_a_parametrization_is_added_and_made_final(setting: Setting, with_module: bool) -> None:
    class Half(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return 0.5 * weight

    def script(run: Run) -> None:
        run.train(3)
        head = run.model.get_submodule("head")
        parametrize.register_parametrization(head, "bias", Half())
        run.train(3)
        parametrize.remove_parametrizations(head, "bias", leave_parametrized=False)
        run.train(3)

    compare(script, setting, with_module=with_module)


# --- gradients -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_that_another_backward_leaves_are_thrown_away(
    setting: Setting, with_module: bool, to_none: bool
) -> None:
    """An actor's backward through its critic, or a generator's through its discriminator, after the latter's step."""

    def script(run: Run) -> None:
        for _ in range(9):
            run.optimizer.zero_grad(set_to_none=to_none)
            run.loss().backward()
            run.take()
            (run.loss() * 2).backward()
            run.note(run.weights)

    compare(script, setting, with_module=with_module)


def test_the_sum_with_a_gradient_that_a_step_has_taken_is_refused_where_it_is_used(setting: Setting) -> None:
    run = Run(stack(), ours(setting, with_module=True))
    run.train(2)
    for use in (run.take, lambda: nn.utils.clip_grad_norm_(run.weights, 1.0)):
        run.loss().backward()
        run.take()
        run.loss().backward()
        if any(isinstance(weight.grad, GradientPlaceholder) for weight in run.weights):  # not where nothing leaves
            with pytest.raises(UnsupportedError, match="taken by an earlier step and is needed again"):
                use()
        run.optimizer.zero_grad()
    run.train(2)
    run.optimizer.close()


def test_a_state_that_is_loaded_between_backward_and_step_leaves_the_gradient(
    setting: Setting, with_module: bool
) -> None:
    def script(run: Run) -> None:
        for _ in range(6):
            run.loss().backward()
            if not isinstance(run.optimizer, ReferenceAdamW):
                run.optimizer.load_state_dict(run.optimizer.state_dict())
            run.take()
            run.optimizer.zero_grad()

    compare(script, setting, with_module=with_module)


# --- optimizers ------------------------------------------------------------------------------------------------------


def test_a_second_optimizer_closes_the_first_with_nothing_pending(setting: Setting, with_module: bool) -> None:
    """As where two Trainers train one model in turn, or a notebook's cell is run again."""
    make = ours(setting, with_module=with_module)
    run, alone = Run(stack(), make), Run(stack(), make)
    run.train(6)
    alone.train(6)
    alone.optimizer.close()
    with pytest.warns(UserWarning, match="another ZenFlowAdamW trained some of these parameters: it was closed"):
        second = make(run.model)
    for weight, other in zip(run.weights, alone.weights, strict=True):
        assert torch.equal(weight, other)
    with pytest.raises(ZenFlowError, match="after another optimizer had taken over"):
        run.optimizer.step()
    run.optimizer.state_dict()
    for _ in range(3):
        run.loss().backward()
        second.step()
        second.zero_grad()
    second.close()


def test_optimizers_of_different_weights_leave_each_other_alone(setting: Setting) -> None:
    first, second = (Run(stack(), ours(setting, with_module=True)) for _ in range(2))
    first.train(6)
    second.train(6)
    for run in (first, second):
        run.optimizer.close()
    assert all(torch.equal(a, b) for a, b in zip(first.weights, second.weights, strict=True))


@pytest.mark.parametrize("how", ["dropped", "collected", "collected in another thread"])
def test_an_optimizer_that_goes_out_of_scope_leaves_nothing_pending(
    setting: Setting, with_module: bool, how: str
) -> None:
    make = ours(setting, with_module=with_module)
    run, alone = Run(stack(), make), Run(stack(), make)
    run.train(6)
    alone.train(6)
    alone.optimizer.close()
    if how != "dropped":
        run.optimizer.itself = run.optimizer
    gone = weakref.ref(run.optimizer)
    del run.optimizer
    if how == "collected in another thread":
        collector = threading.Thread(target=gc.collect)
        collector.start()
        collector.join()
    elif how == "collected":
        gc.collect()
    assert gone() is None
    for weight, other in zip(run.weights, alone.weights, strict=True):
        assert torch.equal(weight, other)


def test_what_cannot_be_applied_when_an_optimizer_is_dropped_is_told(caplog: pytest.LogCaptureFixture) -> None:
    setting = next(one for one in SETTINGS if one.name == "windows")
    run = Run(stack(), ours(setting, with_module=True))
    run.train(6)
    run.weights[0].data = run.weights[0].data[:, :4]
    del run.optimizer
    assert [record.getMessage()[:60] for record in caplog.records] == [
        "updates were given up at the end: parameter embedding.weight"
    ]
