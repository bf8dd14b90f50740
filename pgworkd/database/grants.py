"""The grants for the five roles, as SQL: `grants.sql` with the roles' names."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from pathlib import Path

from pgworkd.errors import UsageError

ROLES = ("owner", "worker", "enqueuer", "reader", "gateway")
_LEAST_FIRST = ("enqueuer", "reader", "worker", "gateway")
_DENIED = re.compile(r"permission denied for (?:schema|table|view|function|sequence) (\w+)")
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
    return _template().format(**quoted)


def groups_that_may(text: str) -> str:
    """Which groups may do what this error of the server ("permission denied for ...") says; "" if none is known."""
    found = _DENIED.search(text)
    rights = _granted().get(found[1], {}) if found is not None else {}
    ways: dict[str, list[str]] = {}
    for verb, roles in rights.items():
        groups = " or ".join(f"pgworkd_{role}" for role in _LEAST_FIRST if role in roles)
        ways.setdefault(groups, []).append(verb)
    may = ", ".join(f"{' and '.join(verbs)} is for members of {groups}" for groups, verbs in ways.items())
    return f": {may} (GRANT the group TO this user)" if may else ""


@functools.cache
def _granted() -> dict[str, dict[str, set[str]]]:
    """By object of ours and verb, the roles that have the right, maybe for some columns only."""
    granted: dict[str, dict[str, set[str]]] = {"pgworkd": {"USAGE": {"enqueuer", "reader", "worker"}}}
    for verbs, objects, roles in re.findall(r"^GRANT (.*?)\bON\b(.*?)\bTO\b(.*?);", _template(), re.S | re.M):
        for verb in re.findall(r"\w+", re.sub(r"\([^)]*\)", "", verbs)):
            for name in re.findall(r"pgworkd\.(\w+)", objects):
                granted.setdefault(name, {}).setdefault(verb, set()).update(re.findall(r"{(\w+)}", roles))
    granted["jobs"]["SELECT"].discard("enqueuer")  # it sees no more than RETURNING gives
    return granted


def _template() -> str:
    return (Path(__file__).parents[1] / "sql" / "grants.sql").read_text(encoding="utf-8")


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
