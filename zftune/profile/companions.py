"""The other ranks of the built-in workload: processes that train as this one does, each on a rig of its own."""

from __future__ import annotations

import multiprocessing
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from zftune.errors import ProfileError, ZftuneError

_PATIENCE = timedelta(minutes=5)
"""After which a rank gives up the others."""

Work = Callable[[int], None]
"""What a rank does; told its number. Of a module, since the others are other processes."""


@contextmanager
def several_ranks(ranks: int, work: Work) -> Iterator[None]:
    """Be the first of several ranks, which meet over gloo, for as long as the block lasts; one needs nothing.

    Args:
        ranks: how many there are.
        work: of the others, each in a process of its own; meets this one in the same collectives.

    Raises:
        ProfileError: another rank could not go on, with what it said.
    """
    if ranks == 1:
        yield
        return
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        begun, ears = [], []
        for rank in range(1, ranks):
            ear, mouth = context.Pipe(duplex=False)
            process = context.Process(target=_companion, args=(rank, ranks, folder, work, mouth), daemon=True)
            process.start()
            mouth.close()
            begun.append(process)
            ears.append(ear)
        try:
            _meet(0, ranks, folder)
            yield
        except RuntimeError as error:  # torch's, where another rank has left a collective
            _part()
            for said in filter(None, map(_heard, ears)):
                raise ProfileError(said) from error
            raise
        except BaseException:  # of this rank alone: the others would fail in the next collective, and say so
            for process in begun:
                process.terminate()
            raise
        finally:
            _part()
            for process in begun:
                process.join(_PATIENCE.total_seconds())


def _meet(rank: int, ranks: int, folder: str) -> None:
    store = f"file://{Path(folder) / 'ranks'}"
    torch.distributed.init_process_group("gloo", store, rank=rank, world_size=ranks, timeout=_PATIENCE)


def _part() -> None:
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _companion(rank: int, ranks: int, folder: str, work: Work, mouth: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: the first rank hears it, and ends this one
    try:
        _meet(rank, ranks, folder)
        work(rank)
    except ZftuneError as error:
        mouth.send(str(error))
    finally:
        mouth.close()
        _part()


def _heard(ear: Connection) -> str | None:
    """Why a rank could not go on, where it knows."""
    try:
        return str(ear.recv()) if ear.poll(_PATIENCE.total_seconds()) else None
    except EOFError:
        return None
