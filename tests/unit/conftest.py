"""A test in `unit` starts no process and uses no network; its fixtures may, once for a session."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest

_FORBIDDEN = ("subprocess.Popen", "os.fork", "os.posix_spawn", "os.exec", "os.system", "socket.connect", "socket.bind")
_test: str | None = None
"""The test under way, in this process."""
_found: list[str] = []


def _look(event: str, arguments: tuple[Any, ...]) -> None:
    if _test is not None and event in _FORBIDDEN and not _importing():
        _found.append(f"{event} {arguments[:1]}")


def _importing() -> bool:
    """Whether a library is imported: whichever test comes first is not to blame for what that starts."""
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename != "<frozen importlib._bootstrap>":
        frame = frame.f_back
    return frame.f_code.co_filename == "<frozen importlib._bootstrap>"


def pytest_configure() -> None:
    sys.addaudithook(_look)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    global _test
    _test = item.nodeid
    _found.clear()
    try:
        return (yield)
    finally:
        _test = None
        if _found:
            pytest.fail(
                f"a test in tests/unit uses processes or the network: {', '.join(_found)}; move it to tests/system"
            )
