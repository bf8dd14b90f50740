"""Operators' operations, for the CLI and for programs: `Admin`, which needs a database and nothing of the engine.

admin     Admin: one connection, the fleet's numbers, doctor       jobs       retry, cancel, discard, edit, enqueue
queues    settings, pause, resume; what ended in them              batches    trees: progress, seal, cancel, delete
dead      dead jobs by group of errors; mute
keys      what waits under a key; free a kept dedupe key           schedules  enable, disable, remove, run now
examination, findings  what `pgworkd doctor` finds
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pgworkd.admin.admin import Admin

__all__ = ["Admin"]


def __getattr__(name: str) -> Any:
    """Imports Admin when it is first used: commands that print help or queries alone start without the driver."""
    if name != "Admin":
        raise AttributeError(f"module 'pgworkd.admin' has no attribute {name!r}")
    from pgworkd.admin.admin import Admin

    return Admin


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
