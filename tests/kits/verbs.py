"""The verbs of `schema.sql`, called as SQL, and the rows that they change.

The clock is an input: `clock(5, db, other)` sets the clock of those sessions to T0 + 5 s. T0 lies in the future, so
that the server has long been up by then.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, TypeAlias

import asyncpg

Db: TypeAlias = "asyncpg.Connection[Any]"
Settle: TypeAlias = Callable[..., Awaitable[Any]]

T0 = datetime(2100, 6, 15, 12, 0, tzinfo=UTC)
_TYPES = {
    **dict.fromkeys(("payload", "meta", "errors"), "jsonb"),
    **dict.fromkeys(("run_at", "created_at", "failed_at", "expires_at", "occurrence", "dedupe_until"), "timestamptz"),
    **dict.fromkeys(("priority", "attempts", "failures", "losses", "max_attempts", "worker_id"), "int"),
    **dict.fromkeys(("id", "batch_id"), "uuid"),
    "status": "pgworkd.job_status",
    "timeout_s": "real",
    "yields": "bool",
}  # of columns that are not text

TABLES = """
    audit batch_additions batches finished_jobs job_dependencies jobs pools progress queues refused_rows
    result_waiters schedules workers
""".split()
LEASE_GONE = "PW001"
BATCH_CLOSED = "PW003"
NEVER = "PW004"
WORDS = ["raise", "skip", "replace", "reschedule"]
"""What `enqueue` may do with a duplicate."""
Answer = tuple[uuid.UUID, bool, bool]


def at(seconds: float) -> datetime:
    """The instant `seconds` after T0."""
    return T0 + timedelta(seconds=seconds)


async def clock(seconds: float, *sessions: Db) -> None:
    """Sets the clock of these sessions to T0 + `seconds`."""
    for session in sessions:
        await session.execute("SELECT pg_catalog.set_config('pgworkd.clock', $1, false)", str(at(seconds)))


# Worker life


async def worker(db: Db, lease_s: float = 30, name: str = "w") -> int:
    """Registers a worker; its id."""
    return int(await db.fetchval("SELECT pgworkd.register($1, 1, 'v', $2)", name, lease_s))


async def token(db: Db, worker_id: int) -> uuid.UUID | None:
    """The registration token of the worker; None: it has none."""
    # The operator is schema-qualified: some callers have a hostile search_path.
    sql = "SELECT token FROM pgworkd.workers WHERE id OPERATOR(pg_catalog.=) $1"
    found: uuid.UUID | None = await db.fetchval(sql, worker_id)
    return found


async def heartbeat(db: Db, worker_id: int, state: str = "running") -> asyncpg.Record | None:
    """One heartbeat, and what it returns to the worker; None: it is lost."""
    # The operator is schema-qualified: some callers have a hostile search_path.
    token = "SELECT w.token FROM pgworkd.workers w WHERE w.id OPERATOR(pg_catalog.=) $1"
    sql = f"SELECT pgworkd.heartbeat($1, ({token}), $2)"
    if not await db.fetchval(sql, worker_id, state):
        return None
    return await db.fetchrow("SELECT * FROM pgworkd.wanted($1)", worker_id)


async def sign_off(db: Db, worker_id: int) -> bool:
    """Signs a worker off; False if it still has running jobs."""
    return bool(await db.fetchval("SELECT pgworkd.sign_off($1, $2)", worker_id, await token(db, worker_id)))


async def set_pool(db: Db, worker_id: int, queue: str = "q", *, idle: bool = True) -> None:
    """Announces that the worker's pool is idle or polling."""
    await db.execute("SELECT pgworkd.set_pool($1, $2, 1, $3)", worker_id, queue, idle)


async def steady(db: Db, *workers: int, since: float = 0, until: float = 60) -> None:
    """These workers (lease 30 s) send heartbeats every 10 s; the clock ends at T0 + `until`."""
    seconds = since
    while seconds < until:
        seconds = min(seconds + 10, until)
        await clock(seconds, db)
        for worker_id in workers:
            assert await heartbeat(db, worker_id) is not None


# Claim and settle. Arrays are parallel; a single value applies to all ids.


async def claim(
    db: Db, worker_id: int, limit: int = 10, queue: str = "q", kinds: Sequence[str] = (), budgets: Sequence[int] = ()
) -> list[asyncpg.Record]:
    """Claims; the rows returned, in claim order."""
    sql = "SELECT * FROM pgworkd.claim($1, $2, $3, $4, $5)"
    return in_order(await db.fetch(sql, worker_id, queue, limit, kinds, budgets))


