"""The backend zenflow: what `deepspeed.initialize` is given in place of what the script gave it, and what follows."""

from __future__ import annotations

import copy
import functools
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from zenflow import Partition, ZenFlowConfig, ZenFlowError
from zenflow.partition import obstacle
from zenflow.ranks import several_ranks
from zenflow.sharded import rows_of
from zftune.ds_config.reading import MISSING, at, micro_batch_of, stage_of, truth
from zftune.errors import BadInputError
from zftune.exactness import keep_exact
from zftune.integrations import fsdp2
from zftune.integrations.deepspeed import accessors, optimizers, sharded_files
from zftune.integrations.deepspeed.choosing import (
    Chosen,
    Training,
    choose,
    instead_of,
    knobs_on_host,
    late_knobs,
    waited,
    with_knobs,
)
from zftune.integrations.deepspeed.engine_optimizer import EngineOptimizer, LossScaling
from zftune.integrations.deepspeed.fp32_weights import save_whole, save_with_fp32
from zftune.integrations.deepspeed.outcome import TAKEN_OVER, has_zenflow, quality_of, refusals
from zftune.integrations.deepspeed.precision import Precision, cast_inputs, dtype_named, loss_scaler
from zftune.integrations.deepspeed.section import INSTEAD, Section, require_none
from zftune.integrations.fsdp2 import Sharded
from zftune.store.types import PROMISES, Quality
from zftune.text import size
from zftune.variables import NOBODY, ONLINE


