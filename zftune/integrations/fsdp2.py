"""A model over several ranks by torch's FSDP2 (`fully_shard`): what is gathered at once, and whose rows are whose."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.utils import _pytree as pytree

from zenflow.sharded import LEAST_TORCH, local_rows, rows_of
from zftune.errors import BadInputError
from zftune.text import size

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor


def units_of(module: nn.Module) -> list[nn.Module]:
    """Parts of a model whose weights are to be gathered at once, in the order of the model; the rest is one more.

    They are the blocks that transformers names (`_no_split_modules`), else the entries of the longest list of modules,
    by parameters. A part that shares a weight with what lies outside of it is none.
    """
    names = {name for part in module.modules() for name in getattr(part, "_no_split_modules", None) or ()}
    blocks = list(_outermost(module, names))
    if not blocks:
        lists = (part for part in module.modules() if isinstance(part, nn.ModuleList))
        blocks = list(max(lists, key=lambda part: sum(p.numel() for p in part.parameters()), default=()))
    return [block for block in dict.fromkeys(blocks) if _is_closed(block, module)]


def _outermost(module: nn.Module, names: set[str]) -> Iterator[nn.Module]:
    for child in module.children():
        if type(child).__name__ in names:
            yield child
        else:
            yield from _outermost(child, names)


def _is_closed(block: nn.Module, module: nn.Module) -> bool:
    """Whether it has weights, and nothing outside of it has them too."""
    inside, own = set(block.modules()), {id(parameter) for parameter in block.parameters()}
    outside = (part for part in module.modules() if part not in inside)
    return bool(own) and own.isdisjoint(id(p) for part in outside for p in part.parameters(recurse=False))


@dataclass(frozen=True, slots=True)
class Sharded:
    """What became of a model's parameters."""

    ranks: int
    parameters: list[nn.Parameter] = field(default_factory=list)
    """The new ones; each old one is a `Former`."""
    masters: dict[nn.Parameter, torch.Tensor] = field(default_factory=dict)
    """fp32 rows of this rank, on the CPU, of trained parameters that were rounded."""
    on_host_since: str = ""
    """Why the rows lie there, and are copied to the device for each use; empty: they do not."""

    @property
    def on_host(self) -> bool:
        return bool(self.on_host_since)

    @property
    def bytes(self) -> int:
        return sum(local_rows(parameter).nbytes for parameter in self.parameters)


Place = tuple[nn.Module, str]


