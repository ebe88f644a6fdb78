"""DeepSpeed's accessors and `zero_to_fp32`, by zftune's backend and by DeepSpeed alone; run as a process of its own.

    python -m tests.support.zftune.integrations.ds_accessors FOLDER

FOLDER/checks.RANK.json then holds {name of a check: None, or how it failed}. A check trains the same model on the same
data by both where it compares them; both begin with weights that are of the dtype already, so that masters are equal.
"""

from __future__ import annotations

import copy
import json
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from tests.support import upstream_ops
from tests.support.tiers import fast
from tests.support.zftune.integrations.ds_running import ADAMW, ZENFLOW, ds_config
from tests.support.zftune.integrations.ds_worker import WIDTH, Odd, alone, batch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
MOMENTS = ("exp_avg", "exp_avg_sq")
LATE = {**ZENFLOW, "topk_ratio": 0.3, "update_interval": 3}
ROUNDING = {"fp32": 1e-5, "bf16": 2.0**-7, "fp16": 2.0**-10}


class Adapted(nn.Module):
    """A frozen layer with trained factors beside it, as LoRA has them."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down = nn.Linear(WIDTH, 3, bias=False)
        self.up = nn.Linear(3, WIDTH, bias=False)
        self.seen: Tensor
        self.register_buffer("seen", torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.base(x) + self.up(self.down(x))
        return found


MODELS: dict[str, type[nn.Module]] = {"odd": Odd, "adapted": Adapted}
SETTINGS = fast(
    [("odd", "fp32", 1, 2), ("odd", "bf16", 2, 1), ("adapted", "fp16", 2, 2)],
    all_of=[*product(MODELS, DTYPES, (1, 2), (1, 2))],
)
"""Model, dtype, stage, backward passes of a step."""


def local(x: Tensor) -> Tensor:
    rows = len(x) // torch.distributed.get_world_size()
    return x[torch.distributed.get_rank() * rows :][:rows]


class Training:
    """An engine, of ours or of DeepSpeed alone."""

    def __init__(
        self,
        model: str = "odd",
        dtype: str = "fp32",
        stage: int = 2,
        passes: int = 1,
        *,
        ours: bool = True,
        **more: Any,
    ) -> None:
        import deepspeed

        import zftune.integrations.deepspeed as zftune_deepspeed

        zftune_deepspeed.disable()
        if ours:
            zftune_deepspeed.enable()
        torch.manual_seed(3)
        self.model: Any = MODELS[model]().to(DTYPES[dtype])
        self.passes = passes
        rows = 4 // torch.distributed.get_world_size()
        config = ds_config(dtype, stage=stage, optimizer=ADAMW, gradient_accumulation_steps=passes, **more)
        config["train_micro_batch_size_per_gpu"] = rows
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.engine: Any = deepspeed.initialize(model=self.model, model_parameters=trained, config=config)[0]
        self.micro = 0

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        return {name: parameter for name, parameter in self.model.named_parameters() if parameter.requires_grad}

    def loss(self, call: Callable[..., Tensor], x: Tensor) -> Tensor:
        return (call(x.to(next(self.model.parameters()).dtype)).float() - x).square().mean()

    def backward(self, *, direct: bool = False) -> None:
        loss = self.loss(self.engine, local(batch(self.micro)))
        if direct:
            loss.backward()
        else:
            self.engine.backward(loss)
        self.micro += 1

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            for _ in range(self.passes):
                self.backward()
                self.engine.step()


@contextmanager
def trainings(*args: Any, **more: Any) -> Iterator[tuple[Training, Training]]:
    both = Training(*args, **more), Training(*args, ours=False, **more)
    yield both
    for one in both:
        one.engine.destroy()


@contextmanager
def training(*args: Any, **more: Any) -> Iterator[Training]:
    made = Training(*args, **more)
    yield made
    made.engine.destroy()


def near(ours: Tensor | None, theirs: Tensor | None, tolerance: float, what: str) -> None:
    assert ours is not None, what
    assert theirs is not None, what
    assert ours.shape == theirs.shape, what
    least = tolerance * max(0.1, float(theirs.float().abs().max()))
    torch.testing.assert_close(
        ours.detach().clone().float(), theirs.float(), rtol=tolerance, atol=least, msg=lambda m: f"{what}: {m}"
    )


def same_state(ours: Training, theirs: Training, tolerance: float, *, besides: tuple[str, ...] = ()) -> None:
    from deepspeed import utils

    twins = dict(theirs.model.named_parameters())
    for name, parameter in ours.model.named_parameters():
        twin = twins[name]
        if not parameter.requires_grad:
            assert utils.safe_get_full_fp32_param(parameter) is None
            assert utils.safe_get_full_optimizer_state(parameter, "exp_avg") is None
            assert utils.safe_get_full_grad(parameter) is None
        elif not name.startswith(besides):
            master = utils.safe_get_full_fp32_param(parameter)
            assert (master.dtype, master.device) == (torch.float32, parameter.device)
            near(master, utils.safe_get_full_fp32_param(twin), tolerance, name)
            assert torch.equal(master.to(parameter.dtype), parameter.detach()), name
            for key in MOMENTS:
                theirs_state = utils.safe_get_full_optimizer_state(twin, key)
                near(
                    utils.safe_get_full_optimizer_state(parameter, key), theirs_state, 100 * tolerance, f"{name} {key}"
                )


UNUSED = ("unused.",)  # DeepSpeed decays what has no gradient, torch and we leave it alone


def as_deepspeed(folder: Path, model: str, dtype: str, stage: int, passes: int) -> None:
    # Without clipping: DeepSpeed clips by the norm that a gradient had before it was set.
    with trainings(model, dtype, stage, passes, gradient_clipping=0.0) as both:
        state_and_gradients(*both, dtype, every_pass=stage == 1)  # at stage 2 DeepSpeed shows zeros before the last one
        exported(folder, *both, dtype)
        set_and_gone_on_with(*both, dtype)


def state_and_gradients(ours: Training, theirs: Training, dtype: str, *, every_pass: bool) -> None:
    """Masters, moments and gradients are DeepSpeed's."""
    from deepspeed import utils

    for _ in range(3):
        for number in range(ours.passes):
            for one in (ours, theirs):
                one.backward()
            for name, parameter in ours.trained.items() if every_pass or number == ours.passes - 1 else ():
                gradient = utils.safe_get_full_grad(parameter)
                near(gradient, utils.safe_get_full_grad(theirs.trained[name]), 4 * ROUNDING[dtype], name)
            for one in (ours, theirs):
                one.engine.step()
        same_state(ours, theirs, 1e-6 if dtype == "fp32" or ours.engine.global_steps == 1 else 1e-4, besides=UNUSED)


