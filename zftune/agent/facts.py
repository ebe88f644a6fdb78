"""What is trained, where, and by which systems: looked up once, after the process's first step."""

from __future__ import annotations

import gc
import itertools
import os
import platform
import sys
import time
import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

import zftune
from zftune.agent.recorder import EventBackend
from zftune.agent.systems import deepspeed_settings, knobs, module_of, optimizer_name
from zftune.agent.systems import systems as systems_of

_DEPTH = 3  # of containers in a batch
_MOST_BATCHES = 4096  # of a step, an evaluation's among them, whose tokens are remembered
_NO_STREAM = "plain CPU: there is no device stream whose waits could be called stalls"
_NO_BATCH = "no torch DataLoader gave a batch"
_NO_TOKENS = "the batches hold no input_ids and no other integer tensor with two dimensions"
_NO_MODULE = "no torch.nn.Module holds the optimizer's parameters"
_REDUCER = "comm is counted in part: DistributedDataParallel communicates in C++, inside backward"
_ON_STREAMS = (
    "comm is counted in part: on an accelerator backward runs in a thread of its own, whose communication is not seen, "
    "nor are waits of one stream for another"
)
_IN_PARTS = "this rank holds its parameters in parts"


class Facts:
    """Collects what the header and the model's line say."""

    def __init__(self) -> None:
        self._began_ns = time.monotonic_ns()
        self.forget()

    def forget(self) -> None:
        """Begin anew: in a forked process, or with another training."""
        self.missing: dict[str, str] = {}
        """Fields of the profile document that stay null, and why."""
        self._device: dict[str, Any] = {"device": None, "device_uuid": None, "has_stream": None, "source": None}
        self._model: dict[str, Any] = {}
        self._shape: tuple[int | None, int | None] | None = None
        self._batches = self._steps = self._passes = 0
        self._in_step: deque[tuple[int, bool]] = deque(maxlen=_MOST_BATCHES)
        """Tokens of each batch of the open step, and whether gradients were on when it came: in most evaluations they
        are not."""
        self._fewest: int | None = None
        self._workers: int | None = None
        self._looked_at: tuple[type | None, list[weakref.ref[torch.Tensor]]] = (None, [])

    def header(self) -> dict[str, Any]:
        """Fields of the header, as far as they are known now."""
        script = os.path.basename(sys.argv[0]) if getattr(sys, "argv", None) else ""  # noqa: PTH119
        return {
            **_ranks(),
            "zftune": zftune.__version__,
            "python": platform.python_version(),
            "torch": str(torch.__version__),
            "script": script if script not in ("", "-c", "-") else None,
            **self._device,
            "began_ns": self._began_ns,
        }

    def device(self) -> dict[str, Any]:
        """Fields of the header that may be others for another training."""
        return dict(self._device)

    def batch(self, batch: Any, workers: int | None = None) -> None:
        """Count a batch of a data loader and its tokens; the first one's shape is the training's."""
        self._batches += 1
        self._workers = workers
        tokens = None if self._shape is not None and self._shape[1] is None else _tokens(batch)
        self._in_step.append((0 if tokens is None else tokens.numel(), torch.is_grad_enabled()))
        if self._shape is None:
            first = next(iter(_tensors(batch, _DEPTH)), None)
            if tokens is not None:
                self._shape = (tokens.shape[0], tokens.shape[1])
            else:
                self._shape = (None if first is None or first.dim() == 0 else first.shape[0], None)

    def backward_begins(self) -> None:
        """Backward begins, for a batch at the most."""
        self._passes += 1

    def step_ended(self) -> int | None:
        """A step with a known beginning is over: the tokens of its batches; None where batches have none.

        Those that came while gradients were off are an evaluation's; so are the first ones beyond the passes of
        backward, and beyond the fewest of any step, since a pass may be of several batches.
        """
        self._steps += 1
        graded = [tokens for tokens, with_gradients in self._in_step if with_gradients]
        counted = [tokens for tokens, _ in self._in_step]
        if self._passes:
            counted = graded if len(graded) >= self._passes else counted
            self._fewest = len(counted) if self._fewest is None else min(self._fewest, len(counted))
            counted = counted[max(0, len(counted) - max(self._passes, self._fewest)) :]
        self._batches -= len(self._in_step) - len(counted)
        self.forget_batches()
        return None if self._shape is None or self._shape[1] is None else sum(counted)

    def forget_batches(self) -> None:
        """The open step begins anew."""
        self._in_step.clear()
        self._passes = 0

    def are_of(self, of: Any) -> bool:
        """Whether it trains as the one that was looked at did: an optimizer of the same class and parameters."""
        kind, parameters = self._looked_at
        own = _parameters(of) if type(of) is kind else []
        return bool(own) and len(own) == len(parameters) and all(a is b() for a, b in zip(own, parameters, strict=True))

    def look(self, of: Any, backend: EventBackend) -> None:
        """Find out what is trained by whoever makes the steps. Takes some tens of milliseconds."""
        from zftune.telemetry.fingerprint import recomputes

        module = module_of(of) or find_module(_parameters(of))
        device = device_of(of, module)
        self._batches, self._fewest = 0, None
        self.forget_batches()
        self._looked_at = type(of), [weakref.ref(parameter) for parameter in _parameters(of)]
        self._device = {
            "device": _device_name(device),
            "device_uuid": _device_uuid(device),
            "has_stream": backend.has_stream,
            "source": backend.source,
        }
        if not backend.has_stream:
            reason = _NO_STREAM if device.type == "cpu" else f"no event backend for a device of type {device.type}"
            self.missing |= {"stall": reason, "hidden_ms_per_step": reason}
        systems = systems_of(of, module)
        # Names of whole tables: a reader takes the reason of a figure that it has for none.
        if backend.has_stream and _ranks()["world_size"] > 1:
            self.missing |= {"waits_ms": _ON_STREAMS, "stall.by_cause": _ON_STREAMS}
        elif "DistributedDataParallel" in systems:
            self.missing["waits_ms"] = _REDUCER
        self._model = {
            **self._sizes(module, _parameters(of)),
            "optimizer": optimizer_name(of),
            "systems": systems,
            "knobs": knobs(of),
            "deepspeed": deepspeed_settings(of),
            "checkpointing": module is not None and recomputes(module),
        }

    def model(self, rates: Sequence[float] = ()) -> dict[str, Any]:
        """Fields of the model's line.

        Args:
            rates: the learning rates of the first measured step.
        """
        micro_batch, sequence = self._shape or (None, None)
        tokens = None
        if sequence is None:
            reason = _NO_BATCH if self._shape is None else _NO_TOKENS
            self.missing |= {"workload.sequence": reason, "throughput.tokens_per_s": reason}
        elif micro_batch is not None:
            tokens = micro_batch * sequence * max(1, round(self._batches / max(1, self._steps)))
        if micro_batch is None:
            self.missing["workload.micro_batch"] = _NO_BATCH
        if self._model.get("knobs") is None:
            self.missing["knobs"] = "the optimizer is not of this package's runtime"
        return {
            **self._model,
            "micro_batch": micro_batch,
            "sequence": sequence,
            "tokens_per_step": tokens,
            "loader_workers": self._workers,
            "learning_rates": list(rates),
        }

    def _sizes(self, module: nn.Module | None, stepped: Sequence[torch.Tensor]) -> dict[str, Any]:
        names = ("model", "parameters", "trainable", "dtype", "model_bytes", "model_id")
        found: dict[str, Any] = dict.fromkeys(names)
        if module is None:
            fields = ("workload.model", "workload.parameters", "workload.trainable", "workload.dtype")
            self.missing |= dict.fromkeys((*fields, "fingerprint.model_id"), _NO_MODULE)
            return found | {"model_bytes": _trained_bytes(stepped)}
        parameters = list(module.parameters())
        trainable = [parameter for parameter in parameters if parameter.requires_grad]
        dtypes: Counter[str] = Counter()
        for parameter in trainable:
            dtypes[str(parameter.dtype).removeprefix("torch.")] += _elements(parameter)
        in_parts = any(hasattr(p, "ds_numel") or type(p).__name__ == "FlatParameter" for p in parameters)
        if in_parts:
            self.missing["fingerprint.model_id"] = _IN_PARTS
        else:
            from zftune.telemetry.fingerprint import model_id

            found["model_id"] = model_id(module)
        found |= {
            "model": type(unwrapped(module)).__name__,
            "parameters": sum(map(_elements, parameters)),
            "trainable": sum(map(_elements, trainable)),
            "dtype": dtypes.most_common(1)[0][0] if dtypes else None,
            "model_bytes": _trained_bytes(trainable),
        }
        return found


