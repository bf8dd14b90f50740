"""What operators do, for the CLI and for programs: `Admin`, which needs a database and nothing of the engine."""

from __future__ import annotations

from pgworkd.admin.admin import Admin

__all__ = ["Admin"]
