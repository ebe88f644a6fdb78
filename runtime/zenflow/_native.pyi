"""The native part of zenflow (csrc/). An address is where a tensor's memory begins; who passes it keeps it alive."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_Hyper = tuple[Sequence[float], float]
"""A rule's hyperparameters, and the decay factor."""
_Matrix = tuple[int, str, int, int]
_Buffer = tuple[int, int]  # address, elements
"""[rows, columns] in the model's own memory: address, dtype, strides of rows and of columns in elements."""

def bandwidth(
    *, elements: int, update_interval: int, gradient_bytes: int, repeats: int, cpus: list[int]
) -> tuple[list[float], int]:
    """Seconds of each timed pass over the streams of a host update, and a checksum of the memory."""

class Entry:
    """One step's gradient of some columns."""

    def __init__(
        self,
        extents: Sequence[tuple[int, int]],
        dtype: str,
        hyper: _Hyper,
        factor: float,
        rows: NDArray[np.int64] | None,
    ) -> None: ...

class Part:
    """Columns that share a log."""

    def __init__(
        self,
        first: int,
        targets: int,
        entries: Sequence[Entry],
        slots: NDArray[np.int64] | None,
        out: NDArray[np.int64] | None,
    ) -> None: ...

class DeviceUpdates:
    """Updates of state on the device, where that is the host's memory.

    A part is the numbers of its weight and group, n, rows, addresses of master, moments, count and gradients [n, rows]
    (0: each run is given them), strides of the weight's rows and columns, the address of [n] int64 columns, how many
    columns the weight has, and the dtype of both.

    Raises:
        IndexError: a column is not one of its weight.
    """

    def __init__(
        self,
        rule: str,
        parts: Sequence[tuple[int, int, int, int, int, Sequence[int], int, int, int, int, int | None, int, str]],
    ) -> None: ...
    def run(
        self,
        weights: Sequence[int],
        gradients: Sequence[int],
        hypers: Sequence[_Hyper],
        factor: float,
        skip: bool,
        threads: int,
    ) -> None:
        """Update, with two addresses for each weight (0: there is none) and hyperparameters for each group."""

def column_energies(matrix: _Matrix, rows: int, columns: int, energies: int, threads: int) -> None:
    """Squared norms of a matrix' columns into fp32 [columns]."""

def pack_columns(matrix: _Matrix, columns: int, n: int, rows: int, limit: int, packed: int, threads: int) -> None:
    """Copy columns out of a matrix into [n, rows]."""

def scatter_columns(
    matrix: _Matrix, columns: int, n: int, rows: int, limit: int, source: int, source_dtype: str, threads: int
) -> None:
    """Write [n, rows], in fp32 or the matrix' dtype, into columns of a matrix."""

class Bucket:
    """Weights of one dtype, and where their columns go in two flat buffers, one column behind the other.

    A part is rows, columns, which columns are sent, which are kept, and the elements at which each begin.

    Raises:
        IndexError: a column is not one of its weight.
    """

    def __init__(
        self,
        dtype: str,
        transposed: bool,
        parts: Sequence[tuple[int, int, Sequence[int], Sequence[int], int, int]],
    ) -> None: ...
    def pack(self, gradients: Sequence[int], sent: _Buffer, kept: _Buffer, energies: _Buffer, threads: int) -> None:
        """Copy the columns of gradients (0: there is none), and write the energies of all parts' columns."""

    def show(self, weights: Sequence[int], sent: _Buffer, threads: int) -> None:
        """Write columns into weights (0: it is left as it is)."""

def end_helpers() -> None:
    """End the threads beside the callers of the functions above, for good."""

class Engine:
    """Threads that update the deferred columns of weights."""

    def __init__(self, cpus: list[int]) -> None: ...
    @property
    def threads(self) -> int: ...
    @property
    def alive(self) -> bool: ...
    def allocate(self, nbytes: int, interval_bytes: int) -> NDArray[np.uint8]: ...
    def register(self, rule: str, columns: int, rows: int, master: int, moments: Sequence[int], count: int) -> int: ...
    def update(
        self,
        weight: int,
        parts: Sequence[Part],
        *,
        mean: _Hyper | None,
        weights: tuple[int, str] | None,
        packed: int | None,
        coast: float = 0.0,
    ) -> int: ...
    def read(self, weight: int, first: int, targets: int, weights: int, dtype: str, keep: bool) -> int: ...
    def unpack(self, weight: int, slots: NDArray[np.int64], packed: int) -> int: ...
    def poll(self, ticket: int) -> bool: ...
    def wait(self, ticket: int, timeout_s: float) -> tuple[float, float] | None: ...
    def stop(self) -> None: ...
    def close(self) -> None: ...
    def inject(self, kind: str, pieces: int = 0, seconds: float = 0.0, seed: int = 0) -> None: ...
