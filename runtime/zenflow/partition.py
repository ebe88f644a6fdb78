"""Whole parameters of which each rank updates its rows: ZeRO stage 2 without a hook in the model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from zenflow.device import Device
from zenflow.errors import UnsupportedError
from zenflow.ranks import Ranks, buckets, several_ranks
from zenflow.sharded import LEAST_TORCH, Rows, Shards, rows_of, torch_version

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True, slots=True)
class Partition:
    """Lets ranks that have all of the parameters share out their state and host work (`ZenFlowOptimizer.partition`).

    A rank has state of its rows alone. Gradients are reduced to the rows of each rank, and then gone from `.grad`; at
    the end of a step each rank gathers the rows of the others. In between the parameters are whole, plain tensors: one
    rank may read them alone, and what all ranks write to them alike counts.
    """

    reduce_dtype: torch.dtype | None = None
    """In which gradients are averaged; None: in their own."""


def obstacle(parameters: Iterable[torch.Tensor]) -> str | None:
    """Why parameters cannot be partitioned, as the end of a sentence; None: they can. Frozen ones may be anything."""
    if torch_version() < LEAST_TORCH:
        return f"torch is {torch.__version__}, and {'.'.join(map(str, LEAST_TORCH))} or newer is needed"
    for parameter in parameters:
        if parameter.requires_grad and not (parameter.dim() and parameter.numel()):
            return f"a trained parameter is of shape {tuple(parameter.shape)}, which has no rows"
    return None


def shards_of(parameters: Sequence[nn.Parameter], partition: Partition | None) -> Shards | None:
    """The rows that this rank works on; None where it works on whole parameters.

    Raises UnsupportedError if they are sharded in a way that is not allowed, or cannot be partitioned.
    """
    found = Shards.of(parameters)
    if found is not None or partition is None or not several_ranks():
        return found
    from torch.distributed.device_mesh import init_device_mesh

    _require(parameters)
    home = next((one.device for one in parameters if one.requires_grad), parameters[0].device)
    return Partitioned(init_device_mesh(home.type, (torch.distributed.get_world_size(),)), partition)


def _require(parameters: Iterable[nn.Parameter]) -> None:
    if (why := obstacle(parameters)) is not None:
        raise UnsupportedError(f"a partition of the state over the ranks was given, but {why}")


class OwnRows(Rows):
    """This rank's rows of a parameter that it has all of, whose memory they are a part of.

    `whole` says where the rows of all ranks are, and is not the model's. `grad` is of the rows alone.
    """

    _model: nn.Parameter
    _gradient: torch.Tensor | None

    def __new__(cls, parameter: nn.Parameter, mesh: DeviceMesh) -> OwnRows:
        """Take the rows of this rank, of a parameter of one dimension or more."""
        from torch.distributed.tensor import DTensor, Shard
        from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

        meta = TensorMeta(parameter.shape, parameter.stride(), parameter.dtype)
        local = rows_of(parameter.detach(), mesh.get_local_rank(), mesh.size())
        whole = DTensor(local, DTensorSpec(mesh, (Shard(0),), meta), requires_grad=False)
        made = cast(OwnRows, super().__new__(cls, cast(nn.Parameter, whole)))
        made._model, made._gradient = parameter, None
        return made

    @property
    def model_parameter(self) -> nn.Parameter:
        return self._model

    @property
    def grad(self) -> torch.Tensor | None:
        """The mean over the ranks, of these rows."""
        return self._gradient

    @grad.setter
    def grad(self, rows: torch.Tensor | None) -> None:
        self._gradient = rows

    @property
    def requires_grad(self) -> bool:  # type: ignore[override]
        return self._model.requires_grad

    def follow(self) -> None:
        """Take over the memory that the parameter has by now."""
        mesh = self.whole.device_mesh
        self.whole._local_tensor = rows_of(self._model.detach(), mesh.get_local_rank(), mesh.size())
        super().follow()

    def add_gradient(self, rows: torch.Tensor) -> None:
        """Add rows in this tensor's shape, in any dtype, to the gradient."""
        rows = rows.to(self.dtype)
        self._gradient = rows if self._gradient is None else self._gradient + rows


