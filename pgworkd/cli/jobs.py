"""Commands on jobs: enqueue one, list them, show one."""

from __future__ import annotations

import sys
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any
from uuid import UUID

import typer

from pgworkd.cli.common import (
    Dsn,
    Json,
    KindOption,
    QueueArgument,
    QueueOption,
    ask,
    ask_any,
    check_queue,
    duration,
    instant_of,
    stdin_text,
)
from pgworkd.cli.output import as_json, brief_error, cell, note, out, parsed, print_rows
from pgworkd.core.job import Status
from pgworkd.errors import PgworkdError, UsageError
from pgworkd.process.redaction import escaped

if TYPE_CHECKING:
    from pgworkd.admin.admin import Admin
    from pgworkd.admin.explained import Explanation
    from pgworkd.admin.listing import Listed
    from pgworkd.admin.queries import EnqueuedJob, JobDetails, JobRow, Jobs
    from pgworkd.client.new_job import JobOptions

_INT4 = 2**31
_WAITING = ("pending", "failed", "blocked")

DedupeFor = Annotated[
    float | None, duration("--dedupe-for-s", text="Time from now for which the dedupe key stays taken.")
]
SerializeKey = Annotated[
    str | None, typer.Option("--serialize-key", help="Jobs of the queue with the same key run one at a time, in order.")
]
LimitKey = Annotated[str | None, typer.Option("--limit-key", help="The key that the queue's limits per key count by.")]


class OnRetry(StrEnum):
    """What a job does with its serialize key while it waits for its retry."""

    HOLD = "hold"
    YIELD = "yield"


class DedupeBy(StrEnum):
    """What a dedupe key is made of."""

    PAYLOAD = "payload"


class OnDuplicate(StrEnum):
    """What to do if the dedupe key is taken."""

    RAISE = "raise"
    SKIP = "skip"
    REPLACE = "replace"
    RESCHEDULE = "reschedule"


_COLUMNS = ("id", "queue", "kind", "status", "priority", "attempts", "failures", "run_at", "finished_at", "error")
_NARROW = "id queue kind status attempts run_at error"


def enqueue(
    queue: QueueArgument,
    payload: Annotated[
        str, typer.Argument(metavar="[PAYLOAD|-]", help="A JSON object; - reads it from standard input.")
    ] = "{}",
    *,
    kind: Annotated[
        str | None, typer.Option("--kind", help="The job's kind; default: the queue's own handler.")
    ] = None,
    priority: Annotated[
        int | None,
        typer.Option("--priority", min=-_INT4, max=_INT4 - 1, help="Higher priorities run first; default: 0."),
    ] = None,
    delay_s: Annotated[float | None, duration("--delay-s", text="Time until it is due.")] = None,
    run_at: Annotated[
        str | None, typer.Option("--run-at", metavar="INSTANT", help="When it is due: 2027-01-31T07:00:00+01:00.")
    ] = None,
    dedupe_key: Annotated[
        str | None, typer.Option("--dedupe-key", help="The queue accepts only one live job with the same key.")
    ] = None,
    dedupe_for_s: DedupeFor = None,
    dedupe_by: Annotated[
        DedupeBy | None,
        typer.Option("--dedupe-by", help="Make the dedupe key of kind and payload, in place of --dedupe-key."),
    ] = None,
    on_duplicate: Annotated[
        OnDuplicate | None, typer.Option("--on-duplicate", help="What to do if the dedupe key is taken; default: skip.")
    ] = None,
    serialize_key: SerializeKey = None,
    on_retry: Annotated[
        OnRetry, typer.Option("--on-retry", help="Hold or yield the serialize key while waiting for a retry.")
    ] = OnRetry.HOLD,
    limit_key: LimitKey = None,
    max_attempts: Annotated[
        int | None,
        typer.Option(
            "--max-attempts", min=1, max=1000, help="Failures after which the job is dead; default: the handler's."
        ),
    ] = None,
    dsn: Dsn = None,
) -> None:
    """Insert a job and print its id, or the id of the job that already has its dedupe key."""
    if on_duplicate is not None and dedupe_key is None and dedupe_by is None:
        raise UsageError("--on-duplicate needs a --dedupe-key, or --dedupe-by: without one there are no duplicates")
    text = stdin_text() if payload == "-" else payload
    options: JobOptions = {
        "kind": kind,
        "delay": delay_s,
        "run_at": None if run_at is None else instant_of(run_at),
        "dedupe_key": dedupe_key,
        "dedupe_for": dedupe_for_s,
        "dedupe_by": None if dedupe_by is None else "payload",
        "serialize_key": serialize_key,
        "limit_key": limit_key,
        "on_retry": on_retry.value,
        "max_attempts": max_attempts,
    }
    if priority is not None:
        options["priority"] = priority
    _enqueue(dsn, queue, text, on_duplicate or OnDuplicate.SKIP, options)


