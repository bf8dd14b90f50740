"""Wall clocks that can be set forward and back: libfaketime, from the package of that name in the extra `dev`.

Monotonic clocks are left alone: in reality nothing sets those.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path


def _library() -> Path | None:
    spec = find_spec("libfaketime")
    if spec is None or spec.origin is None:
        return None
    found = Path(spec.origin).parent / "vendor/libfaketime/src/libfaketime.so.1"
    return found if found.exists() else None


LIBRARY = _library()


def environment(file: Path) -> dict[str, str]:
    """Environment of a process whose clock is ahead by the offset in `file`; empty without libfaketime."""
    if LIBRARY is None:
        return {}
    put_forward(file, 0)
    return {
        "LD_PRELOAD": str(LIBRARY),
        "FAKETIME_TIMESTAMP_FILE": str(file),
        "FAKETIME_CACHE_DURATION": "0",  # read the file once per second: threads waiting for the GIL would read it, too
        "FAKETIME_FORCE_MONOTONIC_FIX": "0",  # else such a wait returns at once, and threads spin
        "NO_FAKE_STAT": "1",  # takes a semaphore that a killed child may hold
        "DONT_FAKE_MONOTONIC": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
    }


def put_forward(file: Path, by_s: int) -> None:
    """Sets the clock this many seconds ahead of the real time, from now on."""
    new = file.with_suffix(".new")
    new.write_text(f"+{by_s}\n")
    new.chmod(0o644)
    new.rename(file)


def sweep(pid: int) -> None:
    """Removes what the library leaves behind for a process that was killed."""
    for name in (f"faketime_shm_{pid}", f"sem.faketime_sem_{pid}"):
        Path("/dev/shm", name).unlink(missing_ok=True)  # noqa: S108 # its own choice


@contextlib.contextmanager
def inherited(file: Path) -> Iterator[None]:
    """Processes started within this context have such a clock."""
    before = dict(os.environ)
    # Without a cache; otherwise backends would see different clocks for a while.
    os.environ.update(environment(file) | {"FAKETIME_NO_CACHE": "1"})
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