def find_module(parameters: Sequence[torch.Tensor]) -> nn.Module | None:
    """The outermost module that holds most of these parameters.

    It is looked for among all objects rather than with a hook on every module's forward: torch.compile warns about such
    hooks and compiles code anew because of them.
    """
    wanted = {id(parameter) for parameter in parameters}
    modules = [found for found in gc.get_objects() if issubclass(type(found), nn.Module)]
    parents: dict[int, list[nn.Module]] = defaultdict(list)
    held: Counter[int] = Counter()
    for module in modules:
        for child in (vars(module).get("_modules") or {}).values():
            parents[id(child)].append(module)
        held[id(module)] = sum(id(p) in wanted for p in (vars(module).get("_parameters") or {}).values())
    found: dict[int, nn.Module] = {}
    seen: set[int] = set()
    climbing = [module for module in modules if held[id(module)]]
    while climbing:
        module = climbing.pop()
        if id(module) not in seen:
            seen.add(id(module))
            climbing += parents[id(module)]
            if not parents[id(module)]:
                found[id(module)] = module
    return max(found.values(), key=lambda module: sum(held[id(inner)] for inner in module.modules()), default=None)


def unwrapped(module: nn.Module) -> nn.Module:
    """The model without what wraps it for many devices or for the compiler."""
    for attribute in ("module", "_orig_mod", "module", "_orig_mod"):
        inner = vars(module).get("_modules", {}).get(attribute)
        if isinstance(inner, nn.Module) and type(module).__module__.partition(".")[0] in ("torch", "deepspeed"):
            module = inner
    return module