def exported(folder: Path, ours: Training, theirs: Training, dtype: str) -> None:
    """What `zero_to_fp32` makes of the checkpoint is what it makes of DeepSpeed's, by all of its functions."""
    from deepspeed import utils
    from deepspeed.utils import zero_to_fp32

    found: list[dict[str, Tensor]] = []
    for one, name in ((ours, "ours"), (theirs, "theirs")):
        place = str(folder / name)
        one.engine.save_checkpoint(place, client_state={"mine": 7})
        found.append(zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(place))
        one.engine.save_checkpoint(place, tag="bare", save_latest=False, exclude_frozen_parameters=True)
        found.append(zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(place, "bare", True))
    mine, mine_bare, others, others_bare = found
    frozen = {name for name, parameter in ours.model.named_parameters() if not parameter.requires_grad}
    assert set(mine) == set(others) | frozen == set(ours.model.state_dict())  # stage 1 loses what is frozen
    assert set(mine_bare) == set(others_bare) == set(mine) - frozen
    for name, value in others.items():
        assert mine[name].dtype == value.dtype, name
        if not name.startswith(UNUSED):
            near(mine[name], value, 1e-6 if dtype == "fp32" else 1e-4, name)
    for name, parameter in ours.trained.items():
        assert torch.equal(mine[name], utils.safe_get_full_fp32_param(parameter)), name
    place = str(folder / "ours")
    loaded = zero_to_fp32.load_state_dict_from_zero_checkpoint(type(ours.model)(), place)
    zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict(place, str(folder / "converted"))
    converted = torch.load(folder / "converted" / "pytorch_model.bin", weights_only=True)
    assert set(converted) == set(mine)
    for name, value in loaded.state_dict().items():
        assert torch.equal(value, mine[name].to(value.dtype)), name
        assert torch.equal(converted[name], mine[name]), name


