"""Weights, and rows of sharded ones, whose host update is late: readers, writers and their forward wait for it."""

from __future__ import annotations

import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from zenflow.deferred import PartWindow
from zenflow.device import Transfer, in_backward
from zenflow.host.engine import Job
from zenflow.sharded import Rows, are_sharded, model_parameter
from zenflow.signals import HeldSignals
from zenflow.weight import WeightState
from zenflow.writes import has_other_holders, storage_is_held


def units_of(module: nn.Module) -> list[Any]:
    """What `fully_shard` was called on."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # who has not imported it has none
    unit = getattr(fsdp, "FSDPModule", ())
    return [part for part in module.modules() if isinstance(part, unit)]


def gathered_by(unit: Any) -> dict[int, Any]:
    """What FSDP2 has of each parameter that it gathers with one of `units_of`, by the parameter's id."""
    state = unit._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # before torch 2.11
        group = getattr(state, "_fsdp_param_group", None)
        groups = [] if group is None else [group]
    return {id(one.sharded_param): one for group in groups for one in group.fsdp_params}


def readers_of(rows: Rows, gathered: Any) -> tuple[torch.Tensor, ...] | None:
    """The tensors by which a weight's rows are read: the parameter, its rows, and what all-gathers read.

    None where there may be others. `gathered` is what FSDP2 has of the weight.
    """
    whole = cast(Any, rows.whole)
    local, source = whole._local_tensor, getattr(gathered, "_sharded_param_data", None)
    if type(local) is not torch.Tensor or type(source) is not torch.Tensor or gathered.sharded_param is not whole:
        return None
    if storage_is_held(local):
        return None
    storage = local.untyped_storage()
    held = [one for one in (rows, local, source, local._base, source._base) if one is not None]
    if any(one.untyped_storage()._cdata != storage._cdata for one in held):
        return None
    holders = int(torch._C._storage_Use_Count(storage._cdata)) - 1  # the Python object by which it is asked
    counts: list[Callable[[], int] | None] = [getattr(one, "_use_count", None) for one in (whole, local, source)]
    if holders > len({id(one) for one in held}) or any(count is None or int(count()) > 1 for count in counts):
        return None
    return None if local.device.type == "cpu" and local.is_shared() else (whole, local, source)


_Arrive = Callable[[torch.Tensor], bool]


@dataclass(slots=True, eq=False)
class PendingUpdate:
    """A bucket's window that is not visible yet."""

    weights: list[WeightState]
    windows: list[PartWindow]  # what it does to each of them
    job: Job  # brings all of it to the device
    gradients: Transfer | None
    """The last of the gradients that the job waits for; None where it was restored."""
    due: int
    """The step after which it becomes visible."""
    synchronous: bool = False
    """Whether that is the step of the close, so that nothing of it can have been there before."""
    late: bool = False
    """Whether that step is over, and the wait for it is left to whoever uses one of the weights."""

    @property
    def bucket(self) -> int:
        """b: the bucket's number."""
        return self.windows[0].part.index

    def parts(self) -> Iterator[tuple[WeightState, PartWindow]]:
        """Each weight with its window."""
        return zip(self.weights, self.windows, strict=True)


@dataclass(slots=True, eq=False)
class _Wait:
    """Something that has to happen before any of some weights is used."""

    readers: Mapping[int, tuple[torch.Tensor, ...]]
    """By weight, the tensors by which it is used."""
    arrive: Callable[[], bool]
    """Whether it has happened, or has to be tried again before the next use."""


class Untraced(partial[Any]):
    """A hook that is in no copy of its module."""


def leave_no_trace(hooks: Any) -> None:
    """Keep each `Untraced` of a module's hooks out of copies and pickles of the module."""
    own = weakref.proxy(hooks)
    # Which pickle and deepcopy ask the object for, not its class.
    hooks.__reduce_ex__ = lambda _: (OrderedDict, ({k: v for k, v in own.items() if not isinstance(v, Untraced)},))


