"""Names that nobody knows, and the near ones that may have been meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping

VARIABLES = {
    "ZENFLOW_KERNELS": "`auto` (the default), `triton`, `native` or `eager`: what updates columns on the device.",
    "ZENFLOW_NATIVE": "`auto` (the default) warns where the native module is missing; `require` refuses to start then;"
    " `off` does the same work in PyTorch, bit for bit equal and several times slower.",
}
"""Environment variables that zenflow reads, and what each does."""
LIKENESS = 0.6
"""From 0 to 1, of difflib: from here on a name may have been meant."""
_AS_NEAR = 0.1
_MOST = 3
_LEAST_LETTERS = 3


def near_names(name: str, names: Iterable[str], likeness: float = LIKENESS) -> list[str]:
    """At most three of `names` that may have been meant, the nearest first; case and hyphens do not count.

    `likeness`, from 0 to 1, is what one needs to be meant; up to `LIKENESS` names that begin so are meant, too.
    """
    plain, given = {_plain(one): one for one in names}, _plain(name)
    found = difflib.get_close_matches(given, plain, n=_MOST, cutoff=likeness)
    if likeness <= LIKENESS and len(given) >= _LEAST_LETTERS:
        found += [one for one in plain if one.startswith(given) and one not in found]
    return [plain[one] for one in found[:_MOST]]


def did_you_mean(name: object, names: Iterable[str], likeness: float = LIKENESS) -> str:
    """The end of a sentence about an unknown name or value: "; did you mean topk_ratio"; "" where none is near."""
    meant = nearest(name, names, likeness) if isinstance(name, str) else ""
    return f"; did you mean {meant}" if meant else ""


def nearest(name: str, names: Iterable[str], likeness: float = LIKENESS) -> str:
    """The names that may have been meant, as a choice: "topk_ratio or auto_ratio"; "" where nothing is near."""
    near = near_names(name, names, likeness)
    best = _likeness(name, near[0]) if near else 0.0
    return " or ".join(one for one in near if _likeness(name, one) >= best - _AS_NEAR)


def unread_variables(environment: Mapping[str, str], prefix: str, known: Iterable[str]) -> Iterator[str]:
    """A sentence for each environment variable that nobody reads and whose name is near that of one that is read.

    Their names begin with `prefix`, such as "ZENFLOW_".
    """
    ends = [name.removeprefix(prefix) for name in known if name.startswith(prefix)]
    for name in environment:
        end = name.removeprefix(prefix)
        if name.startswith(prefix) and end not in ends:
            near = near_names(end, ends, 0.7)
            if near:
                yield f"{name} is set, but there is no such variable; did you mean {prefix}{near[0]}"


def _plain(name: str) -> str:
    return name.lower().replace("-", "_")


def _likeness(name: str, other: str) -> float:
    return difflib.SequenceMatcher(None, _plain(other), _plain(name)).ratio()
