"""What stands in `.grad` once a gradient has left the device: a tensor without data that knows its norm and its factor.

`clip_grad_norm_`, `get_total_norm`, `GradScaler` and `zero_grad` work with it as with any gradient. Anything else needs
the elements: until a step takes the gradient it is brought back into `.grad`, which costs the link; later it is refused
with a sentence.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from zenflow.device import in_backward
from zenflow.errors import UnsupportedError
from zenflow.kernels.base import column_norms

_aten = torch.ops.aten


def _nothing() -> None:
    return None


class GradientRecord:
    """What is known of one gradient: its columns' energies, and what it was multiplied with since backward.

    All of its numbers stay on the device, and nothing waits for them.
    """

    __slots__ = (
        "_columns",
        "_energies",
        "_gone",
        "_mixed",
        "_norm",
        "bring_back",
        "factor",
        "name",
        "together",
        "unscale",
        "whole",
        "zeroed",
    )

    def __init__(self, name: str, energies: torch.Tensor, columns: range | None = None) -> None:
        """Begin with a gradient as backward left it.

        `energies` is fp32, the squared L2 norm of each column, not finite where the column is not; `columns` says where
        in it those of this gradient are; None: it has no others.
        """
        self.name = name
        self._energies = energies
        self._columns = columns
        self.factor: torch.Tensor | None = None
        """0-dim fp32: what the gradient was multiplied with; None: nothing."""
        self.unscale: torch.Tensor | None = None
        """0-dim fp32: the part of `factor` that is GradScaler's."""
        self.zeroed = False  # whether `zero_()` was called since
        self.bring_back: Callable[[], torch.Tensor | None] = _nothing
        """Puts the gradient into `.grad` again and returns it; None where that is no longer possible."""
        self.together: Callable[[], Sequence[GradientRecord]] = tuple
        """The gradients that have left with it, whose norms are calculated when one of them is asked for."""
        self.whole: torch.Tensor | None = None
        """The gradient itself, once it was brought back: whoever still has a stand-in uses it, now in `.grad`."""
        self._norm: torch.Tensor | None = None  # without `factor`
        self._gone = False
        self._mixed = False

    @property
    def energies(self) -> torch.Tensor:
        """[columns] fp32, as it began with them."""
        if self._columns is not None:
            self._energies, self._columns = self._energies[self._columns.start : self._columns.stop], None
        return self._energies

    def energies_within(self) -> tuple[torch.Tensor, range]:
        """`energies` as a part of a tensor, with those of others perhaps."""
        if self._columns is None:
            return self._energies, range(len(self._energies))
        return self._energies, self._columns

    def norm(self) -> torch.Tensor:
        """0-dim fp32: the gradient's L2 norm as it is now, from fp32 sums; not finite where the gradient is not."""
        if self.zeroed:
            return torch.zeros((), dtype=torch.float32, device=self.energies.device)
        if self._norm is None:
            others = [record for record in self.together() if record is not self and record._norm is None]
            norms = column_norms([self.energies, *(one.energies for one in others)], [None] * (1 + len(others)))
            self._norm, *of_others = norms.unbind()
            for record, norm in zip(others, of_others, strict=True):
                record._norm = norm
        assert self._norm is not None
        return self._norm if self.factor is None else self._norm * self.factor.abs()

    def zero(self) -> None:
        """Make the gradient zero; raises UnsupportedError if another tensor took its place."""
        self._require_here()
        self.zeroed, self.factor, self.unscale, self._mixed = True, None, None, False

    def needed(self) -> torch.Tensor:
        """The gradient itself, brought back if it was not.

        Raises UnsupportedError if a step has taken it, or another tensor has its place in `.grad`.
        """
        if (whole := self.unless_taken()) is None:
            self.require_current()
            raise taken(self.name)
        return whole

    def unless_taken(self) -> torch.Tensor | None:
        """The gradient itself, brought back if it was not; None where a step has taken it."""
        if self.whole is None:
            self.require_current()
            self.whole = self.bring_back()
        return self.whole

    def added_to(self) -> torch.Tensor | None:
        """The gradient itself, for backward to add to; None where a step has taken it.

        Then the sum is not to be had, an error only if somebody uses it: many a script throws it away. Raises
        UnsupportedError if another tensor has its place in `.grad`.
        """
        self._require_here()
        self.whole = self.bring_back()
        self._mixed |= self.whole is None
        return self.whole

    def give_up(self) -> None:
        """Say that another tensor took its place in `.grad`: later uses are refused instead of being lost."""
        self._gone = True

    def require_current(self) -> None:
        """Refuse to go on with a gradient that is not to be had.

        Raises UnsupportedError if another tensor took its place, or backward has added to it after a step had taken it.
        """
        if self._mixed:
            raise taken(self.name)
        self._require_here()

    def _require_here(self) -> None:
        if self._gone:
            raise UnsupportedError(
                f"a gradient of {self.name} was used that is no longer in .grad: read parameter.grad again"
            )


