"""Where the jobs of a database are to run, as its row of `origin` says."""

from __future__ import annotations

from datetime import datetime
from typing import NamedTuple

READ = """SELECT o.environment, o.database, coalesce(o.server = pgworkd.server_id(), true), o.since,
        current_database()::text, pgworkd.is_origin($1)
    FROM pgworkd.origin o"""
"""Selects the row; $1: the environment of whoever asks."""


class Origin(NamedTuple):
    """The row, and what it is compared with."""

    environment: str | None
    database: str
    is_this_server: bool
    since: datetime
    here: str
    """The name of the database that was asked."""
    is_here: bool
    """True if the jobs may run in this database, for the environment of whoever asked."""

    def fault(self, environment: str | None) -> tuple[str, str]:
        """Why workers of `environment` do not run its jobs, and what to do."""
        if self.environment is not None:
            ours = f"{environment!r}" if environment is not None else "none"
            return (
                f"this database belongs to the environment {self.environment!r}, and this process to {ours}",
                f"if it is that one, set PGWORKD_ENVIRONMENT={self.environment} here; {_COPY}",
            )
        where = f"the database {self.database!r}"
        where += "" if self.is_this_server else " of another server"
        where += "" if self.database == self.here else f", and this one is {self.here!r}"
        restored = "if it was moved, restored or upgraded on purpose, type: pgworkd adopt"
        return f"this database is a copy, its jobs belong to {where}", f"{restored}; {_COPY}"

    def __str__(self) -> str:
        where = f"the database {self.database!r} of {'this' if self.is_this_server else 'another'} server"
        return where if self.environment is None else f"the environment {self.environment!r}"


_COPY = "if it is a copy for tests, first pgworkd cancel --all and pgworkd schedules disable --all, then pgworkd adopt"