class LateWeights:
    """What has to happen to weights before they are used, mostly waits for late buckets, left to the first use.

    Until then a weight's class is a subclass of its own that lets it arrive before any torch function that could read
    or write it. The forward of the weight's own layer lets it arrive beforehand, since what it calls may know nothing
    of torch functions (a kernel of an extension). Not left to its use is a weight

    - whose layer's forward was not seen in the step before, since an extension might read it elsewhere,
    - whose memory somebody else holds, in this process or another: such an alias says nothing when it is read; nor does
      code that is not Python's (TorchScript),
    - of another class than `Parameter`, which may have torch functions of its own,
    - once torch.compile has been used: code that was compiled before the hooks were there does not run them.

    Of a weight of FSDP2 the rows are late. They arrive before the unit that gathers them, which then does so in the
    order of the stream, where they are, and not beside it on FSDP2's own. So that is left to a synchronous step alone:
    of others the training thread, which is ahead of the device, mostly waits for what the device finds there. No error
    is raised then, since other ranks would wait for this one: the next step says it on all of them.

    `module` owns the weights (None: no wait for a bucket is left); `show` makes a bucket visible, within `keeping`,
    which may keep an error; `saving` is called before the module's `state_dict()`.
    """

    def __init__(
        self,
        module: nn.Module | None,
        show: Callable[[PendingUpdate], None],
        keeping: Callable[[], AbstractContextManager[None]] = nullcontext,
        saving: Callable[[], None] = lambda: None,
    ) -> None:
        self._show = show
        self._saving = saving
        self._keeping = keeping
        self._late: dict[int, list[_Wait]] = {}
        self._covered: dict[int, tuple[torch.Tensor, ...]] = {}
        self._weight_of: dict[int, int] = {}  # the weight that each of the covered tensors reads
        self._ungathered: set[int] = set()
        """Sharded weights that were late after the last step, and have not been gathered since."""
        self._gathered: dict[int, Any] = {}  # what FSDP2 has of sharded weights
        self._seen: dict[int, None] = {}  # in the order in which forward needs them
        self._trusted: dict[int, None] = {}
        self._lock = threading.RLock()  # an average of weights may be taken in a thread of its own
        self._classes: dict[type, type] = {}
        self._accumulators: dict[int, Any] = {}  # held, so that their own references can be told from others
        self._handles = []
        for part in module.modules() if module is not None else ():
            own = list(part.parameters(recurse=False))
            if own:
                # First, since other hooks compute with the weights (torch.nn.utils.weight_norm).
                sharded = are_sharded([{"params": own}])
                self._hook_forward(part, partial(self._before_forward, tuple(map(id, own)), not sharded))
        if module is not None:
            self._handles.append(module.register_state_dict_pre_hook(Untraced(self._before_state_dict)))
            leave_no_trace(module._state_dict_pre_hooks)
        for unit in units_of(module) if module is not None else ():
            self._hook_forward(unit, self._before_gather)

    def _hook_forward(self, part: nn.Module, hook: Callable[..., None]) -> None:
        self._handles.append(part.register_forward_pre_hook(Untraced(hook), prepend=True))
        leave_no_trace(part._forward_pre_hooks)

    def leave(self, flight: PendingUpdate) -> bool:
        """Take over the wait for a bucket, unless it has arrived or some use of its weights could go unnoticed."""
        transfer = flight.job.transfer
        if (transfer is not None and transfer.done()) or _compiled_something():
            return False
        readers: dict[int, tuple[torch.Tensor, ...]] = {}
        for weight in flight.weights:
            parameter = weight.parameter
            key = id(model_parameter(parameter))
            if key in readers:
                continue
            if waits := self._late.get(key):
                readers[key] = waits[0].readers[key]
            elif key in self._trusted and (flight.synchronous or not isinstance(parameter, Rows)):
                readers[key] = self._readers(parameter)
            if not readers.get(key):
                return False
        self._add(_Wait(readers, partial(self._shown, flight)))
        flight.late = True
        return True

    def by_use(self, weights: Iterable[WeightState]) -> list[WeightState]:
        """Weights in the order in which the last forward needed them, and then those that it was not seen to need."""
        order = {key: place for place, key in enumerate(self._trusted)}
        return sorted(weights, key=lambda weight: order.get(id(model_parameter(weight.parameter)), len(order)))

    def _readers(self, parameter: nn.Parameter) -> tuple[torch.Tensor, ...]:
        """The tensors by which a weight is read; none where there may be others."""
        if isinstance(parameter, Rows):
            gathered = self._gathered.get(id(parameter.whole))
            return () if gathered is None else readers_of(parameter, gathered) or ()
        if type(parameter) is not nn.Parameter or self._is_known_elsewhere(parameter):
            return ()
        return (parameter,)

    def _is_known_elsewhere(self, parameter: nn.Parameter) -> bool:
        """Whether somebody could read it unnoticed: by an alias, in another process, or in C++ (TorchScript)."""
        if has_other_holders(parameter) or (parameter.device.type == "cpu" and parameter.is_shared()):
            return True
        if id(parameter) not in self._accumulators:
            self._accumulators[id(parameter)] = _accumulator(parameter)
        own = 1 if self._accumulators[id(parameter)] is None else 2  # the Python object, and where gradients are summed
        count = getattr(parameter, "_use_count", None)  # not in every torch release
        return count is None or int(count()) > own

    def _shown(self, flight: PendingUpdate) -> bool:
        with self._keeping():
            self._show(flight)
        return True

    def before_use(self, parameter: nn.Parameter, do: Callable[[], bool]) -> None:
        """Have something done before a weight is used, after `end_step`; now if its class is not `Parameter`.

        Where `do` returns false it is done again before the next use, but for a step.
        """
        if _plain_class(parameter) is nn.Parameter:
            self._add(_Wait({id(parameter): (parameter,)}, do))
        else:
            do()

    @property
    def are_some(self) -> bool:
        """Whether anything is left to the use of a weight."""
        return bool(self._late)

    def after_arrival(self, parameter: nn.Parameter, do: Callable[[], bool]) -> bool:
        """Have something done behind the waits that are left to the use of a weight; false: none is."""
        key = id(model_parameter(parameter))
        waits = self._late.get(key)
        if waits:
            self._add(_Wait({key: waits[0].readers[key]}, do))
        return bool(waits)

    def finish_weight(self, parameter: nn.Parameter) -> None:
        """Let what was left to the use of a weight happen now."""
        self._finish_weight(id(model_parameter(parameter)))

    def _add(self, wait: _Wait) -> None:
        for key in wait.readers:
            self._late.setdefault(key, []).append(wait)

    def end_step(self) -> None:
        """From now on, let what was left happen before a weight is used."""
        for key, waits in self._late.items():
            if key in self._gathered:
                self._ungathered.add(key)
            self._covered[key] = waits[0].readers[key]
            for reader in self._covered[key]:
                self._weight_of[id(reader)] = key
                reader.__class__ = self._late_class(_plain_class(reader))

    def _late_class(self, plain: type) -> type:
        """This optimizer's; another one's may have been there before."""
        if plain not in self._classes:
            self._classes[plain] = _late_class(plain, self._arrive)
        return self._classes[plain]

    def finish(self) -> None:
        """Let all that was left happen now."""
        for key in list(self._late):
            self._finish_weight(key)

    def begin_step(self) -> None:
        """Let all that was left happen now, and note which layers' forwards were seen."""
        self.finish()
        self._give_up()
        self._ungathered.clear()
        self._trusted, self._seen = self._seen, {}

    def _give_up(self) -> None:
        for key in list(self._covered):
            self._uncover(key)
        self._late.clear()

    def remove(self) -> None:
        """Take the hooks off the module and give the weights up as they are."""
        self._give_up()
        for handle in self._handles:
            handle.remove()

    def _before_forward(self, keys: Iterable[int], seen: bool, *_: object) -> None:
        if seen and not in_backward():  # recomputation under gradient checkpointing says nothing of the next step
            self._seen.update(dict.fromkeys(keys))
        for key in keys if self._late else ():
            self._finish_weight(key)

    def _before_state_dict(self, *_: object) -> None:
        self._saving()

    def _before_gather(self, unit: Any, _: object) -> None:
        gathered = gathered_by(unit)
        self._gathered.update(gathered)
        if not in_backward():
            self._seen.update(dict.fromkeys(gathered))
        if late := [key for key in gathered if key in self._ungathered]:
            self._ungathered.difference_update(late)
            for key in late:
                self._finish_weight(key)
            unit.unshard()

    def _arrive(self, reader: torch.Tensor) -> bool:
        """Let what was left happen; whether the weight is as any parameter now."""
        if self._finish_weight(self._weight_of.get(id(reader), id(reader))):
            self._give_class_back(reader)  # where it has the class of an optimizer that is gone
            return True
        return False

    def _finish_weight(self, key: int) -> bool:
        with HeldSignals(), self._lock:
            waits = self._late.get(key, [])
            for wait in list(waits):
                # It stays covered meanwhile, since another thread may want it just then.
                with torch._C.DisableTorchFunctionSubclass():
                    done = wait.arrive()
                if done:  # not before, so that an exception loses nothing
                    self._end(wait)
            if key in self._late:
                return False
            self._uncover(key)
            return True

    def _end(self, wait: _Wait) -> None:
        """A bucket has arrived in all of its weights."""
        for key in wait.readers:
            waits = self._late.get(key, [])
            if wait in waits:
                waits.remove(wait)
            if not waits:
                self._late.pop(key, None)
                self._uncover(key)

    def _uncover(self, key: int) -> None:
        for reader in self._covered.pop(key, ()):
            self._weight_of.pop(id(reader), None)
            self._give_class_back(reader)

    def _give_class_back(self, reader: torch.Tensor) -> None:
        for plain, late in self._classes.items():
            if type(reader) is late:
                reader.__class__ = plain


