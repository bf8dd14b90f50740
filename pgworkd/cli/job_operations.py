"""Commands that act on jobs: run them again, end them, change them; and what was done to them before."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Container, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple
from uuid import UUID

import typer

from pgworkd.cli import bulk
from pgworkd.cli.bulk import CHUNK, Bulk
from pgworkd.cli.common import Dsn, Json, KindOption, QueueOption, Status, Yes, ask, instant_of, look, stdin_text
from pgworkd.cli.output import as_json, note, out, parsed, table
from pgworkd.errors import UsageError
from pgworkd.words.validation import counted

if TYPE_CHECKING:
    from pgworkd.admin.admin import Admin
    from pgworkd.admin.jobs import Which
    from pgworkd.admin.queries import AuditRow
    from pgworkd.admin.refusals import Refused

_INT4 = 2**31

Ids = Annotated[list[UUID] | None, typer.Argument(metavar="ID", show_default=False, help="Job ids.")]
Key = Annotated[
    str | None, typer.Option("--key", metavar="KEY", help="Only jobs with this serialize, limit or dedupe key.")
]
Batch = Annotated[UUID | None, typer.Option("--batch", metavar="ID", help="Only jobs of this batch.")]
StatusOption = Annotated[Status | None, typer.Option("--status", "-s", help="Only in this state.")]
Every = Annotated[bool, typer.Option("--all", help="Of all queues, where nothing else says which.")]
CallBack = Annotated[
    bool, typer.Option("--call-back", help="Have a finished batch that opens again make its on_complete job once more.")
]
Limit = Annotated[int | None, typer.Option("--limit", "-n", min=1, help="At most so many, the oldest first.")]


class _Outcome(NamedTuple):
    """What became of one job; `done` is False for one that was left alone."""

    id: UUID
    outcome: str
    told: str
    done: bool = True
    reason: str | None = None


_OfIds = Callable[["Admin", list[UUID]], Awaitable[list[_Outcome]]]


def retry(
    ids: Ids = None,
    *,
    dead: Annotated[bool, typer.Option("--dead", help="The same as --status dead, which is the default.")] = False,
    queue: QueueOption = None,
    kind: KindOption = None,
    key: Key = None,
    batch: Batch = None,
    status: StatusOption = None,
    every: Every = False,
    limit: Limit = None,
    call_back: CallBack = False,
    yes: Yes = False,
    json: Json = False,
    dsn: Dsn = None,
) -> int:
    """Run dead jobs again with a fresh budget, or waiting retries now."""
    if dead and status not in (None, Status.DEAD):
        raise UsageError(f"--dead and --status {status}: give one of them")
    wanted = Status.DEAD if dead else status
    which = _which(ids, queue, kind, key, batch, wanted or (None if ids else Status.DEAD), every)
    if which is None:
        return _ids(dsn, ids, lambda admin, some: _retry_ids(admin, some, call_back=call_back), json=json)

    async def act(admin: Admin, some: Sequence[UUID]) -> tuple[Mapping[str, int], list[Refused]]:
        answer = await admin.retry(some, call_back=call_back)
        return {"retried": len(answer.changed)}, await _refused(admin, "retry", some, answer.changed)

    told = {"retried": "will run again"}
    return bulk.through(dsn, Bulk("retry", act, told), which, limit=limit, yes=yes, json=json)


def cancel(
    ids: Ids = None,
    *,
    queue: QueueOption = None,
    kind: KindOption = None,
    key: Key = None,
    batch: Batch = None,
    status: StatusOption = None,
    every: Every = False,
    limit: Limit = None,
    yes: Yes = False,
    json: Json = False,
    dsn: Dsn = None,
) -> int:
    """End waiting jobs now, and have running ones ended by their workers. Dead ones have ended: discard them."""
    which = _which(ids, queue, kind, key, batch, status, every)
    if which is None:
        return _ids(dsn, ids, _cancel_ids, json=json)

    async def act(admin: Admin, some: Sequence[UUID]) -> tuple[Mapping[str, int], list[Refused]]:
        done = await admin.cancel(some)
        outcomes = list(done.values())
        counts = {outcome: outcomes.count(outcome) for outcome in ("cancelled", "requested")}
        return counts, await _refused(admin, "cancel", some, done)

    told = {"cancelled": "cancelled", "requested": "running, and told to end"}
    return bulk.through(dsn, Bulk("cancel", act, told), which, limit=limit, yes=yes, json=json)


def discard(
    ids: Ids = None,
    *,
    queue: QueueOption = None,
    kind: KindOption = None,
    key: Key = None,
    batch: Batch = None,
    status: StatusOption = None,
    every: Every = False,
    limit: Limit = None,
    yes: Yes = False,
    json: Json = False,
    dsn: Dsn = None,
) -> int:
    """Move dead jobs to the history, where they are forgotten in time."""
    which = _which(ids, queue, kind, key, batch, status or (None if ids else Status.DEAD), every)
    if which is None:
        return _discard_ids(dsn, ids or [], json=json)

    async def act(admin: Admin, some: Sequence[UUID]) -> tuple[Mapping[str, int], list[Refused]]:
        return await _discard(admin, some)

    told = {"discarded": "discarded"}
    return bulk.through(dsn, Bulk("discard", act, told), which, limit=limit, yes=yes, json=json)


def undepend(
    ids: Annotated[list[UUID], typer.Argument(metavar="ID", show_default=False, help="Job ids.")],
    *,
    json: Json = False,
    dsn: Dsn = None,
) -> int:
    """Let jobs that wait for others run all the same, now."""
    return _ids(dsn, ids, _undepend_ids, json=json)


def edit(
    job_id: Annotated[UUID, typer.Argument(metavar="ID", show_default=False, help="The job's id.")],
    *,
    payload: Annotated[
        str | None, typer.Option("--payload", metavar="JSON|-", help="A JSON object; - reads it from standard input.")
    ] = None,
    run_at: Annotated[
        str | None, typer.Option("--run-at", metavar="INSTANT", help="Due then: 2027-01-31T07:00:00+01:00.")
    ] = None,
    delay_s: Annotated[float | None, typer.Option("--delay-s", help="Due in so many seconds from now.")] = None,
    priority: Annotated[int | None, typer.Option("--priority", min=-_INT4, max=_INT4 - 1, help="Higher first.")] = None,
    json: Json = False,
    dsn: Dsn = None,
) -> None:
    """Change the payload, due time or priority of a waiting job."""
    text = stdin_text() if payload == "-" else payload
    at = None if run_at is None else instant_of(run_at)
    changed = ask(dsn, lambda admin: admin.edit(job_id, text, run_at=at, delay_s=delay_s, priority=priority))
    if json:
        as_json({"id": job_id, "changed": changed})
    else:
        out(f"{job_id} " + (f"edited: {', '.join(changed)}" if changed else "is so already"))


def audit(
    *,
    job_id: Annotated[UUID | None, typer.Option("--job", metavar="ID", help="Only what was done to this job.")] = None,
    queue: QueueOption = None,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=1000, help="At most so many.")] = 20,
    json: Json = False,
    dsn: Dsn = None,
) -> None:
    """List what operators did, the newest first: who, when, what, before and after."""
    rows = look(dsn, lambda admin: admin.audit(job_id, queue, limit))
    if json:
        as_json([row._asdict() | {"before": parsed(row.before), "after": parsed(row.after)} for row in rows])
        return
    columns = ("at", "who", "what", "queue", "job_id", "change")
    table(columns, [(row.at, row.who, row.what, row.queue, row.job_id, _change(row)) for row in rows])


def _change(row: AuditRow) -> str:
    """'status: dead -> pending, failures: 3 -> 0'."""
    before, after = parsed(row.before), parsed(row.after)
    if not isinstance(before, dict) or not isinstance(after, dict):
        return f"{row.before} -> {row.after}"  # a number that Python cannot read
    return ", ".join(f"{name}: {_plain(before.get(name))} -> {_plain(after[name])}" for name in after)


def _plain(value: Any) -> str:
    import json

    return value if isinstance(value, str) else "-" if value is None else json.dumps(value)


def _which(
    ids: Sequence[UUID] | None,
    queue: str | None,
    kind: str | None,
    key: str | None,
    batch: UUID | None,
    status: Status | None,
    every: bool,  # noqa: FBT001
) -> Which | None:
    """Which jobs are meant where no ids are given; None where they are. UsageError for both or neither."""
    from pgworkd.admin.jobs import Which

    which = Which(queue, kind, key, batch, None if status is None else status.value, every)
    if ids:
        if which != Which():
            raise UsageError("give ids, or options that say which jobs, not both")
        return None
    if not which.narrow and not every:
        raise UsageError("say which: ids, --queue, --kind, --key or --batch, or --all for the jobs of all queues")
    return which


def _ids(dsn: str | None, ids: Sequence[UUID] | None, act: _OfIds, *, json: bool) -> int:
    """Acts on these jobs, chunk by chunk, and tells of each; the exit code."""

    async def question(admin: Admin) -> list[_Outcome]:
        told: list[_Outcome] = []
        for some in _chunks(ids or []):
            outcomes = await act(admin, some)
            told += outcomes
            for one in () if json else outcomes:
                (out if one.done else note)(f"{one.id} {one.told}")
        return told

    outcomes = ask(dsn, question)
    if json:
        as_json([_plain_outcome(one) for one in outcomes])
    return 0 if all(one.done for one in outcomes) else 1


async def _retry_ids(admin: Admin, ids: list[UUID], *, call_back: bool) -> list[_Outcome]:
    changed = set((await admin.retry(ids, call_back=call_back)).changed)
    left = {one.id: one for one in await _refused(admin, "retry", ids, changed)}
    return [
        _Outcome(job_id, "retried", "will run again") if job_id in changed else _why(left[job_id]) for job_id in ids
    ]


async def _cancel_ids(admin: Admin, ids: list[UUID]) -> list[_Outcome]:
    outcomes = await admin.cancel(ids)
    left = {one.id: one for one in await _refused(admin, "cancel", ids, outcomes)}
    told = {"cancelled": "cancelled", "requested": "runs: its worker is told to end it"}
    return [
        _Outcome(job_id, outcomes[job_id], told[outcomes[job_id]]) if job_id in outcomes else _why(left[job_id])
        for job_id in ids
    ]


async def _discard(admin: Admin, ids: Sequence[UUID]) -> tuple[dict[str, int], list[Refused]]:
    """The database says only how many: those that were not dead before were left alone."""
    before = await admin.refusals("discard", ids)
    count = await admin.discard(ids)
    return {"discarded": count}, [one for one in before.values() if one.status != Status.DEAD]


async def _refused(admin: Admin, act: str, ids: Sequence[UUID], done: Container[UUID]) -> list[Refused]:
    """Those that are not done, and why: asked only if there are any."""
    rest = [job_id for job_id in ids if job_id not in done]
    return list((await admin.refusals(act, rest)).values()) if rest else []


def _why(one: Refused) -> _Outcome:
    outcome = "held_back" if one.holder is not None else one.status
    holder = f" (job {one.holder})" if one.holder is not None else ""
    return _Outcome(one.id, outcome, f"is {one.status}: {one.reason}{holder}", done=False, reason=one.reason)


async def _undepend_ids(admin: Admin, ids: list[UUID]) -> list[_Outcome]:
    changed, others = await admin.undepend(ids), await admin.statuses(ids)
    return [
        _Outcome(job_id, "released", "waits for no other job any more")
        if job_id in changed
        else _left(job_id, others.get(job_id), ": it waits for no other job" if job_id in others else "")
        for job_id in ids
    ]


def _discard_ids(dsn: str | None, ids: Sequence[UUID], *, json: bool) -> int:
    """As _ids, but told as one number: the database says only how many."""

    async def question(admin: Admin) -> tuple[int, list[_Outcome]]:
        count, left = 0, []
        for some in _chunks(ids):
            done, refused = await _discard(admin, some)
            count += done["discarded"]
            left += [_why(one) for one in refused]
        return count, left

    count, left = ask(dsn, question)
    if json:
        as_json({"act": "discard", "discarded": count, "left": [_plain_outcome(one) for one in left]})
    else:
        for one in left:
            note(f"{one.id} {one.told}")
        out(f"{counted(count, 'job')} discarded")
    return 0 if count == len(set(ids)) else 1


def _left(job_id: UUID, status: str | None, why: str) -> _Outcome:
    if status is None:
        return _Outcome(job_id, "unknown", f"is unknown (or its history is forgotten){why}", done=False)
    return _Outcome(job_id, status, f"is {status}{why}", done=False)


def _plain_outcome(one: _Outcome) -> dict[str, Any]:
    facts = {"id": one.id, "outcome": one.outcome, "done": one.done}
    return facts | ({} if one.reason is None else {"reason": one.reason})


def _chunks(ids: Sequence[UUID]) -> list[list[UUID]]:
    once = list(dict.fromkeys(ids))
    return [once[at : at + CHUNK] for at in range(0, len(once), CHUNK)]
