"""What a plan is made from, and what it says: models, machines, jobs, predictions. Plain data."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zenflow.layout import conv1d_weights
from zenflow.names import did_you_mean
from zftune.errors import BadInputError, require
from zftune.planner import models
from zftune.planner.models import ARCHITECTURES, Architecture, Weight, from_size
from zftune.text import either


def facts_of_directory(directory: Path, dtype: str) -> ModelFacts:
    """Build the model of a directory's config.json without any memory and read its shapes.

    `dtype` is that of its parameters when it trains.

    Raises:
        BadInputError: there is no configuration of a causal language model that can be built.
    """
    if not os.path.isfile(directory / "config.json"):  # noqa: PTH113 - Path.is_file() raises where a name is too long
        raise BadInputError(f"--model '{directory}': it must be a directory that holds a config.json")
    return facts_of_module(directory.resolve().name, _meta_module(directory), dtype)


def facts_of_module(name: str, module: nn.Module, dtype: str) -> ModelFacts:
    """Read a module's shapes, on any device; only those of parameters that require a gradient are trained.

    `dtype` is that of its parameters when it trains.

    Raises:
        BadInputError: nothing of it is trained.
    """
    layers = _layers(module)
    parameters = [(each, p) for each, p in module.named_parameters() if p.numel()]
    trainable = [(each, p) for each, p in parameters if p.requires_grad]
    if not trainable:
        raise BadInputError(f"--model '{name}': none of its parameters requires a gradient")
    config: Any = getattr(module, "config", None)
    columns_first = conv1d_weights(module)
    names = [each for each, _ in trainable]
    return ModelFacts(
        name=name,
        parameters=sum(p.numel() for _, p in parameters),
        trainable=sum(p.numel() for _, p in trainable),
        layers=layers[1],
        hidden=_number(config, "hidden_size", "n_embd", "d_model")
        or max((p.shape[-1] for _, p in trainable if p.dim()), default=1),
        weights=tuple(tuple(p.shape) for _, p in trainable),
        dtype=dtype,
        stages=_stages(names, layers),
        before_layers=_before(names, layers),
        transposed=frozenset(number for number, (_, p) in enumerate(trainable) if id(p) in columns_first),
        heads=_number(config, "num_attention_heads", "n_head") or 1,
        intermediate=_number(config, "intermediate_size", "ffn_dim", "n_inner") or 0,
        vocabulary=_number(config, "vocab_size") or 0,
        key_value_width=_key_value_width(config),
    )


def _meta_module(directory: Path) -> Any:
    require("transformers", f"--model '{directory}'")
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except Exception as error:  # whatever a configuration makes transformers raise is the directory's fault
        line = str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__
        raise BadInputError(
            f"--model '{directory}': cannot be built ({line}); "
            "it must be a directory with the config.json of a causal language model"
        ) from error


def _layers(module: nn.Module) -> tuple[str, int]:
    """Name and length of the list of layers with the most parameters."""
    found = [
        (sum(p.numel() for p in part.parameters()), name, len(part))
        for name, part in module.named_modules()
        if isinstance(part, nn.ModuleList) and len(part)
    ]
    _, name, length = max(found, default=(0, "", 1))
    return name, length


def _stages(names: list[str], layers: tuple[str, int]) -> tuple[int, ...]:
    """Of each parameter: its layer's number; what is registered behind the layers comes after all of them."""
    prefix, count = f"{layers[0]}.", layers[1]
    stages, passed = [], False
    for name in names:
        if layers[0] and name.startswith(prefix):
            passed = True
            stages.append(int(name[len(prefix) :].partition(".")[0]))
        else:
            stages.append(count if passed else 0)
    return tuple(stages)


def _before(names: list[str], layers: tuple[str, int]) -> int:
    """How many parameters are registered before all layers."""
    inside = (number for number, name in enumerate(names) if name.startswith(f"{layers[0]}."))
    return next(inside, 0) if layers[0] else 0


def _number(config: Any, *names: str) -> int | None:
    """The first of these that is an integer > 0."""
    values = (getattr(config, name, None) for name in names)
    return next((value for value in values if isinstance(value, int) and value > 0), None)


def _key_value_width(config: Any) -> int:
    heads = _number(config, "num_attention_heads", "n_head")
    few, hidden = _number(config, "num_key_value_heads"), _number(config, "hidden_size", "n_embd")
    return math.ceil(hidden / heads) * few if heads and few and hidden else 0


CAUSES = ("host", "h2d", "d2h", "comm", "thread")
"""What the compute stream waits for, in a prediction."""