class GradientPlaceholder(torch.Tensor):
    """A gradient without data, in its parameter's shape, strides, dtype and device.

    Norms come out in fp32 whatever the gradient's dtype, unless a dtype is asked for. Its 2-norm, a multiplication or
    division by a number, GradScaler's check and `zero_()` need no data; any other use brings the gradient back, or
    raises UnsupportedError after a step has taken it.
    """

    record: GradientRecord
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __new__(cls, like: torch.Tensor, record: GradientRecord, device: Any = None) -> GradientPlaceholder:
        """Stand in for the gradient of a parameter; `like` is that, or another stand-in for its gradient."""
        where = device or like.device
        made: GradientPlaceholder = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=where, requires_grad=False
        )
        made.record = record
        return made

    def __init__(self, like: torch.Tensor, record: GradientRecord, device: Any = None) -> None:
        super().__init__()

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"StandIn(gradient of {self.record.name}, shape={tuple(self.shape)}, {self.dtype}, {self.device})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if _any_back(args) or (made := _without_data(func, args, kwargs or {})) is NotImplemented:
            args, kwargs = tree_map_only(GradientPlaceholder, lambda one: one.record.needed(), (args, kwargs or {}))
            return func(*args, **kwargs)
        return made

    def share_memory_(self) -> torch.Tensor:
        whole = self.record.unless_taken()
        return self if whole is None else whole.share_memory_()

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return copy.deepcopy(self.record.needed(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.record.needed().__reduce_ex__(protocol)


def taken(name: str) -> UnsupportedError:
    """Why a gradient of the parameter `name` is not to be had that an earlier step, or another optimizer, has taken."""
    return UnsupportedError(
        f"the gradient of {name} was taken by an earlier step and is needed again: read it before step(), call "
        "zero_grad() between that step() and the next backward(), or keep gradients whole with "
        "ZenFlowConfig(stream=False)"
    )


def _without_data(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    handler = _HANDLERS.get(func.overloadpacket)
    return NotImplemented if handler is None else handler(func, *args, **kwargs)


def _any_back(args: Sequence[Any]) -> bool:
    """Whether one of these, or of the lists among them, is a stand-in whose gradient was brought back."""
    everything = (part for arg in args for part in (arg if isinstance(arg, (list, tuple)) else (arg,)))
    return any(isinstance(part, GradientPlaceholder) and part.record.whole is not None for part in everything)


def _of_whole(name: str) -> Callable[..., Any]:
    def use(self: GradientPlaceholder, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.record.needed(), name)(*args, **kwargs)

    return use


# These go to memory without asking any dispatcher; on a tensor without memory some of them crash. Not among them is
# untyped_storage(), empty and harmless: torch.compile asks for it where it meets a parameter that has a gradient.
for _name in [
    "apply_",
    "data_ptr",
    "item",
    "map_",
    "map2_",
    "numpy",
    "storage",
    "tolist",
    "_typed_storage",
    "__array__",
    "__dlpack__",
]:
    setattr(GradientPlaceholder, _name, _of_whole(_name))


# --- what a stand-in answers ---------------------------------------------------------------------------------------


def _norm(
    _: object,
    gradient: GradientPlaceholder,
    ord: float = 2,  # noqa: A002 - as torch names it
    dim: Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Any:
    everything = dim is None or {d % max(1, gradient.dim()) for d in dim} == set(range(gradient.dim()))
    if ord != 2 or not everything:
        return NotImplemented
    gradient.record.require_current()
    norm = gradient.record.norm()
    norm = norm if dtype is None else norm.to(dtype)
    return norm.reshape([1] * gradient.dim()) if keepdim else norm


def _foreach_norm(
    func: Any,
    tensors: Sequence[torch.Tensor],
    ord: float = 2,  # noqa: A002 - as torch names it
    dtype: torch.dtype | None = None,
) -> Any:
    if ord != 2:
        return NotImplemented
    plain = iter(func(rest, ord, dtype) if (rest := _plain(tensors)) else ())
    return [
        _norm(None, tensor, dtype=dtype) if isinstance(tensor, GradientPlaceholder) else next(plain)
        for tensor in tensors
    ]


def _scale(func: Any, gradient: torch.Tensor, value: Any, **rounding: Any) -> Any:
    if rounding or not isinstance(gradient, GradientPlaceholder) or (number := _number(gradient, value)) is None:
        return NotImplemented
    _multiply([gradient], [_inverted(func, number)])
    return gradient


def _foreach_scale(func: Any, tensors: Sequence[torch.Tensor], value: Any) -> Any:
    listed = isinstance(value, (list, tuple))
    values = list(value) if listed else [value] * len(tensors)
    places = [place for place, tensor in enumerate(tensors) if isinstance(tensor, GradientPlaceholder)]
    known: dict[int, torch.Tensor | None] = {}
    for place in places:
        if id(values[place]) not in known:
            known[id(values[place])] = _number(tensors[place], values[place])
    if any(number is None for number in known.values()):
        return NotImplemented
    inverted = {key: _inverted(func, number) for key, number in known.items() if number is not None}
    _multiply([tensors[place] for place in places], [inverted[id(values[place])] for place in places])
    rest = [place for place in range(len(tensors)) if place not in set(places)]
    if rest:
        func([tensors[place] for place in rest], [values[place] for place in rest] if listed else value)
    return None


def _add(func: Any, gradient: Any, other: Any, **scaled: Any) -> Any:
    if not isinstance(gradient, GradientPlaceholder) or not in_backward():
        return NotImplemented
    whole = gradient.record.added_to()
    return gradient if whole is None else func(whole, other, **scaled)


def _convert(
    _: object, gradient: GradientPlaceholder, *, dtype: Any = None, device: Any = None, **__: Any
) -> GradientPlaceholder | Any:
    """Of a gradient that was taken nothing is left to convert, as `module.double()` does with what lies in `.grad`."""
    if gradient.record.unless_taken() is not None:
        return NotImplemented
    like = torch.empty_strided(gradient.shape, gradient.stride(), dtype=dtype or gradient.dtype, device="meta")
    return GradientPlaceholder(like, gradient.record, device or gradient.device)


def _zero(_: object, gradient: GradientPlaceholder) -> GradientPlaceholder:
    gradient.record.zero()
    return gradient


def _foreach_zero(func: Any, tensors: Sequence[torch.Tensor]) -> None:
    for tensor in tensors:
        if isinstance(tensor, GradientPlaceholder):
            _zero(None, tensor)
    if rest := _plain(tensors):
        func(rest)


def _unscale(func: Any, tensors: Sequence[torch.Tensor], found_inf: torch.Tensor, inv_scale: torch.Tensor) -> None:
    gradients = [tensor for tensor in tensors if isinstance(tensor, GradientPlaceholder)]
    if rest := _plain(tensors):
        func(rest, found_inf, inv_scale)
    if not_zero := [gradient.record for gradient in gradients if not gradient.record.zeroed]:
        norms = column_norms([record.energies for record in not_zero], [record.factor for record in not_zero])
        found_inf.masked_fill_(~torch.isfinite(norms).all(), 1.0)
    # A copy: the scaler may change its own in place before the step reads this one.
    _multiply(gradients, [inv_scale.detach().float().reshape(()).clone()] * len(gradients), unscales=True)


def _multiply(gradients: Sequence[Any], numbers: Sequence[torch.Tensor], *, unscales: bool = False) -> None:
    """Multiply the records; whoever has the same factor and gets the same number shares the product."""
    products: dict[tuple[int, int], tuple[torch.Tensor, ...]] = {}

    def product(factor: torch.Tensor | None, number: torch.Tensor) -> torch.Tensor:
        if factor is None:
            return number
        key = id(factor), id(number)
        if key not in products:  # both are kept, so that no other tensor gets their ids
            products[key] = _PRODUCTS.get([factor, number], lambda: factor * number), factor, number
        return products[key][0]

    for gradient, number in zip(gradients, numbers, strict=True):
        record: GradientRecord = gradient.record
        record.require_current()
        if unscales:
            record.unscale = product(record.unscale, number)
        record.factor = product(record.factor, number)


def _number(gradient: torch.Tensor, value: Any) -> torch.Tensor | None:
    """A multiplier as 0-dim fp32 on the gradient's device, without waiting for the device; None where it is none."""
    if isinstance(value, torch.Tensor):
        if (
            isinstance(value, GradientPlaceholder)
            or value.numel() != 1
            or value.dim() > gradient.dim()
            or value.is_complex()
        ):
            return None
        if value.device == gradient.device:
            return _NUMBERS.get([value], lambda: value.detach().reshape(()).to(torch.float32, copy=True))
        value = value.item() if value.device.type == "cpu" else None
    if not isinstance(value, (int, float)):
        return None
    return torch.full((), value, dtype=torch.float32, device=gradient.device)


class _Newest:
    """The newest result of a calculation on so many tensors, while nobody has written to them.

    Scripts multiply one gradient after the other by one number: then all of them have one factor.
    """

    def __init__(self) -> None:
        self._known: tuple[list[tuple[weakref.ref[torch.Tensor], int]], torch.Tensor] | None = None

    def get(self, of: Sequence[torch.Tensor], make: Callable[[], torch.Tensor]) -> torch.Tensor:
        if any(tensor.is_inference() for tensor in of):  # nobody counts what is written to them
            return make()
        if self._known is not None:
            before, result = self._known
            if all(ref() is one and version == one._version for (ref, version), one in zip(before, of, strict=True)):
                return result
        made = make()
        self._known = [(weakref.ref(tensor), tensor._version) for tensor in of], made
        return made


_NUMBERS, _PRODUCTS = _Newest(), _Newest()


def _inverted(func: Any, number: torch.Tensor) -> torch.Tensor:
    return number.reciprocal() if func.overloadpacket in (_aten.div_, _aten._foreach_div_) else number


def _plain(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor for tensor in tensors if not isinstance(tensor, GradientPlaceholder)]


_HANDLERS: Mapping[Any, Callable[..., Any]] = MappingProxyType(
    {
        _aten.add: _add,
        _aten.add_: _add,
        _aten.linalg_vector_norm: _norm,
        _aten._foreach_norm: _foreach_norm,
        _aten._to_copy: _convert,
        _aten.mul_: _scale,
        _aten.div_: _scale,
        _aten._foreach_mul_: _foreach_scale,
        _aten._foreach_div_: _foreach_scale,
        _aten.zero_: _zero,
        _aten._foreach_zero_: _foreach_zero,
        _aten._amp_foreach_non_finite_check_and_unscale_: _unscale,
        _aten.detach: lambda _, gradient: GradientPlaceholder(gradient, gradient.record),
        _aten.detach_: lambda _, gradient: gradient,
        _aten.is_pinned: lambda *_, **__: False,
    }
)