def _accumulator(parameter: nn.Parameter) -> Any:
    """The node of autograd that sums a parameter's gradients; None where it needs none."""
    with torch.enable_grad():
        node = parameter.view_as(parameter).grad_fn
    return None if node is None else node.next_functions[0][0]


def _compiled_something() -> bool:
    """Whether torch.compile has made code in this process."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo is not None and bool(dynamo.counters.get("frames"))


# --- the class of a late weight --------------------------------------------------------------------------------------

_T: Any = torch.Tensor
_READ = "shape dtype device layout ndim is_leaf is_cuda is_cpu is_meta is_sparse is_quantized is_nested itemsize nbytes"
_OF_AUTOGRAD = "requires_grad grad grad_fn retains_grad _backward_hooks _post_accumulate_grad_hooks"
_CALLED = (
    "size dim ndimension numel nelement stride element_size storage_offset is_floating_point is_complex is_contiguous "
    "get_device requires_grad_ __len__ register_hook register_post_accumulate_grad_hook new_empty new_zeros new_ones "
    "new_full new_tensor"
)
_MADE_ALIKE = "empty_like zeros_like ones_like full_like rand_like randn_like"
_ELEMENTS_UNUSED = frozenset(
    [getattr(_T, name).__get__ for name in f"{_READ} {_OF_AUTOGRAD}".split()]
    + [_T.grad.__set__, _T.grad.__delete__, _T.requires_grad.__set__]
    + [getattr(_T, name) for name in _CALLED.split()]
    + [getattr(torch, name) for name in f"{_MADE_ALIKE} is_floating_point is_complex numel".split()]
)
"""What is known without a weight's elements. torch.optim and `zero_grad()` ask for some of it right after a step."""


