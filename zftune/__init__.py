"""Profile and tune offloaded training: where the GPU's time goes, and the knobs that win it back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zftune.attaching import Tuner as Tuner
    from zftune.attaching import attach as attach
    from zftune.attaching import log_loss as log_loss
    from zftune.attaching import log_tokens as log_tokens
    from zftune.attaching import stats as stats
    from zftune.notebook import profile_steps as profile_steps
    from zftune.notebook import shown as shown

_IN_NOTEBOOKS = ("profile_steps", "shown")
__all__ = ["Tuner", "__version__", "attach", "log_loss", "log_tokens", "profile_steps", "shown", "stats"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """What a training loop uses, loaded when it is used: the command line needs no torch for its help."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module("zftune.notebook" if name in _IN_NOTEBOOKS else "zftune.attaching"), name)


def __dir__() -> list[str]:
    """With what is loaded when it is used."""
    return sorted({*globals(), *__all__})
