"""Several ranks that train one model: gradients are averaged over them before anything is done with them."""

from __future__ import annotations

import gc
import hashlib
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from zenflow.config import ZenFlowConfig
from zenflow.control import as_flag
from zenflow.device import Device
from zenflow.errors import RankError, UnsupportedError
from zenflow.host.cores import CpuClaim, dealt_cpus
from zenflow.layout import can_be_trained
from zenflow.sharded import Shards

_Found = TypeVar("_Found")
_Tensor = TypeVar("_Tensor", bound=torch.Tensor)
_SPARSE = 2


def several_ranks() -> bool:
    """Whether this process trains with others."""
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


class Ranks:
    """The ranks of torch.distributed's default group; every method is to be called by all of them.

    `reduces`: gradients are averaged here, together up to `bucket_bytes`; else somebody else has done it. `sharded`:
    each rank has state of its own rows, instead of all having the same.
    """

    def __init__(self, bucket_bytes: int, *, reduces: bool, sharded: bool) -> None:
        distributed = torch.distributed
        self.reduces = reduces
        self.sharded = sharded
        self.size = distributed.get_world_size()
        self.rank = distributed.get_rank()
        self.bucket_bytes = bucket_bytes
        self._looked = False  # for somebody else who averages
        # What the host decides on must not wait for the device.
        own = distributed.get_backend() != "gloo" and distributed.is_gloo_available()
        self._host = distributed.new_group(backend="gloo") if own else None
        self._on_host = own or distributed.get_backend() == "gloo"
        self._means: list[tuple[weakref.ref[torch.Tensor], int]] = []  # gradients, and their versions then

    @classmethod
    def of(cls, config: ZenFlowConfig, shards: Shards | None = None) -> Ranks | None:
        """The ranks of this process; None where it is alone. `shards`: the rows of this one; None: it has all."""
        if not several_ranks():
            return None
        reduces = config.reduce_gradients and (shards is None or shards.keeps_whole)
        return cls(config.bucket_bytes, reduces=reduces, sharded=shards is not None)

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Overwrite a tensor, on the device that the ranks communicate from, with that of rank 0."""
        whole = tensor if tensor.is_contiguous() else tensor.contiguous()
        torch.distributed.broadcast(whole, 0)
        if whole is not tensor:
            tensor.copy_(whole)

    def share(self, parameters: Sequence[nn.Parameter], device: torch.device) -> None:
        """Begin with the weights of rank 0 everywhere, unless each has its own; what could not be trained stays.

        Raises UnsupportedError if the ranks' parameters differ, or their order.
        """
        text = repr([(tuple(one.shape), str(one.dtype), one.requires_grad) for one in parameters])
        number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "little")
        if self.least(number, device) != number or self.least(-number, device) != -number:
            raise UnsupportedError("the ranks' parameters differ in number, shape, dtype or requires_grad")
        for parameter in parameters if self.reduces else ():
            if can_be_trained(parameter, device):
                self.broadcast(parameter.detach())

    def cpus(self, numa_node: int | None) -> tuple[int, ...] | None:
        """One CPU of each physical core that is left to this rank's host threads; None: all its affinity allows.

        Cores are dealt where other ranks of this machine would pick the same ones; `numa_node` is that of this rank's
        device.
        """
        return dealt_cpus(self.everybodys(CpuClaim.of_process(numa_node)), self.rank)

    def everybodys(self, mine: _Found) -> list[_Found]:
        """What each rank has, by rank; `mine` can be pickled."""
        found: list[Any] = [None] * self.size
        torch.distributed.all_gather_object(found, mine, group=self._host)
        return found

    def least(self, value: int, device: torch.device) -> int:
        """The least of all ranks' values; `device` is the one that the ranks communicate from."""
        asked = torch.tensor([value], dtype=torch.int64, device="cpu" if self._on_host else device)
        torch.distributed.all_reduce(asked, torch.distributed.ReduceOp.MIN, group=self._host)
        return int(asked)

    def together(self, error: BaseException | None, device: torch.device, value: int = 1) -> int:
        """Fail on every rank where one has failed, so that none goes on alone; else the least of the ranks' values.

        Raises `error`, this rank's, or RankError where another one has failed. `value` is at least 1.
        """
        least = self.least(0 if error else value, device)
        if error is not None:
            raise error
        if not least:
            raise RankError("another rank failed at this, see its own message; nothing has changed here")
        return least

    def any(self, flag: torch.Tensor | None, device: torch.device) -> torch.Tensor | None:
        """Whether a flag (of one element, not 0 where it is set) is set on any rank; stays on the device.

        None, on all ranks alike: there is no flag.
        """
        if flag is None:
            return None
        common = as_flag(flag, device).reshape(1).float()
        torch.distributed.all_reduce(common, torch.distributed.ReduceOp.MAX)
        return common.reshape(())

    def add_up(self, values: torch.Tensor, device: Device) -> None:
        """Replace values on the device, of the same size on all ranks, by their sum over them."""
        device.meet(values.nbytes, self.size, self.latest)
        torch.distributed.all_reduce(values, group=self._host if values.device.type == "cpu" else None)

    def latest(self, value: float) -> float:
        """The greatest of all ranks' values."""
        return latest(value, self._host)

    def reduce(self, parameters: Iterable[nn.Parameter], device: Device) -> None:
        """Replace each `.grad` by its mean over the ranks, in its own dtype; means not touched since stay.

        A rank without a gradient that another one has takes part with zeros; all have `parameters` in the same order.
        Raises UnsupportedError if a gradient is sparse.
        """
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        if not self.averages(trained) or not trained:
            return
        sparse = any(_kind(parameter) == _SPARSE for parameter in trained)
        error = UnsupportedError("a gradient is sparse; gradients must be dense") if sparse else None
        if self.together(error, trained[0].device, 2 if self._are_means(trained) else 1) == 2:
            return
        device.meet(0, self.size, self.latest)
        gradients = [_gradient(parameter) for parameter in self.with_gradient(trained)]
        ahead: list[_Sum] = []
        for bucket in buckets(gradients, self.bucket_bytes):
            ahead.append(_Sum(bucket, self.size))
            device.meet(sum(gradient.nbytes for gradient in bucket), self.size, self.latest)
            if len(ahead) > 1:  # one is on its way while the next is packed; more would only take memory
                ahead.pop(0).finish()
        for one in ahead:
            one.finish()
        self._means = [(weakref.ref(gradient), gradient._version) for gradient in gradients]

    def _are_means(self, parameters: Sequence[nn.Parameter]) -> bool:
        """Whether all gradients are what `reduce` has left; accumulating counts as a touch."""
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        return len(gradients) == len(self._means) > 0 and all(
            mean() is gradient and gradient._version == version
            for gradient, (mean, version) in zip(gradients, self._means, strict=True)
        )

    def averages(self, parameters: Sequence[nn.Parameter]) -> bool:
        """Whether gradients of the trained parameters are averaged here: nobody else does it."""
        if self.reduces and not self._looked:
            self.reduces, self._looked = not _averaged_by_ddp(parameters), True
        return self.reduces

    def with_gradient(self, parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        """Those that have a gradient on any rank, of parameters in the same order on all.

        Raises UnsupportedError if one is sparse, on one rank at least.
        """
        here = torch.tensor([_kind(parameter) for parameter in parameters], dtype=torch.uint8, device="cpu")
        anywhere = here if self._on_host or not parameters else here.to(parameters[0].device)
        torch.distributed.all_reduce(anywhere, torch.distributed.ReduceOp.MAX, group=self._host)
        if (anywhere == _SPARSE).any():
            raise UnsupportedError("a gradient is sparse; gradients must be dense")
        return [parameter for parameter, one in zip(parameters, anywhere.tolist(), strict=True) if one]


def _averaged_by_ddp(parameters: Iterable[nn.Parameter]) -> bool:
    """Whether DistributedDataParallel averages all of them; it leaves no mark on them: its instances are found."""
    ddp = nn.parallel.DistributedDataParallel
    wrapped = [one for one in gc.get_objects() if ddp in type(one).__mro__]  # issubclass() of an ABC is slow
    averaged = {id(parameter) for one in wrapped for parameter in one.module.parameters()}
    return bool(averaged) and all(id(parameter) in averaged for parameter in parameters)


def latest(value: float, group: Any = None) -> float:
    """The greatest of all ranks' values. `group`: one of gloo; None: the default group is."""
    asked = torch.tensor([value], dtype=torch.float64, device="cpu")
    torch.distributed.all_reduce(asked, torch.distributed.ReduceOp.MAX, group=group)
    return float(asked)


def _gradient(parameter: nn.Parameter) -> torch.Tensor:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter, requires_grad=False)
    return parameter.grad


