"""Commands that change jobs: retry, cancel, discard, undepend, edit; and audit, the log of these operations."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple
from uuid import UUID

import typer

from pgworkd.admin.operations import operate, refused
from pgworkd.cli import bulk
from pgworkd.cli.bulk import CHUNK, Bulk
from pgworkd.cli.common import (
    Dsn,
    Json,
    KindOption,
    QueueOption,
    Yes,
    ask,
    ask_any,
    duration,
    instant_of,
    stdin_text,
    takes,
)
from pgworkd.cli.output import as_json, note, out, parsed, table
from pgworkd.core.job import Status
from pgworkd.core.validation import counted
from pgworkd.errors import UsageError

if TYPE_CHECKING:
    from pgworkd.admin.admin import Admin
    from pgworkd.admin.jobs import JobSelection
    from pgworkd.admin.queries import AuditRow
    from pgworkd.admin.refusals import Refused

_INT4 = 2**31

Ids = Annotated[list[UUID] | None, typer.Argument(metavar="ID", show_default=False, help="Job ids.")]
CallBack = Annotated[
    bool,
    typer.Option("--call-back", help="A batch reopened by this inserts its on_complete job again when it finishes."),
]
_DEAD_FILTERS: dict[str, Any] = {
    "queue": QueueOption,
    "kind": KindOption,
    "key": Annotated[
        str | None, typer.Option("--key", metavar="KEY", help="Only jobs with this serialize, limit or dedupe key.")
    ],
    "batch": Annotated[UUID | None, typer.Option("--batch", metavar="ID", help="Only jobs of this batch.")],
    "group": Annotated[
        int | None,
        typer.Option("--group", metavar="N", min=1, help="Only jobs that died of this error: see pgworkd dead."),
    ],
    "status": Annotated[Status | None, typer.Option("--status", "-s", help="Only jobs with this status.")],
    "all_queues": Annotated[bool, typer.Option("--all", help="Jobs of all queues, if no other filter is given.")],
}
"""By the fields of `JobSelection`."""
_FILTERS = {name: kind for name, kind in _DEAD_FILTERS.items() if name != "group"}
Background = Annotated[
    bool, typer.Option("--background", help="Let daemons do it, and return at once: see pgworkd operations.")
]
Limit = Annotated[int | None, typer.Option("--limit", "-n", min=1, help="Maximum number of jobs, oldest first.")]


class _Outcome(NamedTuple):
    """The outcome for one job, and the text to print; `done` is False if the job was left unchanged."""

    id: UUID
    outcome: str
    text: str
    done: bool = True
    reason: str | None = None


_OfIds = Callable[["Admin", list[UUID]], Awaitable[list[_Outcome]]]


@takes(
    {"dead": Annotated[bool, typer.Option("--dead", help="The same as --status dead, the default.")], **_DEAD_FILTERS}
)
def retry(
    ids: Ids = None,
    *,
    limit: Limit = None,
    background: Background = False,
    call_back: CallBack = False,
    yes: Yes = False,
    json: Json = False,
    dsn: Dsn = None,
    **given: Any,
) -> int:
    """Run dead jobs again with failures reset to 0, or run waiting retries now."""
    if given.pop("dead"):
        if given["status"] not in (None, Status.DEAD):
            raise UsageError(f"--dead and --status {given['status']}: give one of them")
        given["status"] = Status.DEAD
    which = _which(ids, given, Status.DEAD, background=background)
    if which is None:
        return _ids(dsn, ids, lambda admin, some: _retry_ids(admin, some, call_back=call_back), json=json)
    if background:
        return bulk.start(dsn, "retry", which, limit=limit, yes=yes, json=json, call_back=call_back)

    async def operation(admin: Admin, some: Sequence[UUID]) -> tuple[Mapping[str, int], list[Refused]]:
        return await operate(admin.jobs, "retry", some, call_back=call_back)

    outcomes = {"retried": "will run again"}
    return bulk.through(dsn, Bulk("retry", operation, outcomes), which, limit=limit, yes=yes, json=json)


@takes(_FILTERS)
def cancel(
    ids: Ids = None,
    *,
    limit: Limit = None,
    background: Background = False,
    yes: Yes = False,
    json: Json = False,
    dsn: Dsn = None,
    **given: Any,
) -> int:
    """Cancel waiting jobs at once, and ask workers to stop running ones. Dead jobs: use discard."""
    which = _which(ids, given, background=background)
    if which is None:
        return _ids(dsn, ids, _cancel_ids, json=json)
    if background:
        return bulk.start(dsn, "cancel", which, limit=limit, yes=yes, json=json)

    async def operation(admin: Admin, some: Sequence[UUID]) -> tuple[Mapping[str, int], list[Refused]]:
        return await operate(admin.jobs, "cancel", some)

    outcomes = {"cancelled": "cancelled", "requested": "running, and asked to stop"}
    return bulk.through(dsn, Bulk("cancel", operation, outcomes), which, limit=limit, yes=yes, json=json)


@takes(_DEAD_FILTERS)
def discard(
    ids: Ids = None,
    *,
    limit: Limit = None,
    background: Background = False,
    yes: Yes = False,
    json: Json = False,
    dsn: Dsn = None,
    **given: Any,
) -> int:
    """Move dead jobs to the history, which is deleted after its retention period."""
    which = _which(ids, given, Status.DEAD, background=background)
    if which is None:
        return _discard_ids(dsn, ids or [], json=json)
    if background:
        return bulk.start(dsn, "discard", which, limit=limit, yes=yes, json=json)

    async def operation(admin: Admin, some: Sequence[UUID]) -> tuple[Mapping[str, int], list[Refused]]:
        return await operate(admin.jobs, "discard", some)

    outcomes = {"discarded": "discarded"}
    return bulk.through(dsn, Bulk("discard", operation, outcomes), which, limit=limit, yes=yes, json=json)


def undepend(
    ids: Annotated[list[UUID], typer.Argument(metavar="ID", show_default=False, help="Job ids.")],
    *,
    json: Json = False,
    dsn: Dsn = None,
) -> int:
    """Drop the dependencies of blocked jobs, so that they run without waiting for other jobs."""
    return _ids(dsn, ids, _undepend_ids, json=json)


def edit(
    job_id: Annotated[UUID, typer.Argument(metavar="ID", show_default=False, help="The job's id.")],
    *,
    payload: Annotated[
        str | None, typer.Option("--payload", metavar="JSON|-", help="A JSON object; - reads it from standard input.")
    ] = None,
    run_at: Annotated[
        str | None, typer.Option("--run-at", metavar="INSTANT", help="When it is due: 2027-01-31T07:00:00+01:00.")
    ] = None,
    delay_s: Annotated[float | None, duration("--delay-s", text="Time from now until it is due.")] = None,
    priority: Annotated[
        int | None, typer.Option("--priority", min=-_INT4, max=_INT4 - 1, help="Higher priorities run first.")
    ] = None,
    json: Json = False,
    dsn: Dsn = None,
) -> None:
    """Change the payload, due time or priority of a waiting job."""
    text = stdin_text() if payload == "-" else payload
    at = None if run_at is None else instant_of(run_at)
    changed = ask(dsn, lambda admin: admin.jobs.edit(job_id, text, run_at=at, delay_s=delay_s, priority=priority))
    if json:
        as_json({"id": job_id, "changed": changed})
    else:
        out(f"{job_id} " + (f"edited: {', '.join(changed)}" if changed else "unchanged"))


def audit(
    *,
    job_id: Annotated[UUID | None, typer.Option("--job", metavar="ID", help="Only operations on this job.")] = None,
    queue: QueueOption = None,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=1000, help="Maximum number of entries.")] = 20,
    json: Json = False,
    dsn: Dsn = None,
) -> None:
    """List the operations of operators, newest first: who, when, what, before and after."""
    rows = ask_any(dsn, lambda admin: admin.audit(job_id, queue, limit))
    if json:
        as_json([row._asdict() | {"before": parsed(row.before), "after": parsed(row.after)} for row in rows])
        return
    columns = ("at", "who", "what", "queue", "job_id", "change")
    table(columns, [(row.at, row.who, row.what, row.queue, row.job_id, _change(row)) for row in rows])


def _change(row: AuditRow) -> str:
    """A change in one line, as in 'status: dead -> pending, failures: 3 -> 0'."""
    before, after = parsed(row.before), parsed(row.after)
    if not isinstance(before, dict) or not isinstance(after, dict):
        return f"{row.before} -> {row.after}"  # a number that Python cannot read
    return ", ".join(f"{name}: {_plain(before.get(name))} -> {_plain(after[name])}" for name in after)


def _plain(value: Any) -> str:
    import json

    return value if isinstance(value, str) else "-" if value is None else json.dumps(value)


def _which(
    ids: Sequence[UUID] | None, given: dict[str, Any], usual: Status | None = None, *, background: bool
) -> JobSelection | None:
    """The filter of a command; None: ids are given. `usual`: its status if none is. UsageError for both or neither."""
    from pgworkd.admin.jobs import JobSelection

    status = given["status"] or (None if ids else usual)
    wanted = {"status": None if status is None else status.value, "all_queues": bool(given["all_queues"])}
    which = JobSelection(**given | wanted)
    if ids:
        if background:
            raise UsageError("--background is for filters such as --queue: leave it out with ids")
        if which != JobSelection():
            raise UsageError("give either ids or filters such as --queue, not both")
        return None
    if not which.narrow and not which.all_queues:
        raise UsageError("no jobs selected: give ids, a filter such as --queue, or --all for all queues")
    return which


def _ids(dsn: str | None, ids: Sequence[UUID] | None, operation: _OfIds, *, json: bool) -> int:
    """Operates on these jobs, chunk by chunk, and prints the outcome for each; the exit code."""

    async def question(admin: Admin) -> list[_Outcome]:
        found: list[_Outcome] = []
        for some in _chunks(ids or []):
            outcomes = await operation(admin, some)
            found += outcomes
            for one in () if json else outcomes:
                (out if one.done else note)(f"{one.id} {one.text}")
        return found

    outcomes = ask(dsn, question)
    if json:
        as_json([_plain_outcome(one) for one in outcomes])
    return 0 if all(one.done for one in outcomes) else 1


async def _retry_ids(admin: Admin, ids: list[UUID], *, call_back: bool) -> list[_Outcome]:
    changed = set((await admin.jobs.retry(ids, call_back=call_back)).changed)
    left = {one.id: one for one in await refused(admin.jobs, "retry", ids, changed)}
    return [
        _Outcome(job_id, "retried", "will run again") if job_id in changed else _why(left[job_id]) for job_id in ids
    ]


async def _cancel_ids(admin: Admin, ids: list[UUID]) -> list[_Outcome]:
    outcomes = await admin.jobs.cancel(ids)
    left = {one.id: one for one in await refused(admin.jobs, "cancel", ids, outcomes)}
    texts = {"cancelled": "cancelled", "requested": "is running: its worker is asked to stop it"}
    return [
        _Outcome(job_id, outcomes[job_id], texts[outcomes[job_id]]) if job_id in outcomes else _why(left[job_id])
        for job_id in ids
    ]


def _why(one: Refused) -> _Outcome:
    outcome = "key_taken" if one.holder is not None else one.status
    holder = f" (job {one.holder})" if one.holder is not None else ""
    return _Outcome(one.id, outcome, f"is {one.status}: {one.reason}{holder}", done=False, reason=one.reason)


async def _undepend_ids(admin: Admin, ids: list[UUID]) -> list[_Outcome]:
    changed, others = await admin.jobs.undepend(ids), await admin.jobs.statuses(ids)
    return [
        _Outcome(job_id, "released", "no longer waits for other jobs")
        if job_id in changed
        else _left(job_id, others.get(job_id), ": it does not wait for other jobs" if job_id in others else "")
        for job_id in ids
    ]


def _discard_ids(dsn: str | None, ids: Sequence[UUID], *, json: bool) -> int:
    """Discards these jobs, and prints one number: the database returns only a count."""

    async def question(admin: Admin) -> tuple[int, list[_Outcome]]:
        count, left = 0, []
        for some in _chunks(ids):
            done, unchanged = await operate(admin.jobs, "discard", some)
            count += done["discarded"]
            left += [_why(one) for one in unchanged]
        return count, left

    count, left = ask(dsn, question)
    if json:
        as_json({"operation": "discard", "discarded": count, "left": [_plain_outcome(one) for one in left]})
    else:
        for one in left:
            note(f"{one.id} {one.text}")
        out(f"{counted(count, 'job')} discarded")
    return 0 if count == len(set(ids)) else 1


def _left(job_id: UUID, status: str | None, why: str) -> _Outcome:
    if status is None:
        return _Outcome(job_id, "unknown", f"is unknown, or its history has been deleted{why}", done=False)
    return _Outcome(job_id, status, f"is {status}{why}", done=False)


def _plain_outcome(one: _Outcome) -> dict[str, Any]:
    facts = {"id": one.id, "outcome": one.outcome, "done": one.done}
    return facts | ({} if one.reason is None else {"reason": one.reason})


def _chunks(ids: Sequence[UUID]) -> list[list[UUID]]:
    once = list(dict.fromkeys(ids))
    return [once[at : at + CHUNK] for at in range(0, len(once), CHUNK)]
