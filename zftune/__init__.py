"""Profile and tune offloaded training: where the GPU's time goes, and the knobs that win it back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zftune.tuner.attach import Tuner as Tuner
    from zftune.tuner.attach import attach as attach
    from zftune.tuner.attach import log_loss as log_loss
    from zftune.tuner.attach import log_tokens as log_tokens

__all__ = ["Tuner", "__version__", "attach", "log_loss", "log_tokens"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """What a training loop uses, loaded when it is used: the command line needs no torch for its help."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from zftune.tuner import attach as module

    return getattr(module, name)


def __dir__() -> list[str]:
    """With what is loaded when it is used."""
    return sorted({*globals(), *__all__})