def set_and_gone_on_with(ours: Training, theirs: Training, dtype: str) -> None:
    """A master, a moment and a gradient are set, and training goes on as DeepSpeed's does."""
    from deepspeed import utils

    generator = torch.Generator().manual_seed(8)
    shapes = {name: one.shape for name, one in ours.trained.items() if not name.startswith(UNUSED)}
    master, first, second = ({n: torch.rand(s, generator=generator) for n, s in shapes.items()} for _ in range(3))
    for one in (ours, theirs):
        for name in shapes:
            parameter = one.trained[name]
            utils.safe_set_full_fp32_param(parameter, master[name].clone())
            assert torch.equal(utils.safe_get_full_fp32_param(parameter), master[name])
            if one is ours:
                assert torch.equal(parameter.detach(), master[name].to(parameter.dtype))
            parameter.data.copy_(master[name])  # DeepSpeed leaves the weight to the next step
            utils.safe_set_full_optimizer_state(parameter, first[name], "exp_avg")
            utils.safe_set_full_optimizer_state(parameter, second[name], "exp_avg_sq")
            assert torch.equal(utils.safe_get_full_optimizer_state(parameter, "exp_avg_sq"), second[name])
    same_state(ours, theirs, 1e-6, besides=UNUSED)
    for one in (ours, theirs):
        one.step()
        for number in range(one.passes):
            one.backward()
            for name, parameter in one.trained.items() if number == one.passes - 1 else ():
                value = torch.full_like(parameter, 0.25)
                utils.safe_set_full_grad(parameter, value)
                assert torch.equal(utils.safe_get_full_grad(parameter).float(), value.float()), name
            one.engine.step()
        for number in range(one.passes):
            one.backward()
            if number == one.passes - 1 and hasattr(utils, "safe_update_full_grad_vectorized"):
                utils.safe_update_full_grad_vectorized(list(one.trained.values()), lambda g, _: g * 0.5 + 0.125)
            one.engine.step()
    same_state(ours, theirs, 1e-6 if dtype == "fp32" else 1e-3, besides=UNUSED)


def weights_written_past_torch() -> None:
    """What was written to `.data` becomes the master with `refresh_fp32_params()`."""
    from deepspeed import utils

    with trainings("odd", "bf16") as both:
        for one in both:
            one.step(2)
            one.model.outer.weight.data.fill_(0.7)
            one.engine.optimizer.refresh_fp32_params()
            master = utils.safe_get_full_fp32_param(one.model.outer.weight)
            assert torch.equal(master, torch.full_like(master, float(torch.tensor(0.7).bfloat16())))
            one.step()
        # DeepSpeed rounds all masters, we the written ones
        same_state(*both, 2.0**-8, besides=(*UNUSED, "norm.bias", "inner.bias"))


def refusals() -> None:
    """What DeepSpeed refuses at stages 1 and 2."""
    from deepspeed import utils

    with trainings("odd", "bf16") as both:
        for one in both:
            one.step()
            refused(one.model.outer.weight)
        weight = both[0].model.outer.weight
        sentence = "ValueError: Gradients are only available immediately after backward and before engine step"
        assert error_of(lambda: utils.safe_get_full_grad(weight)) == sentence
        assert error_of(lambda: utils.safe_set_full_grad(weight, weight)) == sentence


def refused(weight: nn.Parameter) -> None:
    from deepspeed import utils

    value = torch.zeros_like(weight, dtype=torch.float32)
    for call in (
        lambda: utils.safe_get_local_fp32_param(weight),
        lambda: utils.safe_get_local_grad(weight),
        lambda: utils.safe_get_local_optimizer_state(weight, "exp_avg"),
        lambda: utils.safe_set_local_fp32_param(weight, value),
        lambda: utils.safe_set_local_grad(weight, value),
        lambda: utils.safe_set_local_optimizer_state(weight, value, "exp_avg"),
    ):
        assert error_of(call).startswith("AssertionError: This API is only defined for ZeRO-3"), error_of(call)
    for call in (
        lambda: utils.safe_get_full_optimizer_state(weight, "step"),
        lambda: utils.safe_set_full_optimizer_state(weight, value, "step"),
    ):
        assert error_of(call) == "ValueError: step not found in optimizer state fragment"


def error_of(call: Callable[[], object]) -> str:
    try:
        return f"none, but {call()}"
    except (AssertionError, ValueError) as error:
        return f"{type(error).__name__}: {error}"


def before_the_first_step() -> None:
    """Masters are the fp32 weights before they were rounded, moments zeros; what is set is begun with."""
    from deepspeed import utils

    with training("odd", "fp32", bf16={"enabled": True}) as ours:
        torch.manual_seed(3)
        whole = dict(Odd().named_parameters())
        for name, parameter in ours.trained.items():
            assert parameter.dtype == torch.bfloat16
            assert torch.equal(utils.safe_get_full_fp32_param(parameter), whole[name].detach())
            assert not utils.safe_get_full_optimizer_state(parameter, "exp_avg").any()
        unused = ours.model.unused.weight
        value = torch.rand(3, 5)
        utils.safe_set_full_fp32_param(unused, value)
        ours.step(2)
        assert torch.equal(utils.safe_get_full_fp32_param(unused), value)
        assert torch.equal(unused.detach(), value.bfloat16())


