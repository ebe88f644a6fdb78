"""Whether a process is ours."""

from __future__ import annotations

import os

import psutil


def is_ours(pid: int) -> bool | None:
    """Whether a process is this one or a descendant of it; None where there is no such process here.

    A container's process may be known to the driver by its number outside.
    """
    try:
        process = psutil.Process(pid)
        return pid == os.getpid() or any(parent.pid == os.getpid() for parent in process.parents())
    except psutil.NoSuchProcess:
        return None
    except psutil.AccessDenied:
        return False  # of another user