def _enqueue(dsn: str | None, queue: str, text: str, on_duplicate: OnDuplicate, options: JobOptions) -> None:
    async def question(admin: Admin) -> tuple[EnqueuedJob, bool]:
        made = await admin.jobs.enqueue(queue, text, on_duplicate=on_duplicate.value, **options)
        return made, sys.stderr.isatty() and not await admin.queues.is_served(queue)

    made, unserved = ask(dsn, question)
    if not made.created:
        done = f"{on_duplicate}d" if made.changed else "unchanged"
        key = "this kind and payload" if options["dedupe_by"] else f"the dedupe key {options['dedupe_key']!r}"
        note(f"nothing inserted: this job of queue {queue!r} has {key}; it is {done}")
    elif unserved:
        note(f"no worker serves queue {queue!r} at present")
    out(str(made.id))


def jobs(
    *,
    queue: QueueOption = None,
    kind: KindOption = None,
    status: Annotated[Status | None, typer.Option("--status", "-s", help="Only jobs with this status.")] = None,
    worker: Annotated[
        int | None,
        typer.Option("--worker", min=1, max=1_000_000_000, help="Only jobs that this worker runs or has ended."),
    ] = None,
    schedule: Annotated[str | None, typer.Option("--schedule", help="Only jobs of this schedule.")] = None,
    payload: Annotated[
        list[str] | None,
        typer.Option(
            "--payload", metavar="PATH:VALUE", help='Only those with order.id:7, or to:"Ann Lee" (repeatable).'
        ),
    ] = None,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=1000, help="Maximum number of jobs.")] = 20,
    json: Json = False,
    dsn: Dsn = None,
) -> None:
    """List the newest jobs, live and finished."""
    from pgworkd.admin.listing import Listed
    from pgworkd.admin.payload_filter import payload_terms
    from pgworkd.admin.queries import HISTORY_ROWS_MAX

    state = None if status is None else status.value
    terms = payload_terms(" ".join(payload or ()))
    more = Listed(queue, kind, state, worker=worker, schedule=schedule, payload=terms)

    async def question(admin: Admin) -> Jobs:
        if (worker, schedule, terms) != (None, None, None):
            return await _listed(admin, more, limit, HISTORY_ROWS_MAX // more.walk)
        found = await admin.jobs.find(queue, kind, state, limit)
        if queue is not None and not found.rows and not (await admin.jobs.find(queue, limit=1)).rows:
            await check_queue(admin, queue)
        return found

    found = ask_any(dsn, question)
    rows = found.rows if json else [row._replace(error=brief_error(row.error)) for row in found.rows]
    print_rows(rows, _COLUMNS, _NARROW, json=json)
    if not found.complete:
        note(f"only the newest {HISTORY_ROWS_MAX:,} finished jobs were searched")


async def _listed(admin: Admin, which: Listed, limit: int, pages_max: int) -> Jobs:
    """The newest jobs that match, from as many pages as hold that many rows that were looked at."""
    from pgworkd.admin.queries import Jobs

    rows: list[JobRow] = []
    before = None
    for _ in range(pages_max):
        page = await admin.jobs.page(which, before, limit - len(rows))
        rows, before = [*rows, *page.rows], page.next
        if before is None or len(rows) == limit:
            return Jobs(rows, complete=True)
    return Jobs(rows, complete=False)


def job(
    job_id: Annotated[UUID, typer.Argument(metavar="ID", show_default=False, help="The job's id.")],
    *,
    json: Json = False,
    dsn: Dsn = None,
) -> None:
    """Show all of one job, with its payload, result and errors, and why it does not run."""

    async def question(admin: Admin) -> tuple[JobDetails, list[Explanation] | None]:
        found = await admin.jobs.get(job_id)
        if found is None:
            raise _unknown_job(job_id)
        return found, await admin.jobs.explain(job_id) if found.status in _WAITING else None

    found, reasons = ask_any(dsn, question)
    facts = found._asdict() | {name: parsed(getattr(found, name)) for name in ("payload", "result", "meta", "errors")}
    if json:
        as_json(facts | {"reasons": None if reasons is None else [each._asdict() for each in reasons]})
    else:
        _print_job(found, facts, [] if reasons is None else ["", "why it waits:", *_told(reasons)])


def explain(
    job_id: Annotated[UUID | None, typer.Argument(metavar="[ID]", show_default=False, help="The job's id.")] = None,
    *,
    queue: QueueOption = None,
    json: Json = False,
    dsn: Dsn = None,
) -> None:
    """Say why a job does not run: each reason, and what ends it. Or why the first job of a queue does not."""
    if (job_id is None) == (queue is None):
        raise UsageError("give the id of a job, or --queue")

    async def question(admin: Admin) -> tuple[UUID, list[Explanation]]:
        found = job_id if queue is None else await admin.jobs.first_waiting(queue)
        if found is None:
            raise PgworkdError(f"no job of queue {queue!r} waits")
        reasons = await admin.jobs.explain(found)
        if not reasons and await admin.jobs.get(found) is None:
            raise _unknown_job(found)
        return found, reasons

    found, reasons = ask_any(dsn, question)
    if json:
        as_json({"job": found, "reasons": [each._asdict() for each in reasons]})
    else:
        out("\n".join([f"job {found}", *_told(reasons)]))


def _told(reasons: list[Explanation]) -> list[str]:
    """The lines that tell these reasons."""
    if not reasons:
        return ["  nothing holds it back: the next claim takes it"]
    lines = []
    for each in reasons:
        at = "" if each.ends_at is None else f", at {cell(each.ends_at)}"
        lines += [f"  {each.reason}: {escaped(each.says)}", f"      ends with: {escaped(each.ends)}{at}"]
    return lines


def replay(
    job_id: Annotated[UUID, typer.Argument(metavar="ID", show_default=False, help="The id of a job that has ended.")],
    *,
    keep_expires_at: Annotated[
        bool,
        typer.Option("--keep-expires-at", help="Let it expire when that job was to: at once, if that is over."),
    ] = False,
    dsn: Dsn = None,
) -> None:
    """Insert a new job like one that has ended, and print its id; it never expires, unless asked to."""

    async def question(admin: Admin) -> EnqueuedJob:
        found = await admin.jobs.get(job_id)
        if found is None:
            raise _unknown_job(job_id)
        return await admin.jobs.replay(found, keep_expires_at=keep_expires_at)

    out(str(ask(dsn, question).id))


def _unknown_job(job_id: UUID) -> PgworkdError:
    """The error for an id that no job has."""
    return PgworkdError(f"no job has the id {job_id}: it is unknown, or its history has been deleted")


def _print_job(found: JobDetails, facts: dict[str, Any], more: list[str]) -> None:
    import json

    lines = []
    for name, value in facts.items():
        if value is None or name in ("errors", "payload", "result", "meta"):
            continue
        lines.append(f"{name + ':':<15}{cell(value)}")
    documents = [name for name in ("payload", "meta", "result") if getattr(found, name) is not None]
    # ASCII, so escaped by JSON itself.
    lines += [f"{name + ':':<15}{json.dumps(facts[name], indent=2, ensure_ascii=True)}" for name in documents]
    for entry in facts["errors"] if isinstance(facts["errors"], list) else []:
        known = entry if isinstance(entry, dict) else {"message": entry}
        where = " ".join(f"{name} {known[name]}" for name in ("attempt", "at", "worker") if name in known)
        kind, message = f"{known.get('type', '')}: ", str(known.get("message", ""))
        # That of a lost attempt begins with its type, as `jobs.error` shows it without one.
        lines += ["", escaped(where), escaped(f"  {kind}{message.removeprefix(kind)}")]
        lines += [f"    {escaped(line)}" for line in str(known.get("traceback") or "").splitlines()]
    out("\n".join(lines + more))
