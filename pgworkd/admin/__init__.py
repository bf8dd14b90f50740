"""Operators' operations, for the CLI and for programs: `Admin`, which needs a database and nothing of the engine.

admin     Admin: one connection, the fleet's numbers, doctor       jobs       retry, cancel, discard, edit, enqueue
queues    settings, pause and resume                               batches    trees: progress, seal, cancel, delete
keys      dedupe keys kept after the end of a job                  schedules  enable, disable, remove, run now
"""

from __future__ import annotations

from pgworkd.admin.admin import Admin

__all__ = ["Admin"]