def _kind(parameter: nn.Parameter) -> int:
    if parameter.grad is None:
        return 0
    return 1 if parameter.grad.layout == torch.strided else _SPARSE


def buckets(gradients: Iterable[_Tensor], most_bytes: int) -> Iterator[list[_Tensor]]:
    """Tensors in order; each bucket of one dtype, and of one tensor where that is larger than a bucket."""
    bucket: list[_Tensor] = []
    nbytes = 0
    for gradient in gradients:
        if bucket and (gradient.dtype != bucket[0].dtype or nbytes + gradient.nbytes > most_bytes):
            yield bucket
            bucket, nbytes = [], 0
        bucket.append(gradient)
        nbytes += gradient.nbytes
    if bucket:
        yield bucket


class _Sum:
    """A bucket on its way to becoming its mean over the ranks."""

    def __init__(self, bucket: list[torch.Tensor], ranks: int) -> None:
        alone = len(bucket) == 1 and bucket[0].is_contiguous()
        self._bucket = bucket
        self._flat = bucket[0] if alone else torch.cat([gradient.reshape(-1) for gradient in bucket])
        self._ranks = ranks
        # A sum of fp16 may overflow where its mean does not.
        self._before = self._flat.dtype == torch.float16
        if self._before:
            self._flat.div_(ranks)
        self._handle = torch.distributed.all_reduce(self._flat, async_op=True)

    def finish(self) -> None:
        self._handle.wait()
        if not self._before:
            self._flat.div_(self._ranks)
        if self._flat is not self._bucket[0]:
            for gradient, part in zip(
                self._bucket, self._flat.split([one.numel() for one in self._bucket]), strict=True
            ):
                gradient.copy_(part.view(gradient.shape))
