"""Parameters of which each rank holds a block of rows: FSDP2's (`fully_shard`). Other shards are refused."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from zenflow.config import ZenFlowConfig
from zenflow.errors import ConfigError, UnsupportedError

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


LEAST_TORCH = (2, 9)
"""On a CPU older ones sum the gradients of ranks instead of averaging them (2.7, 2.8), or have no FSDP2."""


_DEFAULTS_ON_HOST: dict[str, Any] = {"topk_ratio": 0.0, "update_interval": 1}


class Rows(nn.Parameter):
    """This rank's rows of a DTensor, as a parameter whose memory is the DTensor's own.

    The optimizer works on them as on any parameter. `grad` and `requires_grad` are the DTensor's, so that what others
    do to either (a clip, `zero_grad`, freezing) is seen in both.
    """

    whole: DTensor

    def __new__(cls, whole: nn.Parameter) -> Rows:
        """Take the rows that this rank holds of a DTensor."""
        made: Rows = torch.Tensor._make_subclass(cls, _local(whole), False)
        made.whole = cast("DTensor", whole)
        return made

    @property
    def model_parameter(self) -> nn.Parameter:
        return cast(nn.Parameter, self.whole)

    @property
    def whole_rows(self) -> int:
        """Rows of all ranks together; of a parameter with two dimensions or more."""
        return self.whole.shape[:-1].numel()

    @property
    def has_none(self) -> bool:
        """Whether other ranks have rows of it and this one has not."""
        return not self.numel() and bool(self.whole.numel())

    @property
    def grad(self) -> torch.Tensor | None:
        gradient = self.whole.grad
        return None if gradient is None else _local(gradient)

    @grad.setter
    def grad(self, rows: torch.Tensor | None) -> None:
        self.whole.grad = None if rows is None else self.wrapped(rows)

    @property
    def requires_grad(self) -> bool:  # type: ignore[override]
        return self.whole.requires_grad

    def of_whole(self, values: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """A view of what belongs to this rank's rows, of values whose dimension `dim` is the parameter's first."""
        mesh = self.whole.device_mesh
        last = mesh.ndim - 1
        return rows_of(values.transpose(0, dim), mesh.get_local_rank(last), mesh.size(last)).transpose(0, dim)

    def wrapped(self, rows: torch.Tensor) -> DTensor:
        """Rows, in this tensor's shape, as a part of what all ranks have; a stand-in stays one."""
        from torch.distributed.tensor import DTensor

        # As FSDP2 makes its own: `from_local` would ask a stand-in for its elements.
        return DTensor(rows, self.whole._spec, requires_grad=False)

    def wrapped_columns(self, columns: torch.Tensor) -> DTensor:
        """This rank's rows of columns, [n, *leading dimensions of this tensor], as a part of what all ranks have."""
        from torch.distributed.tensor import DTensor, Shard

        spec = self.whole._spec
        shape = torch.Size([len(columns), *self.whole.shape[:-1]])
        meta = cast(Any, spec.tensor_meta)._replace(
            shape=shape, stride=torch.empty(shape, dtype=columns.dtype, device="meta").stride(), dtype=columns.dtype
        )
        spec = type(spec)(spec.mesh, (*spec.placements[:-1], Shard(1)), meta)
        return DTensor(columns, spec, requires_grad=False)

    def follow(self) -> None:
        """Take over the memory that the DTensor has by now, after `to()` or padding."""
        local = _local(self.whole)
        moved = local.data_ptr() != self.data_ptr() or local.dtype != self.dtype or local.shape != self.shape
        if moved or local.device != self.device:
            self.data = local


def model_parameter(parameter: nn.Parameter) -> nn.Parameter:
    """The model's own: that whose rows a parameter is, or the parameter itself."""
    return parameter.model_parameter if isinstance(parameter, Rows) else parameter