def in_order(rows: Sequence[asyncpg.Record]) -> list[asyncpg.Record]:
    """The rows of a claim in claim order; behind them those without a job."""
    jobs = [row for row in rows if row["id"] is not None]
    others = [row for row in rows if row["id"] is None]
    return sorted(jobs, key=lambda row: (-row["priority"], row["run_at"], row["id"])) + others


async def claim_ids(db: Db, worker_id: int, limit: int = 10, queue: str = "q") -> list[uuid.UUID]:
    """Claims; the ids in claim order."""
    return [row["id"] for row in await claim(db, worker_id, limit, queue)]


async def complete(
    db: Db, ids: Sequence[uuid.UUID], attempts: Sequence[int] | int = 1, results: Sequence[str | None] | None = None
) -> set[uuid.UUID]:
    """settle_completed; the ids it settled."""
    sql = "SELECT pgworkd.settle_completed($1, $2, $3)"
    return _once(await db.fetchval(sql, ids, _each(attempts, ids), results or [None] * len(ids)))


async def complete_occurrence(
    db: Db, job_id: uuid.UUID, name: str, following: datetime, revision: int = 1, attempt: int = 1
) -> bool:
    """settle_completed of an occurrence, with the next one given; whether the settle was valid."""
    sql = "SELECT pgworkd.settle_completed($1, $2, '{NULL}', $3, $4, $5)"
    return bool(await db.fetchval(sql, [job_id], [attempt], [name], [following], [revision]))


async def fail(
    db: Db,
    ids: Sequence[uuid.UUID],
    attempts: Sequence[int] | int = 1,
    *,
    delay_s: Sequence[float] | float = 60.0,
    permanent: Sequence[bool] | bool = False,
    message: str = "it broke",
    following: tuple[str, datetime, int] | None = None,
) -> dict[uuid.UUID, str]:
    """settle_failed; the outcome by id."""
    entry = json.dumps({"type": "E", "message": message, "traceback": "...", "worker": "w"})
    names, instants, revisions = ([value] for value in following) if following else (None, None, None)
    rows = await db.fetch(
        "SELECT * FROM pgworkd.settle_failed($1, $2, $3, $4, $5, $6, $7, $8, $9)",
        ids,
        _each(attempts, ids),
        _each(delay_s, ids),
        _each(permanent, ids),
        [message] * len(ids),
        [entry] * len(ids),
        names,
        instants,
        revisions,
    )
    _once([row["id"] for row in rows])
    return {row["id"]: row["status"] for row in rows}


async def release(
    db: Db,
    ids: Sequence[uuid.UUID],
    attempts: Sequence[int] | int = 1,
    *,
    delay_s: float | None = None,
    message: str | None = None,
) -> set[uuid.UUID]:
    """settle_released; the ids it settled."""
    sql = "SELECT pgworkd.settle_released($1, $2, $3, $4)"
    return _once(await db.fetchval(sql, ids, _each(attempts, ids), [delay_s] * len(ids), [message] * len(ids)))


async def end(
    db: Db,
    ids: Sequence[uuid.UUID],
    attempts: Sequence[int] | int = 1,
    *,
    status: Sequence[str] | str = "cancelled",
    message: str | None = None,
) -> set[uuid.UUID]:
    """settle_ended; the ids it settled."""
    sql = "SELECT pgworkd.settle_ended($1, $2, $3, $4)"
    return _once(await db.fetchval(sql, ids, _each(attempts, ids), _each(status, ids), [message] * len(ids)))


async def rescue(db: Db, worker_id: int, limit: int = 1000) -> dict[uuid.UUID, str]:
    """rescue; the outcome by id of each job it took."""
    return {
        row["id"]: row["status"] for row in await db.fetch("SELECT * FROM pgworkd.rescue($1, $2)", worker_id, limit)
    }


async def cancel(db: Db, *ids: uuid.UUID) -> dict[uuid.UUID, str]:
    """cancel; 'cancelled' or 'requested' by id."""
    return {row["id"]: row["outcome"] for row in await db.fetch("SELECT * FROM pgworkd.cancel($1)", ids)}


async def retry(db: Db, *ids: uuid.UUID) -> set[uuid.UUID]:
    """retry; the ids it changed."""
    return _once(await db.fetchval("SELECT pgworkd.retry($1)", ids))


# Rows


