"""Waits that are left to the forward: when they happen, and that they change no bit.

The host is held at a gate that the test opens, so whoever waits too early would wait for ever; the gate gives up after
a while and says so.
"""

from __future__ import annotations

import copy
import io
import pickle
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.support.tiers import fast
from tests.support.zenflow.cases import same_bits
from tests.support.zenflow.small import Block, Stack, assert_same_run, seeded, tokens_of, train
from zenflow import CpuDevice, HostEngineError, ZenFlowAdamW, ZenFlowConfig
from zenflow.device import HostSpan, Mark, Transfer, in_backward

# Windows close at even steps, and all of a window is due after the next step, which does not close one. The first close
# waits for the host, since columns change tier there; so it is held from the second on.
CONFIG = ZenFlowConfig(topk_ratio=0.25, update_interval=2, apply_lag=1, select_interval=1000)
GIVE_UP_S = 5.0


class GatedHost(CpuDevice):
    """What the host has done counts as done behind a gate. Notes in which phase of training its results were taken."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.gate.set()
        self.broken = False
        self.phase = "start"
        self.taken: list[str] = []

    def host_work(
        self, finish: Callable[[], HostSpan], nbytes: int, inputs: Sequence[Transfer], submitted: Mark
    ) -> HostSpan:
        span = finish()
        if not self.gate.wait(GIVE_UP_S):
            raise TimeoutError(f"the gate stayed shut during {self.phase}")
        if self.broken:
            raise OSError("no memory left")
        return span

    def hold(self, optimizer: ZenFlowAdamW) -> None:
        optimizer._training.engine.drain()  # what comes to the gate is of the step to come, however slow the machine
        self.gate.clear()
        # Else the next step's gradients would have to wait for room in the log, which only the host can make.
        optimizer._training.runtime.log._pool.resize(1 << 22)

    def join(self, transfer: Transfer, tensor: Tensor) -> None:
        self.taken.append("backward" if in_backward() else self.phase)
        super().join(transfer, tensor)


class Trainer:
    """Holds the host up from a closing step to the forward after the step in which its window is due."""

    def __init__(self, model: nn.Module, config: ZenFlowConfig = CONFIG, *, holds: bool = True) -> None:
        self.model, self.holds = model, holds
        self.device = GatedHost()
        # Before the optimizer's hooks, and not a bound method, which would be copied along with the model.
        model.register_forward_pre_hook(lambda *_: self._begin_forward())
        self.optimizer = ZenFlowAdamW(model.parameters(), lr=0.02, config=config, module=model, device=self.device)
        self.steps = 0

    def _begin_forward(self) -> None:
        self.device.phase = "forward"
        if self.late:
            self.device.gate.set()

    @property
    def buckets(self) -> int:
        """Of the model."""
        return self.optimizer._training.model.windows.buckets

    @property
    def late(self) -> bool:
        """Whether a window is due that the host has not begun."""
        return self.steps > 4 and self.steps % 2 == 1

    def step(self) -> Tensor:
        self.optimizer.zero_grad()
        loss: Tensor = self.model(tokens_of(self.steps + 1))
        self.device.phase = "backward"
        loss.backward()
        self.device.phase = "step"
        self.steps += 1
        if self.holds and self.steps > 2 and self.steps % 2 == 0:
            self.device.hold(self.optimizer)
        self.optimizer.step()
        self.device.phase = "between"
        return loss.detach().clone()

    def finish(self) -> list[Tensor]:
        self.device.gate.set()
        self.optimizer.close()
        return [parameter.detach().clone() for parameter in self.model.parameters()]


@pytest.fixture(params=[None, True, False], ids=["plain", "reentrant", "checkpointed"])
def reentrant(request: pytest.FixtureRequest) -> bool | None:
    value: bool | None = request.param
    return value


@pytest.mark.parametrize("bucket_bytes", [1, 300, 1 << 20], ids=["a column", "some weights", "all weights"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_late_host_changes_no_bit_and_is_waited_for_in_forward(
    reentrant: bool | None, dtype: torch.dtype, bucket_bytes: int
) -> None:
    config = replace(CONFIG, bucket_bytes=bucket_bytes)
    expected = train(seeded(Stack, dtype, reentrant=reentrant), config, steps=9, with_module=False)
    trainer = Trainer(seeded(Stack, dtype, reentrant=reentrant), config)
    losses = []
    for step in range(1, 10):
        trainer.device.taken.clear()
        losses.append(trainer.step())
        # Windows of steps 4 and 6 are due after 5 and 7: each bucket, in the forward of the next step.
        if step >= 5:
            assert trainer.device.taken == (["forward"] * trainer.buckets if step in (6, 8) else []), step
    assert_same_run([*losses, *trainer.finish()], expected)


class Recomputed(nn.Module):
    """Every weight is in a checkpointed layer, so a backward may follow a step."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(8) for _ in range(2))
        self.reentrant = reentrant

    def forward(self, tokens: Tensor) -> Tensor:
        x = nn.functional.one_hot(tokens, 11)[..., :8].float().requires_grad_()
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return x.square().mean()


