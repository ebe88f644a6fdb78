"""DeepSpeed, and the defects that its versions are known for."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

from zftune.doctor.check import Check
from zftune.doctor.versions import installed, numbers
from zftune.integrations.deepspeed.facts import GOOD, NEWEST_KNOWN, SCRAMBLING

_LAST_KNOWN = numbers(NEWEST_KNOWN)


def checks() -> Iterator[Check]:
    """The installed version, then a check for each defect that it has."""
    version = installed("deepspeed")
    if version is None:
        yield Check(
            name="DeepSpeed",
            status="absent",
            finding="It is not installed: nothing to compare with, and no ds_config to run.",
            fix=f"pip install deepspeed=={GOOD}",
        )
        return
    yield _version(version)
    yield from defects(version)
    yield _builds()


def _version(version: str) -> Check:
    if numbers(version) > _LAST_KNOWN:
        return Check(
            name="DeepSpeed",
            status="note",
            finding=f"{version} is newer than what zftune knows the defects of.",
            fix=f"If training differs from what you expect, compare with deepspeed=={GOOD}.",
        )
    return Check(name="DeepSpeed", status="ok", finding=f"{version}.")


def defects(version: str) -> Iterator[Check]:
    """What is known to be wrong in a version of DeepSpeed."""
    release = numbers(version)
    if version.partition("+")[0] in SCRAMBLING:
        yield Check(
            name="ZenFlow weights",
            status="broken",
            finding=(
                f"DeepSpeed {version} scrambles every 2-D weight at initialize() under ZenFlow with ZeRO stage 1 or 2:"
                " a pretrained model starts as noise."
            ),
            fix=f"pip install deepspeed=={GOOD} for upstream's ZenFlow at these stages. Without ZenFlow it is sound.",
        )
    if release <= _LAST_KNOWN:
        yield Check(
            name="ZenFlow 'auto'",
            status="note",
            finding='"update_interval": "auto", the default of its own ZenFlow, turns all weights into NaN.',
            fix='Set a number in the "zenflow" section, such as "update_interval": 4.',
        )


def _builds() -> Check:
    if shutil.which("ninja") is None and installed("ninja") is None:
        return Check(
            name="CPU Adam",
            status="absent",
            finding="There is no ninja: DeepSpeed cannot build its CPU Adam on first use.",
            fix="pip install ninja",
        )
    if not any(shutil.which(compiler) for compiler in ("c++", "g++")):
        return Check(
            name="CPU Adam",
            status="absent",
            finding="There is no C++ compiler: DeepSpeed cannot build its CPU Adam on first use.",
            fix="apt install g++ (or your system's package of it)",
        )
    return Check(name="CPU Adam", status="ok", finding="A compiler and ninja are there to build it on first use.")
