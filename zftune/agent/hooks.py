"""The hooks on torch itself: data loader, backward, optimizers, GradScaler."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.compiler import is_compiling
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data.dataloader import _BaseDataLoaderIter

from zftune import losses
from zftune.agent.recorder import Cause
from zftune.agent.session import Session

Wrapped = Callable[..., Any]


def hook_torch(session: Session) -> None:
    """Install them. Compiled code sees none: under the compiler each passes straight on."""
    patches = session.patches
    patches.replace(_BaseDataLoaderIter, "__next__", lambda original: _next(session, original))
    patches.replace(torch.autograd, "backward", lambda original: backward(session, original, releases=True))
    for name, change in (("capture_begin", 1), ("capture_end", -1)):
        patches.replace(torch.cuda.CUDAGraph, name, functools.partial(_capture, session, change))
    patches.replace(torch.amp.GradScaler, "scale", lambda original: _scale(session, original))
    patches.replace(torch.amp.GradScaler, "step", lambda original: _scaler_step(session, original))
    losses.listeners.append(session.log_loss)

    def begins(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not is_compiling():
            began = session.clock_ns()
            closure = kwargs.get("closure") or (args[1] if len(args) > 1 else None)
            session.step_begins(began, optimizer, has_closure=callable(closure))

    def ends(optimizer: Any, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
        if not is_compiling():
            session.step_ends(session.clock_ns(), optimizer)

    session.undo += [
        functools.partial(losses.listeners.remove, session.log_loss),
        register_optimizer_step_pre_hook(begins).remove,
        register_optimizer_step_post_hook(ends).remove,
    ]


def backward(session: Session, original: Wrapped, *, of_engine: bool = False, releases: bool = False) -> Wrapped:
    """A function that runs backward, recorded as such.

    Args:
        of_engine: whether it is a method, which has its object before that.
        releases: whether it may remove the hooks of a session that is over.
    """

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            return original(*args, **kwargs)
        began = session.clock_ns()
        if session.off and releases:
            session.release()
        begun = session.backward_begins(began, next(iter(args[of_engine:] or kwargs.values()), None))
        try:
            return original(*args, **kwargs)
        finally:
            if begun:
                session.backward_ends(session.clock_ns())

    return wrapper


def waiting(session: Session, cause: Cause, original: Wrapped) -> Wrapped:
    """A function that waits, recorded as a wait of one cause."""

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            return original(*args, **kwargs)
        begun = session.wait_begins(session.clock_ns(), cause)
        try:
            return original(*args, **kwargs)
        finally:
            if begun:
                session.wait_ends(session.clock_ns())

    return wrapper


def _next(session: Session, original: Wrapped) -> Wrapped:
    @functools.wraps(original)
    def __next__(self: Any) -> Any:  # noqa: N807 - it stands for one
        if is_compiling():
            return original(self)
        begun = session.data_begins(session.clock_ns())
        try:
            batch = original(self)
        finally:
            if begun:
                session.data_ends(session.clock_ns())
        session.batch(session.clock_ns(), batch, getattr(self, "_num_workers", None))
        return batch

    return __next__


def _capture(session: Session, change: int, original: Wrapped) -> Wrapped:
    """A capture that begins, before it does, or has ended, even if it failed to."""

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        session.captures += max(0, change)
        try:
            return original(*args, **kwargs)
        finally:
            session.captures += min(0, change)

    return wrapper


def _scale(session: Session, original: Wrapped) -> Wrapped:
    """Backward begins from the scaled loss, which is no figure of the training."""

    @functools.wraps(original)
    def scale(self: Any, outputs: Any) -> Any:
        result = original(self, outputs)
        if not is_compiling():
            session.loss_scaled(session.clock_ns(), result, outputs)
        return result

    return scale


def _scaler_step(session: Session, original: Wrapped) -> Wrapped:
    """A step that GradScaler skips, because of an overflow, is a step of the training too."""

    @functools.wraps(original)
    def step(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            return original(self, optimizer, *args, **kwargs)
        call, done = object(), False
        session.step_begins(session.clock_ns(), call, optimizer)
        try:
            result = original(self, optimizer, *args, **kwargs)
            done = True
        finally:
            session.step_ends(session.clock_ns(), call, counts=done)
        return result

    return step