def device_of(of: Any, module: nn.Module | None) -> torch.device:
    """Where the training computes: the module's device, or the accelerator that is in use where that is the CPU."""
    held: Iterable[torch.Tensor] = () if module is None else module.parameters()
    first = next(itertools.chain(held, _parameters(of)), None)
    device = torch.device("cpu") if first is None else first.device
    if device.type == "cpu":  # some keep parameters on the host between their uses
        accelerator = torch.get_device_module()
        in_use = getattr(accelerator, "is_initialized", None)
        if in_use is not None and in_use():
            return torch.empty(0, device=accelerator.current_device()).device
    return device


def _parameters(of: Any) -> list[torch.Tensor]:
    groups: Any = getattr(of, "param_groups", None) or getattr(getattr(of, "optimizer", None), "param_groups", ())
    return [parameter for group in groups for parameter in group["params"] if isinstance(parameter, torch.Tensor)]


def learning_rates(of: Any) -> list[float]:
    """Those of the groups, each once; a tensor on a device is left out, since reading it waits for the device."""
    groups: Any = getattr(of, "param_groups", None) or getattr(getattr(of, "optimizer", None), "param_groups", ())
    rates = [group.get("lr") for group in groups]
    read = [rate.item() if _is_plain(rate) else rate for rate in rates]
    return sorted({float(rate) for rate in read if isinstance(rate, (int, float))})


def _is_plain(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "cpu" and value.numel() == 1


def _elements(parameter: Any) -> int:
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def _trained_bytes(parameters: Iterable[torch.Tensor]) -> int:
    return sum(_elements(parameter) * parameter.element_size() for parameter in parameters if parameter.requires_grad)


def _tokens(batch: Any) -> torch.Tensor | None:
    ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
    candidates: Iterable[Any] = _tensors(batch, _DEPTH) if ids is None else (ids,)
    return next((t for t in candidates if _is_tokens(t)), None)


def _is_tokens(value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.dim() == 2
        and not value.is_floating_point()
        and not value.is_complex()
        and value.dtype != torch.bool
    )


def _tensors(value: Any, depth: int) -> Iterable[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif depth and isinstance(value, Mapping | list | tuple):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(inner, depth - 1)


def _ranks() -> dict[str, int]:
    distributed = torch.distributed
    known = distributed.is_available() and distributed.is_initialized()
    rank, size = (distributed.get_rank(), distributed.get_world_size()) if known else (None, None)
    return {
        "rank": _number("RANK", 0) if rank is None else rank,
        "local_rank": _number("LOCAL_RANK", 0),
        "world_size": _number("WORLD_SIZE", 1) if size is None else size,
    }


def _number(name: str, otherwise: int) -> int:
    text = os.environ.get(name, "")
    return int(text) if text.isdigit() else otherwise


def _device_name(device: torch.device) -> str:
    if device.type == "cpu":
        return "cpu"
    from zenflow.device import device_name

    name = device_name(device)
    return device.type if name == "cpu" else name


def _device_uuid(device: torch.device) -> str | None:
    if device.type == "cpu":
        return None
    module = torch.get_device_module(device)
    properties = module.get_device_properties(device) if hasattr(module, "get_device_properties") else None
    uuid = getattr(properties, "uuid", None)
    return None if uuid is None else f"GPU-{uuid}"