@pytest.mark.parametrize("mode", [True, False], ids=["reentrant", "checkpointed"])
def test_recomputation_after_a_step_sees_its_weights(mode: bool) -> None:
    """As with any optimizer: the forwards that backward runs again read what the step has made of the weights."""
    gradients = []
    for waits in (True, False):
        trainer = Trainer(seeded(Recomputed, reentrant=mode))
        for _ in range(4):
            trainer.step()
        loss = trainer.model(tokens_of(9))
        trainer.step()
        assert trainer.late
        if waits:
            trainer.device.gate.set()
            trainer.model.state_dict()
        else:
            open_soon(trainer)
        trainer.optimizer.zero_grad()
        trainer.device.phase = "backward"
        loss.backward()
        assert trainer.device.taken[-trainer.buckets :] == ["between" if waits else "backward"] * trainer.buckets
        trainer.step()
        gradients.append(trainer.finish())
    assert_same_run(*gradients)


class Aloof(nn.Module):
    """Reads another module's weight, whose own forward never runs."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.mine = nn.Linear(8, 8)
        self.read_by_others = nn.Linear(8, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        x = torch.tanh(self.mine(self.embedding(tokens)))
        logits: Tensor = nn.functional.linear(x, self.read_by_others.weight)
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens.roll(1, dims=1).flatten())


def test_a_weight_that_another_module_reads_is_waited_for_in_step() -> None:
    expected = train(seeded(Aloof), CONFIG, steps=7, with_module=False)
    trainer = Trainer(seeded(Aloof), holds=False)
    losses = []
    for step in range(1, 8):
        trainer.device.taken.clear()
        # The host is behind only while step 5 runs: until then the optimizer must not come back.
        if step == 5:
            trainer.device.hold(trainer.optimizer)
            opener = threading.Timer(0.2, trainer.device.gate.set)
            opener.start()
        losses.append(trainer.step())
        assert "step" in trainer.device.taken or step not in (3, 5, 7)
    assert_same_run([*losses, *trainer.finish()], expected)


def held(build: Callable[..., nn.Module] = Stack) -> Trainer:
    """A trainer after step 5, with the window of step 4 due and the host shut."""
    trainer = Trainer(seeded(build))
    for _ in range(5):
        trainer.step()
    assert trainer.late
    assert not trainer.device.gate.is_set()
    return trainer


def complete() -> dict[str, Tensor]:
    """The weights after step 5 where nothing is left to a forward."""
    model = seeded(Stack)
    optimizer = ZenFlowAdamW(model.parameters(), lr=0.02, config=CONFIG)
    for step in range(1, 6):
        model(tokens_of(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer.abandon()
    return state


def assert_complete(state: dict[str, Tensor]) -> None:
    expected = complete()
    assert {name for name, value in expected.items() if not bool(same_bits(value, state[name]).all())} == set()


def open_soon(trainer: Trainer) -> None:
    """Open the gate from another thread, for calls that have to wait."""
    threading.Timer(0.05, trainer.device.gate.set).start()


def test_weights_are_late_until_somebody_looks() -> None:
    trainer = held()
    expected = complete()
    with torch._C.DisableTorchFunctionSubclass():  # as no script looks
        now = {name: value.detach().clone() for name, value in trainer.model.named_parameters()}
    assert [name for name in now if not bool(same_bits(now[name], expected[name]).all())] == [
        name for name in now if name.endswith("weight")
    ]
    open_soon(trainer)
    assert_complete({name: value.detach() for name, value in trainer.model.named_parameters()})
    trainer.finish()


def buffer_of(weight: nn.Parameter) -> io.BytesIO:
    torch.save(weight, file := io.BytesIO())
    file.seek(0)
    return file


def set_to(*source: Any) -> Tensor:
    made: Any = torch.empty(0)  # its declared overloads know neither every storage nor tensors
    return cast(Tensor, made.set_(*source))


# What shows all of a weight's values.
LOOKS: dict[str, Callable[[nn.Parameter], Any]] = {
    "data": lambda weight: weight.data,
    "detach": lambda weight: weight.detach(),
    "clone": lambda weight: weight.clone(),
    "deepcopy": copy.deepcopy,
    "pickle": lambda weight: pickle.loads(pickle.dumps(weight)),
    "save": lambda weight: torch.load(buffer_of(weight), weights_only=True),
    "tolist": lambda weight: torch.tensor(weight.tolist()),
    "numpy": lambda weight: torch.from_numpy(weight.detach().numpy()),
    "array": lambda weight: torch.from_numpy(np.asarray(weight.detach())),
    "dlpack": lambda weight: torch.utils.dlpack.from_dlpack(weight.detach()),
    "copy_": lambda weight: torch.empty(weight.shape).copy_(weight.data),
    "foreach": lambda weight: torch._foreach_mul([weight], 1.0)[0],
    "index": lambda weight: torch.stack([weight[row] for row in range(len(weight))]),
    "matmul": lambda weight: torch.eye(len(weight)) @ weight,
    "cat": lambda weight: torch.cat([weight[:1], weight[1:]]),
    "functional": lambda weight: nn.functional.embedding(torch.arange(len(weight)), weight),
    "lerp": lambda weight: torch._foreach_lerp([torch.zeros(weight.shape)], [weight], 1.0)[0],
    "vector": lambda weight: nn.utils.parameters_to_vector([weight]).view(weight.shape),
    "storage": lambda weight: (
        torch.tensor(weight.untyped_storage().tolist(), dtype=torch.uint8).view(torch.float32).view(weight.shape)
    ),
    "set": lambda weight: set_to(weight.detach()),
    "own method": lambda weight: nn.Parameter.__deepcopy__(weight, {}),
}


KINDS = ("embedding.weight", "layers.1.inner.weight")


@pytest.mark.parametrize(
    ("look", "kind"),
    fast([(look, KINDS[number % 2]) for number, look in enumerate(LOOKS)], all_of=list(product(LOOKS, KINDS))),
)
def test_whoever_looks_at_a_late_weight_sees_the_step(look: str, kind: str) -> None:
    trainer = held()
    weight = trainer.model.get_parameter(kind)
    open_soon(trainer)
    seen = LOOKS[look](weight)
    assert type(weight) is nn.Parameter
    assert type(seen) in (Tensor, nn.Parameter)
    assert bool(same_bits(seen.detach(), complete()[kind]).all())
    trainer.finish()


def storages_of(model: nn.Module) -> dict[str, torch.UntypedStorage]:
    return {name: parameter.untyped_storage() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("hold", [nn.Module.state_dict, storages_of])
def test_a_weight_whose_memory_somebody_holds_is_waited_for_in_step(hold: Callable[[nn.Module], Any]) -> None:
    trainer = Trainer(seeded(Stack), holds=False)
    for _ in range(4):
        trainer.step()
    aliases = hold(trainer.model)
    trainer.device.taken.clear()
    trainer.step()
    assert trainer.device.taken == ["step"] * trainer.buckets
    if hold is storages_of:
        shapes = {name: parameter.shape for name, parameter in trainer.model.named_parameters()}
        aliases = {name: set_to(one, 0, shapes[name]) for name, one in aliases.items()}
    assert_complete(aliases)
    trainer.finish()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_an_evaluation_right_after_a_step_sees_the_new_weights(mode: Callable[[], Any]) -> None:
    expected_model = seeded(Stack)
    expected_model.load_state_dict(complete())
    with torch.no_grad():
        expected = expected_model.eval()(tokens_of(50))
    trainer = held()
    trainer.model.eval()
    with mode():
        loss = trainer.model(tokens_of(50)).detach().clone()  # a graph that lives on would hold the weights' memory
    trainer.model.train()
    assert bool(same_bits(loss.detach(), expected).all())
    assert trainer.device.taken[-trainer.buckets :] == ["forward"] * trainer.buckets
    for _ in range(4):
        trainer.step()
    assert_same_run(trainer.finish(), train(seeded(Stack), CONFIG, steps=9, with_module=False)[9:])


def test_a_step_without_a_forward_waits_itself() -> None:
    trainer = held()
    open_soon(trainer)
    for parameter in trainer.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    trainer.device.taken.clear()
    trainer.device.phase = "step"
    trainer.optimizer.step()
    assert trainer.device.taken[: trainer.buckets] == ["step"] * trainer.buckets
    trainer.finish()


def test_an_error_of_a_late_host_is_raised_in_forward() -> None:
    trainer = held()
    trainer.device.broken = True  # the job at the gate included
    with pytest.raises(HostEngineError, match=r"embedding\.weight and 5 more failed: no memory left"):
        trainer.step()
    assert trainer.device.phase == "forward"
    trainer.optimizer.abandon()
