"""Commands on queues: list their jobs and effective settings; change settings for every daemon at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pgworkd.cli.common import (
    Dsn,
    Json,
    QueueArgument,
    ask,
    ask_any,
    check_queue,
    duration,
    note_standby,
    one_or_all,
    option,
    span_or_instant,
    takes,
)
from pgworkd.cli.output import as_json, is_terminal, out, table
from pgworkd.core.validation import counted
from pgworkd.errors import UsageError
from pgworkd.process.redaction import escaped
from pgworkd.settings.queue import SETTINGS, EffectiveSetting, columns_of, effective_settings
from pgworkd.settings.queue import unset as emptied_by

if TYPE_CHECKING:
    from pgworkd.admin.admin import Admin

_NARROW = "queue paused due running failed dead oldest_due_s workers slots blocked scheduled paused_until sample_age_s"

ForS = Annotated[
    float | None, duration("--for", "--for-s", text="Length of the pause, such as 10m; default: until resumed.")
]
Until = Annotated[
    str | None,
    typer.Option("--until", metavar="INSTANT|DURATION", help="End of the pause: 2027-01-31T07:00:00+01:00, or 10m."),
]
QueueOrAll = Annotated[
    str | None, typer.Argument(metavar="QUEUE", show_default=False, help="The queue's name, or --all.")
]
All = Annotated[bool, typer.Option("--all", help="All queues.")]
Exact = Annotated[bool, typer.Option("--exact", help="Count now, however many jobs there are.")]
Create = Annotated[bool, typer.Option("--create", help="Allow a queue that does not exist yet.")]
Unset = Annotated[
    list[str] | None,
    typer.Option("--unset", metavar="NAME", help="Remove an override (repeatable; all removes every one)."),
]


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


_SETTINGS = {name: option(_flag(name), setting.metavar, setting.help) for name, setting in SETTINGS.items()}
_SETTINGS["fair"] = Annotated[bool | None, typer.Option("--fair/--no-fair", help=SETTINGS["fair"].help)]
group = typer.Typer(help="List the queues and their effective settings; change them for every daemon at once.")


@group.callback(invoke_without_command=True)
def queues(context: typer.Context, *, exact: Exact = False, json: Json = False, dsn: Dsn = None) -> None:
    """List the queues: jobs by status, workers and slots, and the effective settings with their source.

    With many jobs the counts are those of the daemons' last sample, and sample_age_s is its age; else they are exact.

    Sources of a setting: row (pgworkd queues set, or the table), code, settings (of the daemons), default.
    """
    if context.invoked_subcommand is not None:
        if json or exact or dsn is not None:
            raise UsageError(f"put --exact, --json and --dsn after: pgworkd queues {context.invoked_subcommand} ...")
        return

    from pgworkd.admin.queries import QueueRow

    async def question(admin: Admin) -> tuple[Sequence[QueueRow], Mapping[str, list[EffectiveSetting]]]:
        await note_standby(admin)
        return await admin.queues.find(exact=exact), await admin.queues.settings()

    rows, settings = ask_any(dsn, question)
    if json:
        as_json([row._asdict() | {"settings": _plain(settings.get(row.queue))} for row in rows])
        return
    columns = _NARROW.split() if is_terminal() else QueueRow._fields
    shown = [
        [*(getattr(row, name) for name in columns), _brief(settings.get(row.queue), omit="paused")] for row in rows
    ]
    table((*columns, "settings"), shown)


@group.command()
def show(queue: QueueArgument, *, json: Json = False, dsn: Dsn = None) -> None:
    """Show every setting of a queue and its source."""

    async def question(admin: Admin) -> list[EffectiveSetting] | None:
        await check_queue(admin, queue)
        await note_standby(admin)
        return (await admin.queues.settings()).get(queue)

    found = _all(ask_any(dsn, question))
    if json:
        as_json(_plain(found))
    else:
        table(("setting", "effective"), [(each.name, str(each)) for each in found], whole=True)


@group.command("set")
@takes(_SETTINGS)
def set_(
    queue: QueueArgument,
    *,
    unset: Unset = None,
    create: Create = False,
    json: Json = False,
    dsn: Dsn = None,
    **given: Any,
) -> None:
    """Override settings of a queue; every daemon applies them at once, and keeps them after a restart."""
    changes: dict[str, object] = {}
    for name, value in given.items():
        changes |= {} if value is None else columns_of(name, value, _flag(name))
    emptied = emptied_by(unset or [], "--unset")
    _check_changes(changes, emptied)

    async def question(admin: Admin) -> list[EffectiveSetting] | None:
        await check_queue(admin, queue, create=create)
        await admin.queues.set(queue, changes | emptied)
        return (await admin.queues.settings()).get(queue)

    found = _all(ask(dsn, question))
    if json:
        as_json(_plain(found))
    else:
        out(f"queue {escaped(queue)}: {_brief(found)}")


def _check_changes(changes: Mapping[str, object], emptied: Mapping[str, object]) -> None:
    if twice := changes.keys() & emptied.keys():
        raise UsageError(f"{min(twice)} is both set and unset: give one of them")
    if not changes and not emptied:
        raise UsageError("nothing to change: give a setting, such as --concurrency 4, or --unset NAME")


@group.command()
def pause(
    queue: QueueOrAll = None,
    *,
    every: All = False,
    for_s: ForS = None,
    until: Until = None,
    create: Create = False,
    dsn: Dsn = None,
) -> None:
    """Start no more jobs of a queue, or of all that exist now; running jobs continue."""
    one_or_all(queue, "queue", every=every)
    if for_s is not None and until is not None:
        raise UsageError("--for and --until: give one of them")
    for_s, at = (for_s, None) if until is None else span_or_instant(until, "--until")

    async def question(admin: Admin) -> int:
        if queue is not None:
            await check_queue(admin, queue, create=create)
        names = await admin.queues.names() if queue is None else [queue]
        for name in names:
            await admin.queues.pause(name, for_s, at)
        return len(names)

    paused = ask(dsn, question)
    end = "until resumed" if for_s is None else f"for {for_s:g} s"
    what = f"queue {escaped(queue)} is" if queue is not None else f"{counted(paused, 'queue')} paused:"
    out(f"{what}{' paused' if queue is not None else ''} {end if at is None else f'until {at.isoformat()}'}")


@group.command()
def resume(queue: QueueOrAll = None, *, every: All = False, dsn: Dsn = None) -> None:
    """End a queue's pause, or all pauses."""
    one_or_all(queue, "queue", every=every)

    async def question(admin: Admin) -> int:
        resumed = await admin.queues.resume(queue)
        if not resumed and queue is not None:
            await check_queue(admin, queue)
        return resumed

    resumed = ask(dsn, question)
    if queue is None:
        out(f"{counted(resumed, 'queue')} resumed")
    else:
        out(f"queue {escaped(queue)} " + ("is resumed" if resumed else "was not paused"))


def _all(found: list[EffectiveSetting] | None) -> list[EffectiveSetting]:
    return found if found is not None else effective_settings({}, ())


def _brief(found: list[EffectiveSetting] | None, omit: str = "") -> str:
    """The concurrency, and the settings that a row overrides, except `omit`."""
    shown = [each for each in _all(found) if each.name == "concurrency" or (each.source == "row" and each.name != omit)]
    return ", ".join(f"{each.name} {each}" for each in shown)


def _plain(found: list[EffectiveSetting] | None) -> dict[str, dict[str, Any]]:
    return {each.name: {"value": each.value, "from": each.source, "code": list(each.code)} for each in _all(found)}
