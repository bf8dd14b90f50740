"""The history: what each process observed, appended to a file of its own.

A record is one write, which a kill may still truncate at a page boundary of the file; then it is the file's last.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import asyncpg

AWAY = (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError)
"""What asyncpg raises when the database is unavailable."""


def now_s() -> float:
    """Seconds on the monotonic clock, which all processes of this machine share."""
    return time.clock_gettime(time.CLOCK_MONOTONIC)


class Note(NamedTuple):
    """One record: which process observed which event, and when (`now_s`)."""

    at_s: float
    by: str
    event: str
    facts: Mapping[str, Any]


class History:
    """The file of one process."""

    def __init__(self, directory: Path, name: str) -> None:
        self._name = name
        self._file = os.open(directory / f"{name}.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def note(self, event: str, **facts: Any) -> None:
        """Appends one record; values that JSON cannot represent are written as text."""
        line = json.dumps([now_s(), self._name, event, facts], default=str)
        os.write(self._file, line.encode() + b"\n")


_opened: tuple[int, History] | None = None


def of_this_process() -> Callable[..., None]:
    """`note` of the current process, by CHAOS_DIR and CHAOS_NAME; children add their pid to the name."""
    global _opened
    if _opened is None or _opened[0] != os.getpid():
        name = os.environ["CHAOS_NAME"]
        if os.environ.get("CHAOS_PID") != str(os.getpid()):
            name = f"{name}.{os.getpid()}"
        _opened = os.getpid(), History(Path(os.environ["CHAOS_DIR"]), name)
    return _opened[1].note


def load(directory: Path, name: str = "*") -> list[Note]:
    """All records of that process, or of all, ordered by time.

    A truncated last record is ignored: a process killed while writing has done nothing since, and could have been
    killed just before.
    """
    notes = []
    for path in directory.glob(f"{name}.jsonl"):
        *whole, _ = path.read_bytes().split(b"\n")
        notes += [Note(*json.loads(line)) for line in whole]
    return sorted(notes, key=lambda note: note.at_s)