_DTYPE_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """A model as far as its offloading depends on it."""

    name: str
    parameters: int
    """Elements, ties once."""
    trainable: int
    """Elements that require a gradient, ties once."""
    layers: int
    hidden: int
    weights: tuple[tuple[int, ...], ...]
    """Shapes of the trainable parameters in forward order, ties once."""
    dtype: str
    """"bf16", "fp16" or "fp32"."""
    stages: tuple[int, ...]
    """Of each weight: layers whose forward ends before it is needed."""
    before_layers: int = 0
    """How many of the weights precede all layers: embeddings, whose gradients are whole only when backward is over."""
    transposed: frozenset[int] = frozenset()
    """Numbers of the weights that are stored [in, out]."""
    heads: int = 0
    intermediate: int = 0
    vocabulary: int = 0
    """Rows of the output projection; 0: unknown, then logits are left out."""
    key_value_width: int = 0
    """Outputs of the key (and the value) projection; 0: `hidden`."""

    @property
    def element_bytes(self) -> int:
        """Bytes of an element."""
        return _DTYPE_BYTES[self.dtype]

    @classmethod
    def from_name(cls, name: str, dtype: str = "bf16") -> ModelFacts:
        """A public model, or a size of zftune's own; upper and lower case are alike.

        Raises:
            BadInputError: the name is unknown.
        """
        proper = _proper(name)
        if proper is None:
            near = did_you_mean(name.rpartition("/")[2], ARCHITECTURES)
            raise BadInputError(
                f"--model '{name}': it must be {', '.join(ARCHITECTURES)}, a model directory, or P,layers,hidden{near}"
            )
        return cls._of(proper, ARCHITECTURES[proper], ARCHITECTURES[proper].weights(), dtype)

    @classmethod
    def from_dir(cls, directory: str | Path, dtype: str = "bf16") -> ModelFacts:
        """A transformers model's directory; built on the meta device, nothing is downloaded, no weight is read.

        Raises:
            BadInputError: it holds no configuration of a causal language model.
        """
        return facts_of_directory(Path(directory), dtype)

    @classmethod
    def from_module(cls, name: str, module: nn.Module) -> ModelFacts:
        """A module as it is, in the dtype of its first trained parameter.

        Raises:
            BadInputError: nothing of it is trained, or the dtype is none of bf16, fp16 and fp32.
        """
        names = {"torch.bfloat16": "bf16", "torch.float16": "fp16", "torch.float32": "fp32"}
        dtype = next((str(p.dtype) for p in module.parameters() if p.requires_grad), "torch.float32")
        if dtype not in names:
            raise BadInputError(f"--model '{name}': its parameters are {dtype}; they must be {either(list(names))}")
        return facts_of_module(name, module, names[dtype])

    @classmethod
    def from_text(cls, text: str, dtype: str = "bf16") -> ModelFacts:
        """A model by its size, "P,layers,hidden"; P may end in M or B.

        Raises:
            BadInputError: it is not three such numbers.
        """
        parts = [part.strip() for part in text.split(",")]
        try:
            if len(parts) != 3:
                raise ValueError
            parameters, layers, hidden = _count(parts[0]), int(parts[1]), int(parts[2])
        except (ValueError, OverflowError):
            raise BadInputError(
                f"--model '{text}': it must be P,layers,hidden in numbers, such as 7e9,32,4096 or 7B,32,4096"
            ) from None
        if not (0 < parameters <= 10**13 and 0 < layers <= 1000 and 0 < hidden <= 10**6):
            raise BadInputError(
                f"--model '{text}': it must have 1 to 1e13 parameters, 1 to 1000 layers and a hidden size of 1 to 1e6"
            )
        return cls._of(text, *from_size(parameters, layers, hidden), dtype)

    @classmethod
    def _of(cls, name: str, architecture: Architecture, weights: tuple[Weight, ...], dtype: str) -> ModelFacts:
        elements = sum(math.prod(weight.shape) for weight in weights)
        return cls(
            name=name,
            parameters=elements,
            trainable=elements,
            layers=architecture.layers,
            hidden=architecture.hidden,
            weights=tuple(weight.shape for weight in weights),
            dtype=dtype,
            stages=tuple(weight.stage for weight in weights),
            before_layers=architecture.before_layers,
            heads=architecture.heads,
            intermediate=architecture.intermediate,
            vocabulary=architecture.vocabulary,
            key_value_width=architecture.key_value_width,
        )


def _proper(name: str) -> str | None:
    """What the library calls a model; None: it has none of this name."""
    asked = models.model_key(name)
    known = {models.model_key(each): each for each in ARCHITECTURES}
    return known.get(asked) or models.MODELS.get(asked)


def _count(text: str) -> int:
    factor = {"m": 1e6, "b": 1e9}.get(text[-1:].lower())
    return round(float(text[:-1]) * factor) if factor else round(float(text))


