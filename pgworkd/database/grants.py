"""Who may do what in the database, as SQL: `grants.sql` with the names of the roles."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pgworkd.errors import UsageError

ROLES = ("owner", "worker", "enqueuer", "reader")
ROLE_BYTES_MAX = 63
"""Postgres cuts longer names off, and would take two of them for one."""


def text(names: Mapping[str, str]) -> str:
    """The SQL for roles of these names, one for each of ROLES; UsageError for names that Postgres would not take."""
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
        return "holds a control character"
    if "://" in name:  # with a password, perhaps: it must not go on to where the SQL goes
        return "looks like the address of a database: give the role's name alone"
    if name in ("public", "none") or name.startswith("pg_"):
        return "is one that Postgres keeps for itself"
    return None