def attach(engine: Any, optimizer: EngineOptimizer, plan: Plan) -> None:
    """Tune the knobs while the engine trains."""
    from zftune.attaching import attach as follow
    from zftune.attaching import log_loss

    follow(optimizer, quality=plan.quality, micro_batch=engine.train_micro_batch_size_per_gpu(), zero_stage=plan.stage)
    original = engine.backward

    @functools.wraps(original)
    def backward(loss: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        log_loss(loss.detach())
        return original(loss, *args, **kwargs)

    engine.backward = backward


_logger = logging.getLogger("zftune")
_GATHERS = ("stage3_gather_16bit_weights_on_model_save", "stage3_gather_fp16_weights_on_model_save")
_SHARDED = 3
"""The stage of ZeRO whose weights are."""
_PARTITIONED = (1, 2)
"""Those whose state is, and whose weights all ranks have."""


@dataclass(slots=True)
class Plan:
    """What a call of `deepspeed.initialize` becomes."""

    config: dict[str, Any]
    """For the engine: without what is done by the runtime."""
    own: ZenFlowConfig
    """The ds_config's knobs."""
    late: ZenFlowConfig | None
    """Those of its ZenFlow section, whatever the quality is; None: it has none."""
    precision: Precision
    section: Section
    quality: Quality
    stage: int
    reduced_in: torch.dtype | None
    """In which gradients are summed over ranks; None: in their own."""
    gathers: bool
    """Whether whole weights of stage 3 may be saved in 16 bits."""
    offloads_weights: bool
    """Whether the ds_config would have the weights on the host."""
    topk_ratio: object
    """The ds_config's own; None: it has none."""


def plan(config: Mapping[str, Any], section: Section) -> Plan:
    """Read a ds_config that offloads; changes nothing yet.

    Raises:
        BadInputError: something is not allowed, or not done by this backend; one sentence.
    """
    require_none(refusals(config))
    topk_ratio = at(config, ("zero_optimization", "zenflow", "topk_ratio"))
    precision = Precision.of(config)
    zero = config.get("zero_optimization")
    quality = quality_of(config, section)
    own = late = ZenFlowConfig.from_ds_config(config)
    if precision.dtype is not None:
        own = late = replace(own, skip_nonfinite=True)  # as DeepSpeed does for 16 bits
    own = waited(own, quality)
    for_engine = {name: copy.deepcopy(value) for name, value in config.items() if name not in TAKEN_OVER}
    for_engine["gradient_clipping"] = 0.0
    return Plan(
        config=for_engine,
        own=own,
        late=late if has_zenflow(config) else None,
        precision=precision,
        section=section,
        quality=quality,
        stage=int(stage_of(config)),
        reduced_in=dtype_named(config.get("communication_data_type")),
        gathers=isinstance(zero, Mapping) and any(truth(zero.get(name)) for name in _GATHERS),
        offloads_weights=at(config, ("zero_optimization", "offload_param", "device")) == "cpu",
        topk_ratio=None if topk_ratio in (MISSING, "auto") else topk_ratio,
    )


def recipe_of(config: Mapping[str, Any], optimizer: Any) -> optimizers.Recipe | None:
    """What makes the optimizer, but for a callable, which has to be called first; None: there is none to make.

    Raises:
        BadInputError: it is not one of those that fit.
    """
    if optimizer is None:
        return optimizers.from_config(config)
    return optimizers.from_client(optimizer) if isinstance(optimizer, Optimizer) else None


def require_plain(module: nn.Module, stage: int) -> None:
    """Refuse models that DeepSpeed has cut up.

    Raises:
        BadInputError: it is a pipeline, or was made under `deepspeed.zero.Init` without stage 3.
    """
    if stage != _SHARDED and any(hasattr(parameter, "ds_id") for parameter in module.parameters()):
        raise BadInputError(
            "the model was made under deepspeed.zero.Init, which the backend zenflow takes at ZeRO stage 3 only: "
            f"set zero_optimization.stage to 3, or {INSTEAD}"
        )
    for part in module.modules():
        found = {base.__name__ for base in type(part).__mro__} & {"PipelineModule", "MoE", "AutoEPMoELayer"}
        for name in found if any(base.__module__.startswith("deepspeed") for base in type(part).__mro__) else ():
            raise BadInputError(f"the model holds a {name}, with which the backend zenflow does not train: {INSTEAD}")


def shard(plan: Plan, module: nn.Module) -> Sharded | None:
    """At stage 3, leave each of several ranks its rows of the model; one rank too, where they have to be on the host.

    Returns:
        None: it is whole.

    Raises:
        BadInputError: it has parameters that cannot be cut up, or torch is too old.
    """
    ranks = torch.distributed.get_world_size()
    if plan.stage != _SHARDED:
        return None
    from deepspeed.accelerator import get_accelerator

    free = get_accelerator().available_memory()
    besides = besides_weights(module, plan, ranks) if plan.offloads_weights else 0
    stays = fsdp2.stays_on_device(
        module, ranks, plan.precision.dtype, free, may_leave=plan.offloads_weights, besides_bytes=besides
    )
    since = f"{size(free)} are free there and a step needs about {size(besides)} beside them"
    if ranks == 1 and stays:
        fsdp2.make_whole(module)
        accessors.mark_whole(module)
        return None
    fsdp2.require_torch()
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy

    made = fsdp2.shard(
        module,
        init_device_mesh(get_accelerator().device_name(), (ranks,)),
        dtype=plan.precision.dtype,
        on_host_since="" if stays else since,
        reshard_after_forward=True,
        mp_policy=MixedPrecisionPolicy(reduce_dtype=plan.reduced_in),
    )
    accessors.mark(module)
    accessors.reduce_unused(module)
    return made


def partition(plan: Plan, module: nn.Module) -> tuple[Partition | None, str]:
    """How several ranks share out the state at stages 1 and 2; and why they do not, or nothing."""
    if plan.stage not in _PARTITIONED or not several_ranks():
        return None, ""
    if (why := obstacle(module.parameters())) is not None:
        return None, why
    return Partition(reduce_dtype=plan.reduced_in), ""


def _cast(plan: Plan, module: nn.Module, partition: Partition | None) -> dict[nn.Parameter, torch.Tensor]:
    """Cast a model; of what the first rank's weights were in fp32, this rank's rows where that is all it trains."""
    if partition is None or plan.precision.dtype is None:
        return plan.precision.cast(module)
    from deepspeed.accelerator import get_accelerator

    for parameter in module.parameters():  # as the engine does, but later, when they are rounded
        whole = parameter.data.to(get_accelerator().device_name()).contiguous()
        torch.distributed.broadcast(whole, 0)
        parameter.data.copy_(whole)
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    return plan.precision.cast(module, lambda whole: rows_of(whole, rank, ranks))


def besides_weights(module: nn.Module, plan: Plan, ranks: int) -> int:
    """Bytes that a step needs on a device beside the weights: by the planner, with nothing that waits for the link.

    Args:
        module: before it is cut up. Sequences of a transformers model are as long as the planner takes them to be, or
            as the model allows; of another one nothing is known, and its activations are those of one token.
    """
    from zftune.planner.memory import device_bytes
    from zftune.planner.model import Job, ModelFacts
    from zftune.planner.split import model_plan
    from zftune.telemetry.fingerprint import recomputes

    positions = getattr(getattr(module, "config", None), "max_position_embeddings", None)
    job = Job(
        seq=min(Job().seq, positions) if isinstance(positions, int) and positions > 0 else 1,
        micro_batch=micro_batch_of(plan.config, ranks),
        gpus=ranks,
        checkpointing=recomputes(module),
    )
    try:
        model = ModelFacts.from_module(type(module).__name__, fsdp2.shapes_of(module, plan.precision.dtype))
    except BadInputError:  # nothing of it is trained, or not yet
        return 0
    uses = device_bytes(model, model_plan(model, plan.own), job, plan.own, packed=0.0, arrived=0.0)
    return sum(nbytes for use, nbytes in uses.items() if use not in ("context", "weights", "gathered"))


@contextmanager
def staying(module: nn.Module) -> Iterator[None]:
    """Disable `module.to()` inside the block: it would replace weights that are already in their place."""
    module.to = lambda *_, **__: module  # type: ignore[method-assign]
    try:
        yield
    finally:
        del module.to


class Making:
    """Makes the optimizer where DeepSpeed asks for it: once the model is on its device.

    Args:
        recipe: None: `callable_` gives the optimizer to copy.
        sharded: what became of its parameters; None: they are whole.
    """

    def __init__(
        self,
        plan: Plan,
        recipe: optimizers.Recipe | None,
        callable_: Any,
        module: nn.Module,
        sharded: Sharded | None,
    ) -> None:
        self._plan = plan
        self._recipe = recipe
        self._callable = callable_
        self._module = module
        self._sharded = sharded
        self._partition, self._replicated_since = partition(plan, module)
        self._masters = _cast(plan, module, self._partition) | (sharded.masters if sharded is not None else {})
        self.optimizer: EngineOptimizer | None = None
        self.follows = False
        """Whether its first steps are to show what late updates win (`zftune.hiding`)."""
        self.late: ZenFlowConfig | None = None
        """Knobs that a run with quality published would have; None: those that the planner finds."""

    def __call__(self, parameters: Any) -> EngineOptimizer:
        given = fsdp2.now(parameters)
        recipe = self._recipe or optimizers.from_client(self._callable(given))
        if recipe.groups is not None:
            recipe = replace(recipe, groups=fsdp2.now(recipe.groups))
        config = self._chosen()
        scaling = self._plan.precision.loss_scaling
        scaler = None if scaling is None else loss_scaler(scaling)
        try:
            made = EngineOptimizer(list(_copied(given)), recipe, config, self._module, scaler, self._partition)
            made.give_masters(self._masters)
            if self._plan.quality == "exact" and os.environ.get(ONLINE) != NOBODY:
                keep_exact(made)
        except ZenFlowError as error:
            raise BadInputError(str(error)) from error
        self._masters = {}
        self.optimizer = made
        return made

    def _chosen(self) -> ZenFlowConfig:
        ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
        config, chosen, but = self._settings(ranks)
        sentence = f"{chosen.sentence}{but}; {self._sharing(ranks)}".removesuffix("; ")
        if os.environ.get(ONLINE) == NOBODY:
            told, sentence = "late updates as the schedule has them", f"before its first change {sentence}"
        else:
            told = f"quality {PROMISES[self._plan.quality]}"
        _logger.info("zftune: backend zenflow, %s; %s", told, sentence)
        return config

    def _settings(self, ranks: int) -> tuple[ZenFlowConfig, Chosen, str]:
        """The knobs, their origin, and how they differ from it, in words."""
        plan, late = self._plan, self._plan.quality != "exact"
        training = Training(
            module=self._module,
            backend="zenflow",
            stage=plan.stage,
            dtype=plan.precision.word,
            micro_batch=micro_batch_of(plan.config, ranks),
            world_size=ranks,
            quality=plan.quality,
            shards=1 if self._partition is None else ranks,
        )
        chosen = choose(training, plan.section)
        config = with_knobs(plan.own, chosen, plan.quality)
        instead = instead_of(plan.late, config, chosen, asked=plan.section.preset is not None) if late else ""
        if self._sharded is not None and self._sharded.on_host:
            config, but = knobs_on_host(config, plan.quality, plan.topk_ratio)
            return config, chosen, instead + but
        if not late:
            self.follows, self.late = True, self._late(training)
            needed = ", but for update_interval 1 and overlap_step false, which exact needs"
            return config, chosen, "" if plan.late is None else needed
        is_tuned = plan.section.online or os.environ.get(ONLINE) == NOBODY  # by a search, or a schedule
        if plan.late is None and not chosen.knobs and not is_tuned:
            self.follows = True
            config, origin = late_knobs(config, plan.quality, self._torch_device)
            return config, replace(chosen, origin=origin), ""
        return config, chosen, instead

    def _sharing(self, ranks: int) -> str:
        """Where weights and state are, in words; empty if one rank has all on its device."""
        plan, sharded = self._plan, self._sharded
        if sharded is not None:
            sentence = f"sharded by FSDP2 over {sharded.ranks} rank{'s' if sharded.ranks > 1 else ''}"
            if not plan.offloads_weights:
                return sentence
            since = sharded.on_host_since
            where = f"lie on the host instead of a device, since {since}" if since else "stay on their devices"
            return f"{sentence}, whose {size(sharded.bytes)} of weights each {where}"
        if plan.offloads_weights and plan.stage == _SHARDED:
            nbytes = sum(parameter.nbytes for parameter in self._module.parameters())
            return f"its {size(nbytes)} of weights stay on the device"
        if self._partition is not None:
            return f"{ranks} ranks share out state and host work by rows, and each has all weights"
        since = self._replicated_since or f"at stage {plan.stage} they are not shared out"
        return f"each of {ranks} ranks has the state and the host work of all, since {since}" if ranks > 1 else ""

    @property
    def reduces_by_rows(self) -> bool:
        """Whether gradients are reduced to the rows of each rank, in the dtype that is asked for."""
        return self._sharded is not None or self._partition is not None

    @property
    def _torch_device(self) -> torch.device:
        return next(self._module.parameters()).device

    def _late(self, training: Training) -> ZenFlowConfig | None:
        plan = self._plan
        if self._torch_device.type == "cpu":
            return None  # nobody will ask
        chosen = choose(replace(training, quality="published"), plan.section)
        return with_knobs(plan.late or plan.own, chosen, "published") if chosen.knobs else plan.late


def _copied(parameters: Any) -> Iterable[Any]:
    """Groups are made anew: DeepSpeed keeps the script's."""
    return [dict(one) if isinstance(one, Mapping) else one for one in parameters]


def take_over(engine: Any, made: EngineOptimizer, plan: Plan) -> None:
    """Let an engine leave to the runtime what the runtime does."""
    made.given_stage = plan.stage
    _average_after_backward(engine, made)
    # It was made without these sections, and scripts ask it for the dtype of its inputs.
    if plan.precision.dtype == torch.bfloat16 and hasattr(engine, "_support_torch_style_backward"):
        engine._config.bfloat16_config.enabled = True  # before 0.19 an engine would not drop gradients then
    if plan.precision.dtype == torch.float16 and hasattr(engine._config, "float16_config"):
        engine._config.float16_config.enabled = True
    elif plan.precision.dtype == torch.float16:  # before 0.18
        engine._config.fp16_enabled = True
    if made.loss_scaler is not None:
        engine.torch_autocast_z0_gradscaler = LossScaling(made)
    _allow_direct_backward(engine, made)
    save_with_fp32(engine, made)
    if plan.stage == _SHARDED:
        made.parameter_offload = accessors.ParameterOffload(engine.module)
        sharded_files.take_over(engine, made, gathers=plan.gathers)
    elif made.is_partitioned:
        sharded_files.save_by_rows(engine, made)
        _drop_gradients_too(engine, made)
    sharded_files.load_from_folder(engine, made)
    save_whole(engine, made)
    if plan.precision.casts_inputs and plan.precision.dtype is not None:
        cast_inputs(engine.module, plan.precision.dtype)


def _average_after_backward(engine: Any, made: EngineOptimizer) -> None:
    """Let the runtime average gradients over the ranks, where the engine would: after a step's last backward."""

    def average(*_: Any, **__: Any) -> None:
        if engine.is_gradient_accumulation_boundary():
            made.average_gradients()

    engine.allreduce_gradients = average


def _drop_gradients_too(engine: Any, made: EngineOptimizer) -> None:
    """Let `engine.zero_grad()` drop what was averaged and is no longer in `.grad`."""
    original = engine.zero_grad

    @functools.wraps(original)
    def zero_grad() -> None:
        original()
        made.zero_grad()

    engine.zero_grad = zero_grad


def _allow_direct_backward(engine: Any, made: EngineOptimizer) -> None:
    """Let `loss.backward()` and `engine.scale(loss).backward()` work, as they do at stages 1 and 2 from 0.19 on."""
    if not hasattr(engine, "_support_torch_style_backward"):
        return
    engine._support_torch_style_backward = True
    original = engine._backward_prologue

    @functools.wraps(original)
    def prologue() -> None:
        if not engine._running_engine_backward:
            if made.loss_scaler is not None and not engine._manual_backward_expected:
                raise RuntimeError(
                    "backward() was called on a loss that is not scaled: with fp16 call engine.backward(loss) or "
                    "engine.scale(loss).backward()"
                )
            engine._manual_backward_expected = False
            torch.autograd.Variable._execution_engine.queue_callback(engine._backward_epilogue)
        original()

    engine._backward_prologue = prologue
