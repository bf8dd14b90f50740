"""The grants for the five roles, as SQL: `grants.sql` with the roles' names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pgworkd.errors import UsageError

ROLES = ("owner", "worker", "enqueuer", "reader", "gateway")
ROLE_BYTES_MAX = 63
"""Postgres truncates longer names, so that two of them could become one."""


def text(names: Mapping[str, str]) -> str:
    """The SQL for roles of these names, one for each of ROLES. Raises UsageError for names that Postgres rejects."""
    for role, name in names.items():
        if fault := _fault(name):
            raise UsageError(f"the {role}'s name {fault}")
    if len(set(names.values())) < len(names):
        raise UsageError("two of the roles have the same name: each needs its own")
    quoted = {role: '"' + name.replace('"', '""') + '"' for role, name in names.items()}
    return (Path(__file__).parents[1] / "sql" / "grants.sql").read_text(encoding="utf-8").format(**quoted)


def _fault(name: str) -> str | None:
    if not 1 <= len(name.encode(errors="surrogatepass")) <= ROLE_BYTES_MAX:
        return f"must have 1 to {ROLE_BYTES_MAX} bytes"
    if not name.isprintable():
        return "contains a control character"
    if "://" in name:  # perhaps with a password, which must not end up in the SQL
        return "looks like the address of a database: give the role's name alone"
    if name in ("public", "none") or name.startswith("pg_"):
        return "is reserved by Postgres"
    return None