async def insert(db: Db, count: int = 1, queue: str = "q", **columns: Any) -> list[uuid.UUID]:
    """Inserts `count` equal jobs in one statement; their ids in the order of insertion."""
    values = [f"${number}::{_TYPES.get(name, 'text')}" for number, name in enumerate(columns, 3)]
    sql = (
        f"INSERT INTO pgworkd.jobs ({', '.join(['queue', *columns])}) "  # noqa: S608 - names are ours
        f"SELECT {', '.join(['$2::text', *values])} FROM generate_series(1, $1::int) RETURNING id"
    )
    return [row["id"] for row in await db.fetch(sql, count, queue, *columns.values())]


async def one(db: Db, queue: str = "q", **columns: Any) -> uuid.UUID:
    """Inserts one job; its id."""
    return (await insert(db, 1, queue, **columns))[0]


async def enqueue(db: Db, on_duplicate: str | None = None, queue: str = "q", **options: Any) -> Answer:
    """enqueue(); (id, created, changed)."""
    given = {"dedupe_key": "k", "on_duplicate": on_duplicate, **options}
    given = {name: value for name, value in given.items() if value is not None}
    names = ", ".join(f"p_{name} => ${number}" for number, name in enumerate(given, 2))
    (row,) = await db.fetch(f"SELECT * FROM pgworkd.enqueue($1, {names})", queue, *given.values())  # noqa: S608
    return row["id"], row["created"], row["changed"]


async def insert_running(db: Db, count: int = 1, **columns: Any) -> list[uuid.UUID]:
    """Inserts `count` equal jobs, which a new worker claims; their ids in the order of insertion."""
    ids = await insert(db, count, **columns)
    assert await claim_ids(db, await worker(db), count, columns.get("queue", "q")) == ids
    return ids


async def live(db: Db, job_id: uuid.UUID) -> asyncpg.Record:
    """The row of a live job."""
    row = await db.fetchrow("SELECT * FROM pgworkd.jobs WHERE id = $1", job_id)
    assert row is not None, f"{job_id} is not in jobs"
    return row


async def over(db: Db, job_id: uuid.UUID) -> asyncpg.Record:
    """The row of a finished job in the history."""
    rows = await db.fetch("SELECT * FROM pgworkd.finished_jobs WHERE id = $1", job_id)
    assert len(rows) == 1, f"{job_id} is {len(rows)} times in finished_jobs"
    return rows[0]


async def statuses(db: Db, ids: Sequence[uuid.UUID]) -> list[str | None]:
    """The statuses of jobs, live or finished, in the order of `ids`; None if there is no such job."""
    rows = await db.fetch("SELECT id, status::text FROM pgworkd.all_jobs WHERE id = ANY ($1)", ids)
    assert len(rows) <= len(ids), "a job is there twice"
    found = {row["id"]: row["status"] for row in rows}
    return [found.get(job_id) for job_id in ids]


# Schedules


async def put_schedule(db: Db, name: str = "s", **changes: Any) -> None:
    """put_schedule, every minute by default."""
    rule = {"queue": "q", "kind": None, "cron": None, "every_s": 60, "timezone": "UTC", "missed": "skip"}
    sql = "SELECT pgworkd.put_schedule($1, $2, $3, $4, $5, $6, $7, $8)"
    await db.execute(sql, name, *{**rule, "payload": "{}", **changes}.values())


async def add_occurrences(db: Db, *occurrences: tuple[str, datetime, int]) -> list[str]:
    """add_occurrences; the names of the schedules that got one."""
    columns = [list(column) for column in zip(*occurrences, strict=True)]
    return sorted(await db.fetchval("SELECT pgworkd.add_occurrences($1, $2, $3)", *columns))


async def schedule(db: Db, name: str = "s") -> asyncpg.Record:
    """The schedule's row."""
    row = await db.fetchrow("SELECT * FROM pgworkd.schedules WHERE name = $1", name)
    assert row is not None
    return row


async def occurrences(db: Db, name: str = "s") -> list[tuple[datetime, str]]:
    """The schedule's occurrences in jobs: instant and status, in order."""
    sql = "SELECT occurrence, status::text FROM pgworkd.jobs WHERE schedule = $1 ORDER BY occurrence"
    return [(row[0], row[1]) for row in await db.fetch(sql, name)]


async def due_occurrence(db: Db, worker_id: int, instant: datetime = T0) -> uuid.UUID:
    """Adds the occurrence of schedule s at `instant`, which is due, and claims it."""
    assert await add_occurrences(db, ("s", instant, (await schedule(db))["revision"])) == ["s"]
    (job_id,) = await claim_ids(db, worker_id)
    return job_id


def _each(value: Any, ids: Sequence[uuid.UUID]) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value] * len(ids)


def _once(ids: Sequence[uuid.UUID]) -> set[uuid.UUID]:
    assert len(set(ids)) == len(ids), "an id is twice in the answer"
    return set(ids)
