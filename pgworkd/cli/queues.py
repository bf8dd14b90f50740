"""Commands on queues: what is in them and what holds there, and changing that for every daemon at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pgworkd.cli.common import Dsn, Json, QueueArgument, ask, instant_of, known, look, unserved
from pgworkd.cli.output import as_json, is_terminal, out, table
from pgworkd.errors import UsageError
from pgworkd.words.redaction import escaped

if TYPE_CHECKING:
    from pgworkd.admin.admin import Admin
    from pgworkd.settings.queue import InForce

_COLUMNS = (
    *("queue", "due", "scheduled", "running", "failed", "blocked", "dead", "oldest_due_s", "workers", "slots"),
    *("paused", "paused_until"),
)
_COLUMNS_TERMINAL = (  # where it is narrow, the rightmost are left out first
    *("queue", "paused", "due", "running", "failed", "dead", "oldest_due_s", "workers", "slots", "blocked"),
    *("scheduled", "paused_until"),
)

ForS = Annotated[float | None, typer.Option("--for", "--for-s", metavar="SECONDS", help="Without it until resumed.")]
Until = Annotated[str | None, typer.Option("--until", metavar="INSTANT", help="Until then: 2027-01-31T07:00:00+01:00.")]
Create = Annotated[bool, typer.Option("--create", help="Also for a queue that nobody knows yet.")]
Text = str | None  # read by ourselves: the errors say what to write instead


def _number(flag: str, help_: str) -> Any:
    return typer.Option(flag, metavar="N" if not flag.endswith("-s") else "SECONDS", help=help_)


group = typer.Typer(help="List the queues and what holds in each; change it for every daemon at once.")


@group.callback(invoke_without_command=True)
def queues(context: typer.Context, *, json: Json = False, dsn: Dsn = None) -> None:
    """List the queues: what is due, runs, failed, is dead, who serves them, and which settings hold.

    A setting says where it comes from: row (pgworkd queues set, or the table), code, settings (of daemons), default.
    """
    if context.invoked_subcommand is not None:
        if json or dsn is not None:
            raise UsageError(f"put --json and --dsn behind: pgworkd queues {context.invoked_subcommand} ...")
        return

    async def question(admin: Admin) -> tuple[Sequence[Any], Mapping[str, list[InForce]]]:
        await unserved(admin)
        return await admin.queues(), await admin.settings()

    rows, settings = look(dsn, question)
    if json:
        as_json([row._asdict() | {"settings": _plain(settings.get(row.queue))} for row in rows])
        return
    columns = _COLUMNS_TERMINAL if is_terminal() else _COLUMNS
    shown = [[*(getattr(row, name) for name in columns), _brief(settings.get(row.queue), but="paused")] for row in rows]
    table((*columns, "settings"), shown)


@group.command()
def show(queue: QueueArgument, *, json: Json = False, dsn: Dsn = None) -> None:
    """Show every setting of a queue, and where it comes from."""

    async def question(admin: Admin) -> list[InForce] | None:
        await known(admin, queue)
        await unserved(admin)
        return (await admin.settings()).get(queue)

    found = _all(look(dsn, question))
    if json:
        as_json(_plain(found))
    else:
        table(("setting", "holds"), [(each.name, str(each)) for each in found], whole=True)


@group.command("set")
def set_(
    queue: QueueArgument,
    *,
    concurrency: Annotated[Text, _number("--concurrency", "So many at once in each daemon.")] = None,
    max_running: Annotated[Text, _number("--max-running", "So many at once in the whole fleet.")] = None,
    limit_per_key: Annotated[Text, _number("--limit-per-key", "So many of one limit_key at once.")] = None,
    rate: Annotated[Text, typer.Option("--rate", metavar="N/PERIOD", help="Starts: 10/s, 100/min, 5/30s.")] = None,
    rate_burst: Annotated[Text, _number("--rate-burst", "So many may start at one instant.")] = None,
    rate_per_key: Annotated[
        Text, typer.Option("--rate-per-key", metavar="N/PERIOD", help="Starts of each limit_key.")
    ] = None,
    rate_per_key_burst: Annotated[Text, _number("--rate-per-key-burst", "The same for each limit_key.")] = None,
    fair: Annotated[bool | None, typer.Option("--fair/--no-fair", help="limit_keys take turns.")] = None,
    keep_s: Annotated[
        Text, _number("--keep-s", "Keep jobs that finish from now on this long, up to keep_days; 0: no history.")
    ] = None,
    backoff_s: Annotated[Text, _number("--backoff-s", "Before the first retry; wins over the handlers'.")] = None,
    backoff_factor: Annotated[
        Text, _number("--backoff-factor", "Each further retry waits so many times longer.")
    ] = None,
    backoff_cap_s: Annotated[Text, _number("--backoff-cap-s", "But no longer than that.")] = None,
    max_losses: Annotated[
        Text, _number("--max-losses", "A job is dead when it was lost with its worker this many times (3).")
    ] = None,
    unset: Annotated[
        list[str] | None, typer.Option("--unset", metavar="NAME", help="Back to code, or none; repeat it; or all.")
    ] = None,
    create: Create = False,
    json: Json = False,
    dsn: Dsn = None,
) -> None:
    """Change settings of a queue; every daemon follows at once, and after a restart, too."""
    from pgworkd.settings import queue as words

    given = {name: value for name, value in locals().items() if name in words.NAMES and value is not None}
    changes: dict[str, object] = {}
    for name, value in given.items():
        flag = f"--{name.replace('_', '-')}"
        if name == "fair":
            changes[name] = value
        elif f"{name}_period_s" in words.BOUNDS:
            changes |= words.rate(name, str(value), flag)
        else:
            changes[name] = words.number(name, value, flag)
    emptied = words.unset(unset or [], "--unset")
    if twice := changes.keys() & emptied.keys():
        raise UsageError(f"{min(twice)} is both set and unset: give one of them")
    if not changes and not emptied:
        raise UsageError("nothing to change: give a setting, such as --concurrency 4, or --unset NAME")

    async def question(admin: Admin) -> list[InForce] | None:
        await known(admin, queue, create=create)
        await admin.set_queue(queue, changes | emptied)
        return (await admin.settings()).get(queue)

    found = _all(ask(dsn, question))
    if json:
        as_json(_plain(found))
    else:
        out(f"queue {escaped(queue)}: {_brief(found)}")


@group.command()
def pause(
    queue: QueueArgument, *, for_s: ForS = None, until: Until = None, create: Create = False, dsn: Dsn = None
) -> None:
    """Start no more jobs of a queue; what runs goes on."""
    if for_s is not None and until is not None:
        raise UsageError("--for and --until: give one of them")
    at = None if until is None else instant_of(until, "--until")

    async def question(admin: Admin) -> None:
        await known(admin, queue, create=create)
        await admin.pause(queue, for_s, at)

    ask(dsn, question)
    end = "until resumed" if for_s is None else f"for {for_s:g} s"
    out(f"queue {escaped(queue)} is paused {end if at is None else f'until {at.isoformat()}'}")


@group.command()
def resume(queue: QueueArgument, *, dsn: Dsn = None) -> None:
    """End a queue's pause."""

    async def question(admin: Admin) -> bool:
        if await admin.resume(queue):
            return True
        await known(admin, queue)
        return False

    was_paused = ask(dsn, question)
    out(f"queue {escaped(queue)} " + ("is resumed" if was_paused else "was not paused"))


def _all(found: list[InForce] | None) -> list[InForce]:
    from pgworkd.settings.queue import in_force

    return found if found is not None else in_force({}, ())


def _brief(found: list[InForce] | None, but: str = "") -> str:
    """The concurrency, and what a row says, except about `but`."""
    told = [each for each in _all(found) if each.name == "concurrency" or (each.source == "row" and each.name != but)]
    return ", ".join(f"{each.name} {each}" for each in told)


def _plain(found: list[InForce] | None) -> dict[str, dict[str, Any]]:
    return {each.name: {"value": each.value, "from": each.source, "code": list(each.code)} for each in _all(found)}