class Former(nn.Parameter):
    """A parameter that a script has from before the model was cut up: what is done with it is done with the new one.

    Else a list of parameters that was made too early would hold empty ones without gradients, and nothing would say so.
    """

    _place: Place

    @property
    def now(self) -> nn.Parameter:
        """What the model has in its place."""
        part, name = self._place
        return cast(nn.Parameter, part._parameters[name])

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = pytree.tree_map_only(cls, now, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name == "_place":  # of one that is being made
            raise AttributeError(name)
        return getattr(self.now, name)


def now(parameters: Any) -> Any:
    """A parameter, or groups or a list of them, with the new ones for those from before the model was cut up."""
    if isinstance(parameters, dict):
        return {**parameters, "params": now(parameters["params"])}
    if isinstance(parameters, tuple):
        return parameters[0], now(parameters[1])
    if isinstance(parameters, torch.Tensor):
        return parameters.now if isinstance(parameters, Former) else parameters
    return list(map(now, parameters))


def shard(
    module: nn.Module, mesh: DeviceMesh, *, dtype: torch.dtype | None = None, on_host_since: str = "", **policy: Any
) -> Sharded:
    """Leave each rank its rows of every weight, one unit after the other: no more than one is whole on the device.

    Of whole weights each rank takes its rows of the first rank's. What `deepspeed.zero.Init` has cut up stays on its
    rank where the parts are rows; where they are not, it is gathered once, one weight at a time.

    Args:
        dtype: that floating weights are cast to; None: they keep theirs.
        on_host_since: why the rows are kept there (`CPUOffloadPolicy`); empty: they are not.

    Raises:
        BadInputError: a parameter has no dimension or no element, or trained ones of a unit are of several dtypes.
    """
    from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, fully_shard

    if isinstance(module, FSDPModule):  # by an earlier call
        return Sharded(mesh.size(), list(module.parameters()), on_host_since=on_host_since)
    if on_host_since:  # FSDP2's copies go on beside compute only where the rows are pinned
        policy["offload_policy"] = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu")
    made, places = Sharded(mesh.size(), on_host_since=on_host_since), _places(module)
    for unit in (*units_of(module), module):
        own = [parameter for parameter in unit.parameters() if id(parameter) in places]
        _require_fitting(module, own, dtype)
        home = torch.device("cpu" if on_host_since else mesh.device_type)
        cut = {id(old): _cut(old, places[id(old)], mesh, dtype, home) for old in own}
        fully_shard(unit, mesh=mesh, **policy)
        for old in own:
            rows, master = cut[id(old)]
            where = places.pop(id(old))
            new = _sharded(where, rows)
            made.parameters.append(new)
            if master is not None and new.requires_grad:
                made.masters[new] = master
            _redirect(old, where[0])
    _let_parts_be_called(module)
    return made


def require_torch() -> None:
    """Refuse a torch without what is needed.

    Raises:
        BadInputError: it is too old.
    """
    found = tuple(map(int, torch.__version__.split(".")[:2]))
    if found < LEAST_TORCH:
        raise BadInputError(
            f"ZeRO stage 3 with the backend zenflow needs torch {'.'.join(map(str, LEAST_TORCH))} or newer, and this "
            f"is {torch.__version__}: update it, or use stage 2"
        )


def stays_on_device(
    module: nn.Module,
    ranks: int,
    dtype: torch.dtype | None,
    available_bytes: int,
    *,
    may_leave: bool = False,
    besides_bytes: int = 0,
) -> bool:
    """Whether the weights of a rank stay on its device; else they stay on the host, from where FSDP2 copies each unit.

    Args:
        may_leave: whether they may be on the host.
        besides_bytes: that are needed beside the weights, so that they leave where they may.

    Raises:
        BadInputError: they do not fit where they may be.
    """
    needed = device_bytes(module, ranks, dtype)
    if needed + (besides_bytes if may_leave else 0) <= available_bytes:
        return True
    instead = 'take more ranks, or "zftune": {"backend": "deepspeed"}'
    if not may_leave:
        instead = f'set "offload_param": {{"device": "cpu"}} in zero_optimization, {instead}'
    elif (streamed := device_bytes(module, ranks, dtype, on_host=True)) <= available_bytes:
        return False
    else:
        needed = streamed
    raise BadInputError(
        f"the weights at ZeRO stage 3 take {size(needed)} of a device (ranks: {ranks}), of which "
        f"{size(available_bytes)} are free: {instead}"
    )


def device_bytes(module: nn.Module, ranks: int, dtype: torch.dtype | None, *, on_host: bool = False) -> int:
    """Most bytes of weights that a rank has on its device at a time.

    Args:
        on_host: the rows stay there. Then it is what is in no unit, the unit that computes, and one that is copied
            ahead; else the rows, and on several ranks the largest of these whole.
    """

    def nbytes(parameter: nn.Parameter) -> int:
        size = dtype.itemsize if dtype is not None and parameter.is_floating_point() else parameter.element_size()
        return size * _shape(parameter).numel()

    weights_bytes = sum(map(nbytes, module.parameters()))
    units = sorted(sum(map(nbytes, unit.parameters())) for unit in units_of(module))
    rest = weights_bytes - sum(units)
    if on_host:
        return rest + sum(units[-2:])
    return weights_bytes if ranks == 1 else -(-weights_bytes // ranks) + max([rest, *units])


def shapes_of(module: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    """A module of the same classes and whole shapes without memory, for who asks for shapes; it cannot be called.

    Args:
        module: whole, or cut up by `deepspeed.zero.Init`.
    """
    made: dict[int, nn.Parameter] = {}

    def alike(old: nn.Parameter) -> nn.Parameter:
        kind = dtype if dtype is not None and old.is_floating_point() else old.dtype
        empty = torch.empty(_shape(old), dtype=kind, device="meta")
        return made.setdefault(id(old), nn.Parameter(empty, requires_grad=old.requires_grad))

    def of(part: nn.Module) -> nn.Module:
        new = object.__new__(type(part))
        vars(new).update(vars(part))
        new._parameters = {name: one if one is None else alike(one) for name, one in part._parameters.items()}
        new._modules = {name: one if one is None else of(one) for name, one in part._modules.items()}
        return new

    return of(module)


def make_whole(module: nn.Module) -> None:
    """Undo `deepspeed.zero.Init` of a model that one rank has alone; parameters stay the same objects."""
    for parameter in module.parameters():
        if hasattr(parameter, "ds_id"):
            parameter.data = _rows_of_zero(parameter, 0, 1)
            for name in [name for name in vars(parameter) if name.startswith("ds_")]:
                delattr(parameter, name)  # by which scripts tell what is cut up


def _places(module: nn.Module) -> dict[int, list[Place]]:
    found: dict[int, list[Place]] = {}
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                found.setdefault(id(parameter), []).append((part, name))
    return found


def _require_fitting(module: nn.Module, own: list[Any], dtype: torch.dtype | None) -> None:
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    for parameter in own:
        if not _shape(parameter):
            raise BadInputError(
                f"{names[id(parameter)]} has no dimension; at ZeRO stage 3 a parameter must have one or more: "
                "give it the shape (1,)"
            )
        if not _shape(parameter).numel():
            raise BadInputError(
                f"{names[id(parameter)]} is of shape {tuple(_shape(parameter))}, at ZeRO stage 3 on several "
                "ranks a parameter must have elements"
            )
    dtypes = sorted({str(one.dtype).removeprefix("torch.") for one in own if one.requires_grad})
    if dtype is None and len(dtypes) > 1:
        raise BadInputError(
            f"the trained parameters beside {names[id(own[0])]} are of dtypes {', '.join(dtypes)}; at ZeRO "
            "stage 3 they must have one"
        )


def _cut(
    old: Any, places: list[Place], mesh: DeviceMesh, dtype: torch.dtype | None, home: torch.device
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    rank, ranks, on_zero = mesh.get_local_rank(), mesh.size(), hasattr(old, "ds_id")
    target = dtype if dtype is not None and old.is_floating_point() else old.dtype
    if on_zero:
        rows = _rows_of_zero(old, rank, ranks)
        without_memory = torch.empty(old.ds_shape, dtype=target, device="meta")
        _put(places, nn.Parameter(without_memory, requires_grad=old.requires_grad))
    else:
        whole = old.data.to(mesh.device_type).contiguous()
        torch.distributed.broadcast(whole, 0)
        rows, old.data = rows_of(whole, rank, ranks), whole.to(target)
    rounded = rows.dtype == torch.float32 and target != torch.float32
    master = rows.to("cpu", copy=True) if rounded else None
    return (rows.to(home, target).clone() if on_zero else None), master


def gathered(rows: torch.Tensor, parameter: nn.Parameter) -> torch.Tensor:
    """The whole of which each rank has rows, on the device that computes; to be called on all ranks."""
    from torch.distributed.tensor import DTensor

    like = cast("DTensor", parameter)
    return DTensor.from_local(
        rows.to(like.device_mesh.device_type),
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    ).full_tensor()


def as_dtensor(rows: torch.Tensor, parameter: nn.Parameter) -> DTensor:
    """Rows of this rank as a part of the whole, where the parameter's rows are, which may be the host."""
    return _part(rows.to(cast("DTensor", parameter)._local_tensor.device), parameter)


def _part(rows: torch.Tensor, parameter: nn.Parameter) -> DTensor:
    """Rows of this rank as a part of the whole, where they are: `from_local` would move them to the mesh's device."""
    from torch.distributed.tensor import DTensor

    spec = cast("DTensor", parameter)._spec
    meta = cast(Any, spec.tensor_meta)._replace(dtype=rows.dtype)
    return DTensor(rows, type(spec)(spec.mesh, spec.placements, meta), requires_grad=False)


def whole(values: torch.Tensor) -> torch.Tensor:
    """All of a DTensor, on the device that computes, to be called on all ranks; else the values themselves."""
    if not hasattr(values, "full_tensor"):
        return values
    if values.device.type == values.device_mesh.device_type:  # type: ignore[attr-defined]
        found: torch.Tensor = values.full_tensor()
        return found
    return gathered(local_rows(values), cast(nn.Parameter, values))


def own_rows(values: torch.Tensor, parameter: nn.Parameter) -> torch.Tensor:
    """This rank's rows of a whole: a view."""
    mesh = cast("DTensor", parameter).device_mesh
    return rows_of(values.view(parameter.shape), mesh.get_local_rank(), mesh.size())


def _rows_of_zero(old: Any, rank: int, ranks: int) -> torch.Tensor:
    """Of what `deepspeed.zero.Init` has cut up: equal parts of the flat weight, the last ones padded."""
    shape, is_whole = torch.Size(old.ds_shape), old.ds_status.name == "AVAILABLE"
    if not is_whole and (ranks == 1 or len(shape) == 1 or shape[0] % ranks == 0):
        part: torch.Tensor = old.ds_tensor.data.reshape(-1)
        begin = min(rank * len(part), shape.numel())
        length = min(len(part), shape.numel() - begin)
        return part[:length].view(length // max(1, shape[1:].numel()), *shape[1:])
    if not is_whole:
        old.all_gather([old])
    rows = rows_of(old.data.view(shape), rank, ranks).clone()
    if not is_whole:
        old.partition([old])
    return rows


def _put(places: list[Place], parameter: nn.Parameter) -> None:
    for part, name in places:
        part._parameters[name] = parameter


def _sharded(places: list[Place], rows: torch.Tensor | None) -> nn.Parameter:
    """What `fully_shard` has put there, with rows of its own where they are given."""
    part, name = places[0]
    made = part._parameters[name]
    assert made is not None
    if rows is not None:
        made = nn.Parameter(_part(rows, made), requires_grad=made.requires_grad)
        _put(places, made)
    return made


def _redirect(old: Any, place: Place) -> None:
    old.data = torch.empty(0, dtype=old.dtype, device=old.device)
    vars(old).clear()  # what ZeRO asks it for is the new one's
    old.__class__ = Former
    old._place = place


def _let_parts_be_called(module: Any) -> None:
    """Let each part of a model be called on its own, as `generate` of transformers calls an encoder.

    FSDP2 gathers weights where the forward of a unit begins. A part that is called outside of it gets its own.
    """
    module._get_fsdp_state()._lazy_init()  # the root is the whole model, whichever unit is called first
    for part in module.modules():
        if part._parameters:
            own = _OwnWeights()
            part.register_forward_pre_hook(own.gather)
            part.register_forward_hook(own.give_back, always_call=True)


class _OwnWeights:
    """Those of a part that is called where they are not gathered."""

    def __init__(self) -> None:
        self._rows: list[dict[str, nn.Parameter]] = []

    def gather(self, part: nn.Module, _args: Any) -> None:
        rows = {name: one for name, one in part._parameters.items() if one is not None and _are_rows(one)}
        if rows:
            self._rows.append(rows)
            for name, parameter in rows.items():
                setattr(part, name, whole_parameter(parameter))

    def give_back(self, part: nn.Module, _args: Any, _output: Any) -> None:
        for name, parameter in self._rows.pop().items() if self._rows else ():
            setattr(part, name, parameter)


def _are_rows(parameter: object) -> bool:
    """Whether it is a DTensor, and none that a script has gathered."""
    from torch.distributed.tensor import DTensor

    return type(parameter) is DTensor


def whole_parameter(parameter: nn.Parameter) -> nn.Parameter:
    """All of a DTensor as a parameter whose gradients, averaged over the ranks, are added to the DTensor's.

    Args:
        parameter: a DTensor; all ranks ask for it, and take part in a backward pass that reaches it.
    """
    with torch.no_grad():
        made = nn.Parameter(whole(parameter.detach()).clone(), requires_grad=parameter.requires_grad)
    if made.requires_grad:
        made.register_post_accumulate_grad_hook(functools.partial(_hand_on_gradient, parameter))
    return made


def _hand_on_gradient(parameter: nn.Parameter, made: torch.Tensor) -> None:
    from torch.distributed.tensor import DTensor, Partial

    like = cast("DTensor", parameter)
    assert made.grad is not None
    gradient = DTensor.from_local(made.grad, like.device_mesh, [Partial()], run_check=False)
    made.grad = None
    rows = gradient.redistribute(placements=like.placements) / like.device_mesh.size()
    if made.device.type != "cpu":
        torch.accelerator.synchronize()  # FSDP2 adds to it on a stream of its own
    if parameter.requires_grad:
        own = as_dtensor(local_rows(rows), parameter)
        parameter.grad = own if parameter.grad is None else parameter.grad + own


def _shape(parameter: Any) -> torch.Size:
    return torch.Size(getattr(parameter, "ds_shape", parameter.shape))
