"""Bad inputs 26 to 35: arguments that application code passes to the client."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import anyio
import anyio.to_thread
import asyncpg
import psycopg
import pytest

from pgworkd.client import Batch, enqueue_many
from pgworkd.errors import UsageError
from pgworkd.results import Results
from tests.engine.bad_inputs import Case, arguments
from tests.kits.daemon import insert, until
from tests.kits.drivers import Untouchable, numbered, stored
from tests.kits.verbs import Db

NO_UUID = "is a int: pass a UUID, as returned by enqueue"
NUL, SURROGATE = "holds a NUL character: remove it", r"holds a lone surrogate \(half a character\): remove it"
HUGE = 2**70


class Own:
    """A class of the application's that notices when it is pickled."""

    def __reduce__(self) -> Any:
        raise AssertionError("pickled")


CYCLE: dict[str, Any] = {}
CYCLE["list"] = [CYCLE]

STRANGERS = [
    (b"x", "bytes", "encode it as text, for example base64"),
    ({1}, "set", "pass a list"),
    (Decimal(1), "Decimal", r"pass str\(value\)"),
    (datetime(2030, 1, 1, tzinfo=UTC), "datetime", r"pass value.isoformat\(\)"),
    (Own(), "Own", "pass plain JSON types, a dataclass or a pydantic model"),
]


# 33: ids


async def id_of_a_result(dsn: str, db: Db) -> None:
    """A caller with a malformed id must not affect those who wait for real jobs."""
    job_id = await insert(db, "q")
    async with Results(dsn, poll_s=0.1) as results, anyio.create_task_group() as tasks:
        tasks.start_soon(results.result, job_id)
        for ask in (results.result(HUGE), anext(results.of_batch(HUGE))):  # type: ignore[arg-type]
            with pytest.raises(UsageError, match=NO_UUID):
                await ask
        await until(lambda: db.fetchval("SELECT EXISTS (SELECT FROM pgworkd.result_waiters)"))
        tasks.cancel_scope.cancel()


async def id_of_a_batch(_: str, __: Db) -> None:
    with pytest.raises(UsageError, match=f"batch_id {NO_UUID}"):
        Batch(Untouchable(), HUGE)  # type: ignore[arg-type]


# 34, 35: many


async def none_at_all(dsn: str, db: Db) -> None:
    assert await enqueue_many(db, []) == []
    with psycopg.connect(dsn) as connection:
        assert enqueue_many(connection, []) == []


async def one_bad_of_many_in_python(_: str, db: Db) -> None:
    """Found while the preceding jobs are stored: they are rolled back."""
    with pytest.raises(UsageError, match=r"^jobs\[99999\]\.payload\.n is nan"):
        await enqueue_many(db, numbered(100_000, payload={"n": float("nan")}))
    assert not await stored(db)


async def one_bad_of_many_in_the_database(_: str, db: Db) -> None:
    held = await insert(db, "q", dedupe_key="k")
    await db.execute("""
        CREATE SEQUENCE statements;
        CREATE FUNCTION count_statement() RETURNS trigger LANGUAGE plpgsql
            AS 'BEGIN PERFORM nextval(''public.statements''); RETURN NULL; END';
        CREATE TRIGGER counted BEFORE INSERT ON pgworkd.jobs FOR EACH STATEMENT EXECUTE FUNCTION count_statement()""")
    with pytest.raises(asyncpg.UniqueViolationError):
        await enqueue_many(db, numbered(25_000, dedupe_key="k"))
    assert set(await stored(db)) == {held}
    assert await db.fetchval("SELECT last_value FROM statements") == 5, "5,000 in each"


CASES = [
    Case(26, "NUL in a payload", arguments(f"payload.a\\[0\\].b {NUL}", payload={"a": [{"b": "x\0"}]})),
    Case(
        26, "NUL in a key of a payload", arguments(r"payload.a\[.* is a key that holds a NUL", payload={"a": {"\0": 1}})
    ),
    Case(26, "NUL in meta", arguments(f"meta.a {NUL}", meta={"a": "\0"})),
    *[
        Case(26, f"NUL in {name}", arguments(f"{name} {NUL}", **{name: "a\0b"}))
        for name in ("queue", "kind", "dedupe_key", "serialize_key", "limit_key")
    ],
    Case(
        27, "a lone surrogate in a payload", arguments(f"payload.a\\[1\\] {SURROGATE}", payload={"a": ["x", "\ud800"]})
    ),
    Case(27, "a lone surrogate in a key", arguments(r"payload\[.* is a key that holds a lone", payload={"\udc80": 1})),
    Case(27, "a lone surrogate in queue", arguments(f"queue {SURROGATE}", queue="a\udc80")),
    *[
        Case(
            28,
            str(value),
            arguments(
                f"payload.a.b is {value}, which JSON does not know: pass None/null or text", payload={"a": {"b": value}}
            ),
        )
        for value in (float("nan"), float("inf"), float("-inf"))
    ],
    *[
        Case(
            29,
            name,
            arguments(rf"payload.a\[0\] is of type {name}, which JSON does not know: {remedy}", payload={"a": [value]}),
        )
        for value, name, remedy in STRANGERS
    ],
    Case(
        30,
        "a dict within itself",
        arguments(r"payload.list\[0\] refers back to itself: break the cycle", payload=CYCLE),
    ),
    *[
        Case(
            31,
            f"a naive {name}",
            arguments(
                f"{name} must be a datetime from 1970 to 2199 with a time zone",
                **{name: datetime(2030, 1, 1), "dedupe_key": "k"},
            ),
        )
        for name in ("run_at", "expires_at", "dedupe_until")
    ],
    Case(
        32,
        "datetime.max",
        arguments("run_at must be a datetime from 1970 to 2199", run_at=datetime.max.replace(tzinfo=UTC)),
    ),
    Case(32, "a negative delay", arguments(r"delay is -1.0: give 0 to 31622400 seconds \(366 days\)", delay=-1.0)),
    Case(32, "a negative timedelta", arguments("delay is -1.0: give 0", delay=timedelta(seconds=-1))),
    Case(32, "timedelta.max", arguments("delay is 86400000000000.0: give 0 to 31622400", delay=timedelta.max)),
    Case(32, "a delay of 10^400", arguments("delay is out of bounds: give 0 to 31622400", delay=10**400)),
    Case(33, "2^70 as a job to wait for", arguments("after must be a list of job ids", after=[HUGE])),
    Case(33, "2^70 as the job of a result", id_of_a_result),
    Case(33, "2^70 as a batch", id_of_a_batch),
    Case(34, "an empty list", none_at_all),
    Case(35, "the last of 100,000 is refused, and none is stored", one_bad_of_many_in_python),
    Case(35, "the last of 25,000 is refused by the database", one_bad_of_many_in_the_database),
]