def gradients_that_have_left() -> None:
    """A gradient is whole and exact where it is on the host already, and the step takes what was made of it."""
    from deepspeed import utils

    from zenflow.standin import GradientPlaceholder

    with training("odd", "bf16", zenflow=LATE) as ours, training("odd", "bf16", zenflow=LATE) as alone_:
        left = 0
        for _ in range(7):
            x = batch(ours.micro)
            weights = [p for n, p in ours.trained.items() if not n.startswith(UNUSED)]
            expected = torch.autograd.grad(ours.loss(ours.model, x), weights)
            for one in (ours, alone_):
                one.backward()
            for weight, gradient in zip(weights, expected, strict=True):
                left += isinstance(weight.grad, GradientPlaceholder)
                assert torch.equal(utils.safe_get_full_grad(weight).clone(), gradient)
                utils.safe_set_full_grad(weight, gradient)
                assert torch.equal(utils.safe_get_full_grad(weight), gradient)
            for one in (ours, alone_):
                one.engine.step()
        assert left >= 7
        for one in (ours, alone_):
            one.engine.optimizer.flush()
        for name, weight in ours.trained.items():
            assert torch.equal(
                utils.safe_get_full_fp32_param(weight), utils.safe_get_full_fp32_param(alone_.trained[name])
            ), name


def masters_in_windows() -> None:
    """Reading and setting what was read changes nothing while updates are late; a new master stays."""
    from deepspeed import utils

    with training("odd", "bf16", zenflow=LATE) as ours, training("odd", "bf16", zenflow=LATE) as alone_:
        for _ in range(8):
            for one in (ours, alone_):
                one.step()
            for parameter in ours.trained.values():
                utils.safe_set_full_fp32_param(parameter, utils.safe_get_full_fp32_param(parameter))
                for key in MOMENTS:
                    value = utils.safe_get_full_optimizer_state(parameter, key)
                    utils.safe_set_full_optimizer_state(parameter, value, key)
        for name, parameter in ours.trained.items():
            assert torch.equal(parameter, alone_.trained[name]), name
        weight, value = ours.model.outer.weight, torch.rand(WIDTH, 13)
        utils.safe_set_full_fp32_param(weight, value)
        assert torch.equal(utils.safe_get_full_fp32_param(weight), value)
        assert torch.equal(weight.detach(), value.bfloat16())
        ours.step(5)
        ours.engine.optimizer.flush()
        assert float((utils.safe_get_full_fp32_param(weight) - value).abs().max()) < 0.05


def copies_and_ends() -> None:
    """Copies and pickles of the model, a second engine for it, and what is left when engines end."""
    import io

    import deepspeed
    from deepspeed import utils

    with training("odd", "bf16") as ours:
        ours.step(2)
        assert all(hasattr(parameter, "_hp_mapping") for parameter in ours.trained.values())
        copied = copy.deepcopy(ours.model)
        file = io.BytesIO()
        torch.save(dict(ours.model.named_parameters()), file)
        file.seek(0)
        loaded = torch.load(file, weights_only=True)
        for name, parameter in ours.model.named_parameters():
            assert torch.equal(parameter, loaded[name])
            assert torch.equal(parameter, dict(copied.named_parameters())[name])
        trained = list(ours.trained.values())
        second = deepspeed.initialize(
            model=ours.model, model_parameters=trained, config=ds_config("bf16", optimizer=ADAMW)
        )[0]
    weight = ours.model.outer.weight
    assert torch.equal(utils.safe_get_full_fp32_param(weight).bfloat16(), weight)
    second.destroy()
    assert not any(vars(parameter) for parameter in ours.model.parameters())


def exported_and_resumed(folder: Path) -> None:
    """In the midst of a window; the folder is overwritten; a resumed run has the same masters."""
    from deepspeed import utils
    from deepspeed.utils import zero_to_fp32

    place = str(folder / "resumed")
    with training("odd", "bf16", zenflow=LATE) as ours:
        for _ in range(2):
            ours.step(4)
            ours.engine.save_checkpoint(place, tag="t", client_state={"mine": 7})
        masters = {name: utils.safe_get_full_fp32_param(one) for name, one in ours.trained.items()}
        ours.engine.optimizer.flush()
        whole = {name: one.detach().clone() for name, one in ours.trained.items()}
    found = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(place)
    with training("odd", "bf16", zenflow=LATE) as back:
        assert back.engine.load_checkpoint(place)[1]["mine"] == 7
        for name, master in masters.items():
            assert torch.equal(found[name].to(whole[name].dtype), whole[name]), name  # with what was pending
            assert torch.equal(utils.safe_get_full_fp32_param(back.trained[name]), master), name