class Partitioned(Shards):
    """This rank's rows of parameters that all ranks have whole."""

    keeps_whole = True

    def __init__(self, mesh: DeviceMesh, partition: Partition) -> None:
        super().__init__(mesh, on_host=False)
        self._partition = partition

    def require(self, parameters: Iterable[nn.Parameter]) -> None:
        _require(parameters)

    def rows(self, parameter: nn.Parameter) -> nn.Parameter:
        """What the optimizer works on for one of its parameters; what is frozen and has no dimension is as it is."""
        if not parameter.dim():
            return parameter
        if id(parameter) not in self._rows:
            self._rows[id(parameter)] = OwnRows(parameter, self._mesh)
        return self._rows[id(parameter)]

    @property
    def _trained(self) -> list[OwnRows]:
        return [cast(OwnRows, rows) for rows in self._rows.values() if rows.requires_grad]

    def drop_gradients(self) -> None:
        """Forget those that were reduced."""
        for rows in self._rows.values():
            rows.grad = None

    def reduce(self, ranks: Ranks, device: Device) -> None:
        """Add each `.grad` of the parameters, averaged over the ranks, to that of the rows, and let go of it.

        A rank without a gradient that another one has takes part with zeros; UnsupportedError: one is sparse.
        """
        rows = self._trained
        parameters = [one.model_parameter for one in rows]
        averages = ranks.averages(parameters)
        asked = dict(zip(map(id, parameters), rows, strict=True))
        having = ranks.with_gradient(parameters)
        if not averages:
            for parameter in having:
                asked[id(parameter)].add_gradient(self._own(_whole_gradient(parameter)))
                parameter.grad = None
            return
        if not having:
            return
        device.meet(0, ranks.size, ranks.latest)
        ahead: list[_Reduction] = []
        for bucket in buckets(having, ranks.bucket_bytes):
            ahead.append(_Reduction([asked[id(one)] for one in bucket], self._mesh, self._partition.reduce_dtype))
            # The other half of an all-reduce is the gather at the end of the step.
            device.meet(sum(one.nbytes for one in bucket) // 2, ranks.size, ranks.latest)
            if len(ahead) > 1:  # one is on its way while the next is packed; more would only take memory
                ahead.pop(0).finish()
        for one in ahead:
            one.finish()

    def gather(self, ranks: Ranks, device: Device) -> None:
        rows = {id(one.model_parameter): one for one in self._trained}
        ahead: list[_Gather] = []
        for bucket in buckets([one.model_parameter for one in rows.values()], ranks.bucket_bytes):
            ahead.append(_Gather([rows[id(one)] for one in bucket], self._mesh))
            device.meet(sum(one.nbytes for one in bucket) // 2, ranks.size, ranks.latest)
            if len(ahead) > 1:
                ahead.pop(0).finish()
        for one in ahead:
            one.finish()

    def give(self, parameter: nn.Parameter, values: torch.Tensor) -> None:
        """Write what all ranks were given into the rows of the others; nothing is sent."""
        if hasattr(values, "to_local"):  # a rank that has its rows alone
            return
        mine = self._mesh.get_local_rank()
        theirs = values.reshape(parameter.shape).chunk(self._mesh.size())
        for rank, (own, given) in enumerate(zip(parameter.detach().chunk(self._mesh.size()), theirs, strict=True)):
            if rank != mine:
                own.copy_(given)

    def own(self, parameter: nn.Parameter, values: torch.Tensor) -> torch.Tensor:
        if hasattr(values, "to_local"):
            return super().own(parameter, values)
        whole = parameter.dim() and values.numel() == parameter.numel()
        return self._own(values.reshape(parameter.shape)) if whole else values

    def _own(self, values: torch.Tensor) -> torch.Tensor:
        return rows_of(values, self._mesh.get_local_rank(), self._mesh.size())


def _whole_gradient(parameter: nn.Parameter) -> torch.Tensor:
    return torch.zeros_like(parameter, requires_grad=False) if parameter.grad is None else parameter.grad


def _named(collective: str, before: str) -> Any:
    """A collective of single tensors, which has another name before torch 2.13."""
    found = getattr(torch.distributed, f"{collective}_single", None)
    return found or getattr(torch.distributed, f"{collective}_{before}")


class _Layout:
    """Where the rows of all ranks lie in a bucket: [ranks, elements of a rank], the last ranks' padded."""

    def __init__(self, rows: Sequence[OwnRows], mesh: DeviceMesh) -> None:
        self.rows = rows
        self.ranks, self.rank = mesh.size(), mesh.get_local_rank()
        # As torch.chunk deals them: the first rank has no fewer than another.
        self.lengths = [one.model_parameter.detach().chunk(self.ranks)[0].numel() for one in rows]

    @property
    def length(self) -> int:
        """Elements of a rank."""
        return sum(self.lengths)

    def parts(self, buffer: torch.Tensor, rank: int) -> Iterable[tuple[OwnRows, torch.Tensor]]:
        """By parameter, the rows of this rank, and what `buffer`, [elements of a rank], has of those of `rank`."""
        for one, part in zip(self.rows, buffer.split(self.lengths), strict=True):
            yield one, part[: rows_of(one.model_parameter.detach(), rank, self.ranks).numel()]


class _Reduction:
    """A bucket of gradients on its way to the rows."""

    def __init__(self, rows: Sequence[OwnRows], mesh: DeviceMesh, dtype: torch.dtype | None) -> None:
        self._layout = layout = _Layout(rows, mesh)
        dtype = dtype or rows[0].dtype
        device = rows[0].device
        sent = torch.zeros(layout.ranks, layout.length, dtype=dtype, device=device)
        for number, one in enumerate(rows):
            gradient, begin = _whole_gradient(one.model_parameter), sum(layout.lengths[:number])
            one.model_parameter.grad = None  # it is packed, which frees memory for the others
            for rank, part in enumerate(gradient.chunk(layout.ranks)):
                sent[rank, begin : begin + part.numel()].view(part.shape).copy_(part)
        # A sum of fp16 may overflow where its mean does not.
        self._before = dtype == torch.float16
        if self._before:
            sent.div_(layout.ranks)
        self._sent = sent
        self._mine = torch.empty(layout.length, dtype=dtype, device=device)
        self._handle = _named("reduce_scatter", "tensor")(self._mine, sent.view(-1), async_op=True)

    def finish(self) -> None:
        self._handle.wait()
        del self._sent
        if not self._before:
            self._mine.div_(self._layout.ranks)
        for one, part in self._layout.parts(self._mine, self._layout.rank):
            one.add_gradient(part.view(one.shape))


class _Gather:
    """A bucket of weights on its way to all ranks."""

    def __init__(self, rows: Sequence[OwnRows], mesh: DeviceMesh) -> None:
        self._layout = layout = _Layout(rows, mesh)
        dtype, device = rows[0].dtype, rows[0].device
        self._mine = torch.zeros(layout.length, dtype=dtype, device=device)
        for one, part in layout.parts(self._mine, layout.rank):
            part.view(one.shape).copy_(one)
        self._all = torch.empty(layout.ranks, layout.length, dtype=dtype, device=device)
        self._handle = _named("all_gather", "into_tensor")(self._all.view(-1), self._mine, async_op=True)

    def finish(self) -> None:
        self._handle.wait()
        layout = self._layout
        for rank in range(layout.ranks):
            for one, part in layout.parts(self._all[rank], rank) if rank != layout.rank else ():
                theirs = rows_of(one.model_parameter.detach(), rank, layout.ranks)
                theirs.copy_(part.view(theirs.shape))