def model_facts(text: str, dtype: str = "bf16") -> ModelFacts:
    """What `--model` names: a model, a directory, or "P,layers,hidden".

    Raises:
        BadInputError: none of them.
    """
    if text.lower() in {name.lower() for name in ARCHITECTURES}:
        return ModelFacts.from_name(text, dtype)
    if "," in text:
        return ModelFacts.from_text(text, dtype)
    try:
        directory = bool(text) and Path(text).is_dir()  # before other spellings: it may be one of a hub's name
    except OSError:  # a name that is too long
        directory = False
    return ModelFacts.from_dir(text, dtype) if directory else ModelFacts.from_name(text, dtype)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One node: GPUs of a kind behind a host. Rates in 10^9 bytes/s; those of a GPU are of each one."""

    name: str
    source: Mapping[str, str]
    """Of each figure: where it comes from."""
    gpu: str
    gpus: int
    device_memory_bytes: int
    device_gbps: float
    compute_tflops: float
    """Dense bf16, as specified."""
    compute_share: float
    """Share of it that training achieves."""
    link_d2h_gbps: float
    link_h2d_gbps: float
    host_gbps: float
    """H: memory traffic of the whole host's update."""
    host_update_gelements_s: float
    """U: 10^9 element updates a second, of the whole host's cores that the engine may use."""
    cores: int
    host_memory_bytes: int
    comm_gbps: float
    """Bytes that a GPU sends (and receives) in collectives."""
    thread_unit_us: float | None = None
    """Of the training thread: one `x.add_(1)` to a small CPU tensor. None: its calls take no time."""
    thread_layer_us: float | None = None
    """That it takes for forward and backward of a layer without offloading. None: no time."""

    @classmethod
    def load(cls, name_or_path: str) -> Machine:
        """A machine of the library, or one from a TOML file.

        Raises:
            BadInputError: there is no such machine, or the file is not a valid one.
        """
        from zftune.planner.machine import load_machine

        return load_machine(name_or_path)

    @classmethod
    def here(cls) -> Machine:
        """This machine, measured; takes seconds.

        Raises:
            BadInputError: it has no GPU.
        """
        from zftune.planner.machine import machine_here

        return machine_here()


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is trained in a step, and on how many GPUs."""

    seq: int = 2048
    micro_batch: int = 1
    """Sequences of a pass on each GPU."""
    accumulation: int = 1
    """Passes a step (gradient_accumulation_steps), on one GPU."""
    gpus: int = 1
    """Of each machine."""
    stage: int = 3
    """Of ZeRO, with several GPUs. 3: each has its rows of the weights (FSDP2). 1 and 2: each has all of the weights and
    the state of its rows (`zenflow.Partition`).
    """
    nodes: int = 1
    """Machines, which are alike."""
    network_gbps: float | None = None
    """What a machine sends to others in all, and receives; where there are several."""
    replicate: bool = False
    """Whether each of several machines has all of the weights, shared by its own GPUs alone (HSDP)."""
    checkpointing: bool = False
    """Whether backward recomputes the activations of each layer."""
    reshard: bool = True
    """Whether several GPUs gather a layer's weights again for backward, FSDP2's default; else they are kept."""
    compute_ms: float | None = None
    """c, where it was measured: forward and backward of a step, without any optimizer."""
    forward_ms: float | None = None
    """Its parts, where they were measured; both or none."""
    backward_ms: float | None = None

    @property
    def tokens(self) -> int:
        """Tokens of a pass on each GPU."""
        return self.seq * self.micro_batch

    @property
    def ranks(self) -> int:
        """GPUs of all machines."""
        return self.gpus * self.nodes

    @property
    def keeps_whole(self) -> bool:
        """Whether each of several GPUs has all of the weights."""
        return self.stage < 3 and self.ranks > 1

    @property
    def replicas(self) -> int:
        """How many GPUs have the same rows."""
        return self.nodes if self.replicate else 1

    @property
    def shards(self) -> int:
        """Among how many GPUs the rows of a weight, or of its state, are shared."""
        return self.ranks // self.replicas


@dataclass(frozen=True, kw_only=True)
class Memory:
    """What a setting needs, in bytes: of each GPU, and of the host for all its ranks."""

    device_bytes: int
    """Reserved by the caching allocator at the peak, with the context."""
    host_bytes: int
    """State, log and staging, as the runtime plans them."""
    pinned_bytes: int
    """Of these, what the link reaches."""
    migration_bytes: int
    """Host memory that a reselection may take for a moment, beside `host_bytes`."""
    device_by_use: Mapping[str, int] = field(default_factory=dict)
    host_by_use: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What one setting is expected to do."""

    step_ms: float
    compute_ms: float
    """Of it the compute stream's own work: forward, backward, and the runtime's kernels."""
    stall_ms_by_cause: Mapping[str, float]
    host_utilisation: float
    memory: Memory
    s_min: int | None
    """Least S with T_host(S) <= S c; None: no window is long enough."""
    bound_by: str
    """"compute", "d2h", "h2d", "host", "comm" or "thread": what has most to do in a step."""
    loads_ms: Mapping[str, float] = field(default_factory=dict)
    """Time a step that each resource needs, whatever overlaps: the closed form."""
    staleness_steps: float = 0.0
    """Mean over the deferred gradients, from production to application."""

    @property
    def stall_ms(self) -> float:
        """Of all causes."""
        return sum(self.stall_ms_by_cause.values())
