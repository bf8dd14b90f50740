"""Commands on dead jobs: list them by group of errors; mute the alerts about a group."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from pgworkd.cli.common import Dsn, Json, QueueOption, ask, ask_any, check_queue, duration, span_or_instant
from pgworkd.cli.output import as_json, brief_error, cell, is_terminal, note, out, table
from pgworkd.core.validation import counted
from pgworkd.errors import PgworkdError, UsageError

if TYPE_CHECKING:
    from pgworkd.admin.admin import Admin
    from pgworkd.admin.dead import DeadGroup, DeadGroups

_COLUMNS = ("group", "queue", "kind", "dead", "share", "new", "first", "last", "muted", "sample", "error")
_COLUMNS_TERMINAL = ("group", "dead", "queue", "kind", "new", "share", "last", "muted", "sample", "first", "error")


def dead(
    *,
    since: Annotated[float | None, duration("--since", text="Only jobs that died within 30m, 24h or 7d.")] = None,
    queue: QueueOption = None,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=1000, help="Maximum number of groups.")] = 20,
    json: Json = False,
    dsn: Dsn = None,
) -> None:
    """List the dead jobs by queue, kind and group of errors: new groups (of the last 24 h) first, then the largest.

    A group's errors differ in numbers, ids, quoted text, paths and addresses only.
    """

    async def question(admin: Admin) -> DeadGroups:
        found = await admin.dead.find(since, queue, limit)
        if queue is not None and not found.rows:
            await check_queue(admin, queue)
        return found

    found = ask_any(dsn, question)
    if json:
        as_json([row._asdict() | {"share": round(found.share(row), 6)} for row in found.rows])
    else:
        columns = _COLUMNS_TERMINAL if is_terminal() else _COLUMNS
        rows = [_shown(row, found.share(row)) for row in found.rows]
        table(columns, [[row[name] for name in columns] for row in rows], legible="error")
    if found.groups > len(found.rows):
        rest = found.dead - sum(row.dead for row in found.rows)
        note(f"{counted(found.groups - len(found.rows), 'more group')} of {counted(rest, 'dead job')}: see --limit")


def mute(
    group: Annotated[int, typer.Argument(metavar="GROUP", show_default=False, help="The number in pgworkd dead.")],
    *,
    until: Annotated[
        str | None,
        typer.Option("--until", metavar="DURATION|INSTANT", help="For 30m, 2h, or until 2027-01-31T07:00:00+01:00."),
    ] = None,
    off: Annotated[bool, typer.Option("--off", help="Send alerts about the group again.")] = False,
    dsn: Dsn = None,
) -> None:
    """Send no alerts about a group of errors for some time; its jobs are listed and counted all the same."""
    if off == (until is not None):
        raise UsageError("give --until 2h (or an instant), or --off")
    for_s, at = (None, None) if until is None else span_or_instant(until, "--until")

    async def question(admin: Admin) -> bool:
        return await (admin.dead.unmute(group) if off else admin.dead.mute(group, for_s, at))

    if not ask(dsn, question):
        raise PgworkdError(f"no group of errors has the number {group}: pgworkd dead shows them")
    end = f"muted for {for_s:g} s" if for_s is not None else f"muted until {at.isoformat()}" if at else "not muted"
    out(f"group {group} is {end}")


def _shown(row: DeadGroup, share: float) -> dict[str, object]:
    return {
        **row._asdict(),
        "share": f"{share:.1%}",
        "first": row.first_at,
        "last": row.last_at,
        "error": (brief_error(row.error) or "") + (f" (raised in {row.place})" if row.place else ""),
        "muted": (cell(row.muted_until) if row.muted_until else "for good") if row.muted else False,
    }