def saved_weights_lack_nothing(folder: Path) -> None:
    """The file of 16-bit weights, and what Accelerate hands to the Trainer to save; training does not notice."""
    from accelerate.accelerator import Accelerator
    from accelerate.utils import DistributedType

    with training("odd", "bf16", zenflow=LATE) as ours:
        ours.step(4)
        seen = {name: value.clone() for name, value in ours.model.state_dict().items()}
        ours.engine.save_16bit_model(str(folder / "bits"), "model.bin")
        accelerator: Any = SimpleNamespace(
            distributed_type=DistributedType.DEEPSPEED,
            deepspeed_config={"zero_optimization": {"stage": 2}},
            unwrap_model=lambda _: ours.model,
        )
        handed = Accelerator.get_state_dict(accelerator, ours.engine)
        assert all(torch.equal(value, seen[name]) for name, value in ours.model.state_dict().items())
        ours.engine.optimizer.flush()
        saved = torch.load(folder / "bits" / "model.bin", weights_only=True)
        for name, value in ours.model.state_dict().items():
            assert torch.equal(saved[name], value), name
            assert torch.equal(handed[name], value), name
        assert any(not torch.equal(seen[name], value) for name, value in saved.items())


def averaged_gradients() -> None:
    """After a step's last backward every rank has the whole batch's gradient, and trains on with what is set."""
    from deepspeed import utils

    clips = {"gradient_clipping": 0.0}
    with trainings("odd", "fp32", **clips) as (ours, theirs), training("odd", "fp32", zenflow=LATE, **clips) as late:
        for step in range(4):
            for one in (ours, theirs, late):
                used = [p for n, p in one.trained.items() if not n.startswith(UNUSED)]
                expected = torch.autograd.grad(one.loss(one.model, batch(one.micro)), used)
                one.backward(direct=step == 2)
                for parameter, gradient in zip(used, expected, strict=True):
                    near(utils.safe_get_full_grad(parameter), gradient, 1e-5, "gradient")
                    utils.safe_set_full_grad(parameter, gradient * 0.5)
                one.engine.step()
        same_state(ours, theirs, 1e-5, besides=UNUSED)
        for parameter in late.trained.values():
            mine = utils.safe_get_full_fp32_param(parameter)
            other = mine.clone()
            torch.distributed.broadcast(other, 0)
            assert torch.equal(mine, other)


def exported_by_two(folder: Path) -> None:
    """One file holds all."""
    from deepspeed import utils
    from deepspeed.utils import zero_to_fp32

    with training("odd", "bf16") as ours:
        ours.step(2)
        ours.engine.save_checkpoint(str(folder / "two"))
        found = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(str(folder / "two"))
        for name, parameter in ours.trained.items():
            assert torch.equal(found[name], utils.safe_get_full_fp32_param(parameter)), name


def name_of(setting: tuple[str, str, int, int]) -> str:
    return "{} {}, stage {}, {} passes".format(*setting)


def checks(folder: Path, ranks: int) -> dict[str, Callable[[], None]]:
    if ranks > 1:
        return {"averaged gradients": averaged_gradients, "exported": lambda: exported_by_two(folder)}
    found: dict[str, Callable[[], None]] = {
        "before the first step": before_the_first_step,
        "copies and ends": copies_and_ends,
        "exported and resumed": lambda: exported_and_resumed(folder),
        "gradients that have left": gradients_that_have_left,
        "masters in windows": masters_in_windows,
        "refusals": refusals,
        "saved weights lack nothing": lambda: saved_weights_lack_nothing(folder),
        "weights written past torch": weights_written_past_torch,
    }
    for setting in SETTINGS:
        place = folder / name_of(setting)
        found[name_of(setting)] = lambda one=setting, place=place: as_deepspeed(place, *one)  # type: ignore[misc]
    return found


def main() -> None:
    folder = Path(sys.argv[1])
    alone()
    torch.set_num_threads(1)
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    upstream_ops.allow_fp16()
    found: dict[str, str | None] = {}
    for name, check in checks(folder, torch.distributed.get_world_size()).items():
        try:
            check()
            found[name] = None
        except Exception:  # noqa: BLE001 - told to the test
            found[name] = traceback.format_exc()
    (folder / f"checks.{torch.distributed.get_rank()}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
