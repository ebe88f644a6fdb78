"""DeepSpeed: its engine trains with this package's runtime, or with upstream's own ZenFlow and settings that work.

import zftune.integrations.deepspeed
zftune.integrations.deepspeed.enable()      # before deepspeed.initialize(); `zftune run -- CMD` needs no such line
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zftune.store.types import Backend, Quality

__all__ = ["disable", "enable"]


def enable(
    *,
    backend: Backend | None = None,
    preset: str | None = None,
    quality: Quality | None = None,
    online: bool = False,
) -> None:
    """Let `deepspeed.initialize` use zftune from now on; what is said here comes before the "zftune" section.

    Args:
        backend: "zenflow", this package's runtime, or "deepspeed", upstream's; None: as the ds_config says, "zenflow"
            where it does not.
        preset: a name, a file, "best", or "none" for none; None: as the ds_config says, where it does not one that is
            exactly for the training, if there is one.
        quality: "exact", "published" or "loose"; None: as the ds_config says, where it does not "published" with its
            "zenflow" section and "exact" without.
        online: tune while it trains.

    Raises:
        BadInputError: an argument is not allowed.
        MissingPackageError: DeepSpeed is not installed.
    """
    from zftune.errors import require
    from zftune.integrations.deepspeed.initializing import wrap
    from zftune.integrations.deepspeed.section import NAME, Section

    require("deepspeed", "zftune.integrations.deepspeed.enable()")
    given = {"backend": backend, "preset": preset, "quality": quality, "online": online}
    section = Section.of({NAME: {name: value for name, value in given.items() if value is not None}})
    wrap(importlib.import_module("deepspeed"), section)


def disable() -> None:
    """Let `deepspeed.initialize` be DeepSpeed's own again."""
    from zftune.integrations.deepspeed.initializing import unwrap

    unwrap(importlib.import_module("deepspeed"))
