"""The column view of a parameter, and which tier each of its columns starts in."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from zenflow.config import ZenFlowConfig
from zenflow.errors import ConfigError
from zenflow.sharded import model_parameter, whole_shape

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Of parameters that are trained; what is frozen may have any other."""
DTYPE_NAMES = "float32, bfloat16 and float16"
LEAST_BUCKET_BYTES, BUCKETS_A_MODEL = 1 << 20, 32
"""A bucket has at most a 32nd of the model, unless that is less than 1 MiB."""


def can_be_trained(parameter: torch.Tensor, device: torch.device) -> bool:
    """Whether an optimizer that works with a device could train a parameter, were it not frozen."""
    return parameter.dtype in DTYPES and parameter.device == device


@dataclass(frozen=True)
class WeightPlan:
    """The split of one parameter. A parameter without a column view has 0 columns and is wholly resident."""

    rows: int
    """Those that this rank holds: all, or a block of them, which may be empty."""
    columns: int
    transposed: bool
    """Whether the parameter is stored [columns, rows] (a transformers Conv1D)."""
    resident: int
    """Resident columns: 0 .. resident - 1."""
    selected: int
    """Number of selected columns among the offloaded ones."""
    slots_per_bucket: int
    first_bucket: int
    """Number of its bucket, which it may share with its neighbours; of the first of them where it is cut."""

    @functools.cached_property
    def offloaded(self) -> int:
        """Number of offloaded columns: resident .. columns - 1."""
        return self.columns - self.resident

    @functools.cached_property
    def deferred(self) -> int:
        """Number of deferred columns, each in a slot of the host state."""
        return self.offloaded - self.selected

    @functools.cached_property
    def selects(self) -> bool:
        """Whether there is anything to choose between."""
        return 0 < self.selected < self.offloaded

    @property
    def bucket_slots(self) -> list[tuple[int, int]]:
        """Slot range [low, high) of its part of each bucket."""
        starts = range(0, self.deferred, self.slots_per_bucket)
        return [(low, min(low + self.slots_per_bucket, self.deferred)) for low in starts]

    def same_split(self, other: WeightPlan) -> bool:
        """Whether every column is in the same tier under the other plan; the buckets may be others."""
        return replace(self, first_bucket=other.first_bucket, slots_per_bucket=other.slots_per_bucket) == other

    def view(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor as [rows, columns], sharing its memory."""
        return tensor.t() if self.transposed else tensor.view(self.rows, self.columns)


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """The split of all parameters, in plan (forward) order."""

    weights: tuple[WeightPlan, ...]
    buckets: int
    """B: number of buckets of the whole model."""


def round_half_up(value: float) -> int:
    """Round to the nearest integer, halves upwards."""
    return math.floor(value + 0.5)


def plan_order(parameters: Sequence[nn.Parameter], module: nn.Module | None) -> list[nn.Parameter]:
    """The parameters in forward order: the module's registration order, then those outside it as given."""
    if module is None:
        return list(parameters)
    given = {id(model_parameter(parameter)): parameter for parameter in parameters}
    inside = [given[id(parameter)] for parameter in module.parameters() if id(parameter) in given]
    seen = {id(parameter) for parameter in inside}
    return inside + [parameter for parameter in parameters if id(parameter) not in seen]


def require_owner(module: nn.Module | None, parameters: Iterable[nn.Parameter]) -> None:
    """Refuse a module that is another model's, or none: names, order and late waits would be of other parameters.

    Raises ConfigError if it holds none of them; some may lie outside it.
    """
    if module is None:
        return
    if not isinstance(module, nn.Module):
        raise ConfigError.of("module", module, "the torch.nn.Module that has the parameters, or None")
    own = {id(parameter) for parameter in module.parameters()}
    if not any(id(parameter) in own for parameter in parameters):
        raise ConfigError(
            f"module ({type(module).__name__}) has none of the optimizer's parameters; it must be the model that they "
            "belong to, or None"
        )


def conv1d_weights(module: nn.Module | None) -> set[int]:
    """Ids of the weights that a transformers `Conv1D` holds: stored [in, out], so a column is a row of memory."""
    if module is None:
        return set()
    # By name: the runtime does not import transformers.
    return {
        id(weight)
        for part in module.modules()
        if type(part).__name__ == "Conv1D"
        and isinstance(weight := getattr(part, "weight", None), nn.Parameter)
        and weight.dim() == 2
    }


class _Buckets:
    """Numbers buckets: runs of consecutive weights of one kind up to a size; a larger weight is cut into several."""

    def __init__(self, limit_bytes: int) -> None:
        self.count = 0
        self._limit_bytes = limit_bytes
        self._kind: object = None
        self._left_bytes = 0

    def take(self, columns: int, column_bytes: int, kind: object) -> tuple[int, int]:
        """Give a weight's deferred columns their place: slots in each bucket, and the number of the first."""
        slots = max(1, self._limit_bytes // max(1, column_bytes))
        if columns > slots:
            first, self.count = self.count, self.count - (-columns // slots)
            self._left_bytes = 0
            return slots, first
        if columns and (kind != self._kind or columns * column_bytes > self._left_bytes):
            self._kind, self._left_bytes = kind, self._limit_bytes
            self.count += 1
        self._left_bytes -= columns * column_bytes
        return slots, max(0, self.count - 1)


def bucket_limit(bucket_bytes: int, model_bytes: int) -> int:
    """Most bytes of a step's deferred gradients in a bucket: small models have several buckets, too.

    `model_bytes` are those of all weights that are trained and have columns.
    """
    return min(bucket_bytes, max(LEAST_BUCKET_BYTES, model_bytes // BUCKETS_A_MODEL))


def plan_model(parameters: Iterable[nn.Parameter], config: ZenFlowConfig, transposed: set[int]) -> ModelPlan:
    """Split every parameter between the tiers.

    Residents are whole weights from the front: their gradients come last in backward and their weights are
    needed first in forward, so they shorten the exposed tail. The last one is split by columns.

    Where ranks hold rows of the parameters, all of them make the same plan but for the number of rows: columns and
    buckets, and with these every due step, are those of the whole parameters, as on one rank: they may cross units of
    FSDP2, and are then sent with the second of these.

    `parameters` are in forward order; `transposed` has ids of those that are stored [columns, rows].
    """
    parameters = list(parameters)
    shapes = [_matrix_shape(parameter, id(parameter) in transposed) for parameter in parameters]
    sizes = [whole_shape(parameter).numel() for parameter in parameters]
    live = [(p, n) for p, n, shape in zip(parameters, sizes, shapes, strict=True) if shape and p.requires_grad]
    left = sum(n for _, n in live)
    left -= round_half_up(config.offload_ratio * left)
    buckets = _Buckets(bucket_limit(config.bucket_bytes, sum(n * p.element_size() for p, n in live)))
    plans: list[WeightPlan] = []
    for parameter, size, shape in zip(parameters, sizes, shapes, strict=True):
        if shape is None:
            plans.append(WeightPlan(0, 0, False, 0, 0, 1, max(0, buckets.count - 1)))
            continue
        rows, columns = shape
        whole_rows = size // columns
        if not parameter.requires_grad:  # thawed later perhaps: it must not shift the split of the others
            resident = round_half_up((1 - config.offload_ratio) * columns)
        elif size <= left:
            resident, left = columns, left - size
        else:
            resident, left = min(columns, round_half_up(left / whole_rows)), 0
        selected = selected_columns(columns - resident, config.topk_ratio)
        deferred, is_transposed = columns - resident - selected, id(parameter) in transposed
        if parameter.requires_grad:
            column_bytes = whole_rows * parameter.element_size()
            slots, first = buckets.take(deferred, column_bytes, (parameter.dtype, is_transposed))
        else:
            slots, first = max(1, deferred), max(0, buckets.count - 1)
        plans.append(WeightPlan(rows, columns, is_transposed, resident, selected, slots, first))
    return ModelPlan(tuple(plans), max(1, buckets.count))


def selected_columns(offloaded: int, topk_ratio: float) -> int:
    """How many of a weight's offloaded columns are selected: k of them rounded half up, at least one if k > 0."""
    if topk_ratio == 0 or offloaded == 0:
        return 0
    return min(offloaded, max(1, round_half_up(topk_ratio * offloaded)))


def _matrix_shape(parameter: nn.Parameter, transposed: bool) -> tuple[int, int] | None:
    """[rows, columns] of the column view, or None where there is none."""
    if parameter.dim() < 2 or whole_shape(parameter).numel() == 0:
        return None
    if transposed:
        return parameter.shape[1], parameter.shape[0]
    columns = parameter.shape[-1]
    rows = parameter.numel() // columns
    try:
        parameter.detach().view(rows, columns)
    except RuntimeError:  # strides that no 2-D view can express
        return None
    return rows, columns