def rows_of(whole: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """The rows that a rank has of a weight of one dimension or more, as FSDP2 deals them: a view."""
    parts = whole.chunk(ranks)
    return parts[rank] if rank < len(parts) else whole[:0]


def local_rows(values: torch.Tensor) -> torch.Tensor:
    """The rows of this rank where values are a DTensor; else the values."""
    rows: torch.Tensor = values.to_local() if hasattr(values, "to_local") else values
    return rows


def are_sharded(groups: Iterable[Mapping[str, Any]]) -> bool:
    """Whether parameters of an optimizer's groups are those of FSDP2."""
    return any(_is_dtensor(parameter) for group in groups for parameter in group["params"])


def ranks_with_rows(parameter: torch.Tensor) -> int:
    """How many ranks share a model's parameter by rows; 1: each has all of it."""
    mesh: Any = getattr(parameter, "device_mesh", None)
    return 1 if mesh is None else int(mesh.size(mesh.ndim - 1))


def whole_shape(parameter: torch.Tensor) -> torch.Size:
    """A parameter's shape over all ranks."""
    return parameter.whole.shape if isinstance(parameter, Rows) else parameter.shape


class Shards:
    """This rank's rows of all parameters of an optimizer.

    `mesh` is of all ranks; its first dimension may be one of replicas (HSDP). `on_host`: the rows lie on the host, and
    the mesh is one of other devices (`CPUOffloadPolicy`).
    """

    def __init__(self, mesh: Any, *, on_host: bool) -> None:
        self._mesh = mesh
        self.computing = torch.device(mesh.device_type) if on_host else None
        """The device that computes with copies of the rows, which lie on the host; None: with the rows themselves."""
        self._rows: dict[int, Rows] = {}

    keeps_whole = False
    """Whether each rank has all of the parameters nevertheless."""

    @property
    def can_stream(self) -> bool:
        """Whether gradients may leave during backward."""
        # FSDP2 copies gradients of weights on the host there itself, and waits for each copy where a hook is called.
        # And whole parameters have the gradients of this rank then.
        return self.computing is None and not self.keeps_whole

    @classmethod
    def of(cls, parameters: Sequence[nn.Parameter]) -> Shards | None:
        """Those of all of an optimizer's parameters; None where none of them is sharded.

        Raises UnsupportedError if some are sharded and others are trained and not, or they are sharded otherwise.
        """
        first = next((parameter for parameter in parameters if _is_dtensor(parameter)), None)
        if first is None:
            return None
        mesh = cast("DTensor", first).device_mesh
        trained = next((one for one in parameters if _is_dtensor(one) and one.requires_grad), first)
        made = cls(mesh, on_host=trained.device.type != mesh.device_type)
        made.require(parameters)
        return made

    @property
    def replicas(self) -> int:
        """How many ranks have the same rows."""
        return 1 if self._mesh.ndim == 1 else int(self._mesh.size(0))

    def require(self, parameters: Iterable[nn.Parameter]) -> None:
        """Raise UnsupportedError for what is not sharded as the others are; what is frozen may be whole."""
        for parameter in parameters:
            if not _is_dtensor(parameter):
                if parameter.requires_grad:
                    raise UnsupportedError(
                        f"a parameter of shape {tuple(parameter.shape)} is whole and others are sharded; all "
                        "must be sharded by one fully_shard (FSDP2) or all whole (a frozen one may be either)"
                    )
            elif cast("DTensor", parameter).device_mesh != self._mesh:
                raise UnsupportedError(
                    f"{_described(parameter)}, and others are on another mesh; all parameters must be on one mesh"
                )

    def knobs(self, asked: ZenFlowConfig | None) -> ZenFlowConfig:
        """The knobs to begin with: `asked`, or the defaults, on the host without selected columns and one step late.

        Raises ConfigError if columns are to be updated on a device that has none.
        """
        if asked is None:
            return ZenFlowConfig(**(_DEFAULTS_ON_HOST if self.computing is not None else {}))
        self.require_knobs(asked)
        return asked

    def require_knobs(self, config: ZenFlowConfig) -> None:
        """Raise ConfigError for columns to be updated on the device where the weights are on the host."""
        if self.computing is not None and config.topk_ratio and config.offload_ratio:
            raise ConfigError(
                f"topk_ratio is {config.topk_ratio} and the weights are on the host (CPUOffloadPolicy); it must be 0: "
                f"no column stays on {self.computing.type}"
            )

    def groups(self, groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Parameter groups with rows in place of the DTensors."""
        return [{**group, "params": [self.rows(parameter) for parameter in group["params"]]} for group in groups]

    def rows(self, parameter: nn.Parameter) -> nn.Parameter:
        """What the optimizer works on for one of its parameters."""
        if not _is_dtensor(parameter):
            return parameter
        if id(parameter) not in self._rows:
            self._rows[id(parameter)] = Rows(parameter)
        return self._rows[id(parameter)]

    def reduce(self, ranks: Any, device: Any) -> None:
        """FSDP2 has done it during backward."""

    def gather(self, ranks: Any, device: Any) -> None:
        """FSDP2 does it before a unit's forward."""

    def drop_gradients(self) -> None:
        """Nothing is left to do: they are the parameters' own."""

    def give(self, parameter: nn.Parameter, values: torch.Tensor) -> None:
        """There are no rows of others here."""

    def own(self, parameter: nn.Parameter, values: torch.Tensor) -> torch.Tensor:
        """This rank's rows of a parameter's values, which are whole, a DTensor, or these rows already."""
        return local_rows(values)

    def follow(self) -> None:
        """Take over the memory that the parameters have by now."""
        for rows in self._rows.values():
            rows.follow()


def require_known(parameters: Iterable[torch.Tensor]) -> None:
    """Refuse parts of weights that the runtime cannot work on, before anything is written to them; frozen ones too.

    Raises UnsupportedError if one belongs to FSDP1, a tensor parallel plan or ZeRO stage 3, or its rows are neither on
    their mesh's device nor on the host.
    """
    for parameter in parameters:
        if _is_dtensor(parameter):
            _require_rows(cast("DTensor", parameter))
            continue
        # FSDP1 marks its flat parameters and, with use_orig_params=True, their views; torch has no public question.
        if getattr(parameter, "_fsdp_flattened", False):
            kind = "a part of torch's FullyShardedDataParallel (FSDP1)"
        elif hasattr(parameter, "ds_id"):
            kind = "partitioned by DeepSpeed's ZeRO stage 3"
        else:
            continue
        raise UnsupportedError(
            f"a parameter of shape {tuple(parameter.shape)} is {kind}; it must be one of fully_shard (FSDP2), "
            "or whole and the same on all ranks, as under DistributedDataParallel"
        )


def require_whole(parameters: Iterable[torch.Tensor]) -> None:
    """Raise UnsupportedError for what was sharded after training had begun with whole parameters."""
    for parameter in parameters:
        if _is_dtensor(parameter):
            raise UnsupportedError(
                f"{_described(parameter)} and others of the optimizer are whole: call fully_shard() on the model "
                "before the optimizer is made"
            )


def _require_rows(parameter: DTensor) -> None:
    if torch_version() < LEAST_TORCH:
        raise UnsupportedError(
            f"a parameter is a DTensor and torch is {torch.__version__}; sharded parameters need torch "
            f"{'.'.join(map(str, LEAST_TORCH))} or newer"
        )
    mesh = parameter.device_mesh
    *replicas, last = parameter.placements
    rows = type(last).__name__ == "Shard" and last.is_shard(0)  # of FSDP2 over tensor parallel parts: another type
    everybody = mesh.size() == torch.distributed.get_world_size()
    if mesh.ndim > 2 or not rows or not everybody or any(not one.is_replicate() for one in replicas):
        raise UnsupportedError(
            f"{_described(parameter)}; it must be sharded by fully_shard (FSDP2), by rows over all "
            f"{torch.distributed.get_world_size()} ranks, with replicas (HSDP) or without"
        )
    if parameter.device.type not in (mesh.device_type, "cpu"):
        raise UnsupportedError(
            f"a parameter of shape {tuple(parameter.shape)} is on {parameter.device} and its mesh on "
            f"{mesh.device_type}; it must be on the mesh's device, or on the host (CPUOffloadPolicy)"
        )


def torch_version() -> tuple[int, ...]:
    """Its major and minor number."""
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def _described(parameter: Any) -> str:
    placements = ", ".join(repr(placement) for placement in parameter.placements)
    return (
        f"a parameter of shape {tuple(parameter.shape)} is a DTensor ({placements} over "
        f"{parameter.device_mesh.size()} ranks)"
    )


def _local(sharded: torch.Tensor) -> torch.Tensor:
    """The tensor itself that a DTensor is around: `to_local()` may give a view of it."""
    return cast("DTensor", sharded)._local_tensor


def _is_dtensor(parameter: torch.Tensor) -> bool:
    # Who has not imported it has none of them; before torch 2.5 it is where it was private.
    for module in ("torch.distributed.tensor", "torch.distributed._tensor"):
        kind = getattr(sys.modules.get(module), "DTensor", None)
        if kind is not None:
            return isinstance(parameter, kind)
    return False
