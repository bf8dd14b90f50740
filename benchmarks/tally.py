"""Counters of a worker process, read by the driver while it works: 64-bit integers in a shared memory-mapped file.

A worker counts its calls here, which takes a tenth of a microsecond and no system call; the driver reads them without
disturbing it. Each process has a file of its own, `DIRECTORY/PID`, little-endian:

    0  calls so far      1  monotonic ns of the first call      2  numbers noted      3...  the numbers

The monotonic clock is one for all processes of a machine. Standard library only: peers run with their own Python.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from array import array
from pathlib import Path

ENVIRONMENT = "PGWORKD_BENCH_TALLY"
"""Names the directory to a worker."""
_CELLS = 1 << 20
_CALLS, _FIRST, _NOTED, _HEAD = 0, 1, 2, 3


class Tally:
    """One process's counters; private if `directory` is None."""

    def __init__(self, directory: str | None) -> None:
        if directory is None:
            self._cells = memoryview(array("q", bytes(8 * _CELLS)))
            return
        with (Path(directory) / str(os.getpid())).open("a+b") as file:  # a second tally here continues the count
            file.truncate(8 * _CELLS)  # sparse: only written pages take space
            self._cells = memoryview(mmap.mmap(file.fileno(), 0)).cast("q")

    def called(self, inserted_ns: int | None = None) -> None:
        """Counts one call; notes the ns since its job was inserted, where the payload says when."""
        if inserted_ns is not None:
            self.note(time.monotonic_ns() - inserted_ns)
        cells = self._cells
        if not cells[_CALLS]:
            cells[_FIRST] = time.monotonic_ns()
        cells[_CALLS] += 1

    def note(self, *numbers: int) -> None:
        """Appends numbers for the driver."""
        cells = self._cells
        for number in numbers:
            cells[_HEAD + cells[_NOTED]] = number
            cells[_NOTED] += 1


def from_environment() -> Tally:
    """The tally that the driver requested, or a private one."""
    return Tally(os.environ.get(ENVIRONMENT))


class Tallies:
    """All tallies of a directory, as the driver sees them."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def calls(self) -> int:
        """How often handlers were called, in all processes together."""
        return sum(self._cell(path, _CALLS) for path in self._files())

    def first_ns(self) -> int | None:
        """When the first handler was called, on the monotonic clock; None if none was."""
        return min((first for path in self._files() if (first := self._cell(path, _FIRST))), default=None)

    def notes(self) -> dict[int, list[int]]:
        """The numbers noted, by process id."""
        found = {}
        for path in self._files():
            with path.open("rb") as file:
                count = struct.unpack("<3q", file.read(24))[_NOTED]
                found[int(path.name)] = list(struct.unpack(f"<{count}q", file.read(8 * count)))
        return found

    def _files(self) -> list[Path]:
        return [path for path in self.directory.iterdir() if path.stat().st_size >= 8 * _HEAD]

    @staticmethod
    def _cell(path: Path, number: int) -> int:
        with path.open("rb", buffering=0) as file:
            return int(struct.unpack("<3q", file.read(24))[number])