def _late_class(plain: Any, arrive: _Arrive) -> type:
    """A class for weights that arrive before they are used; it looks like their own, `plain`.

    `arrive` makes a tensor that has this class the plain one that it would be; false where it is not one yet.
    """

    class Late(plain):  # type: ignore[misc]
        __slots__ = ()
        plain_class = plain

        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            return plain(*args, **kwargs)  # somebody makes a parameter of the same type

        @classmethod
        def __torch_function__(
            cls,
            func: Callable[..., Any],
            types: Sequence[type],
            args: Sequence[Any] = (),
            kwargs: Mapping[str, Any] | None = None,
        ) -> Any:
            if func in _ELEMENTS_UNUSED:
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*args, **(kwargs or {}))
            late = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, cls)]
            if not all([arrive(leaf) for leaf in late]):  # noqa: C419 - every one, before func reads any
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*args, **(kwargs or {}))
            return func(*args, **(kwargs or {}))

        def __deepcopy__(self, memo: dict[int, Any]) -> Any:
            arrive(self)
            return plain.__deepcopy__(self, memo)

        def __reduce_ex__(self, protocol: Any) -> Any:
            arrive(self)
            return plain.__reduce_ex__(self, protocol)

    for name in ("__name__", "__qualname__", "__module__", "__doc__"):
        setattr(Late, name, getattr(plain, name))
    if (rows := getattr(plain, "_local_tensor", None)) is not None:
        Late._local_tensor = _rows_that_arrive(rows, arrive)
    return Late


def _plain_class(reader: torch.Tensor) -> type:
    """The class that a tensor has when nothing of it is late."""
    return getattr(type(reader), "plain_class", type(reader))


def _rows_that_arrive(rows: Any, arrive: _Arrive) -> property:
    """The rows of a `DTensor` that arrive before anybody gets hold of them.

    They may go on to what knows nothing of torch functions (`set_`, C++ code), or be asked for their class, as FSDP2
    does when a state is loaded: it would give rows of another class other memory.
    """

    def get(whole: Any) -> Any:
        arrive(whole)
        return rows.__get__(whole)

    def put(whole: Any, value: Any) -> None:
        arrive(whole)
        rows.__set__(whole, value)

    return property(get, put)
