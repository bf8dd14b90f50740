"""Many jobs in one call are consumed lazily, checked by column, and stored while the next are produced."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import anyio
import asyncpg
import psycopg
import pytest

from pgworkd.client import NewJob, columns, connections, enqueue_many
from pgworkd.client.new_job import row
from pgworkd.core.payload import encode, encode_plain
from pgworkd.errors import UsageError
from tests.kits.drivers import in_autocommit, settled, stored


@in_autocommit
async def test_a_generator_is_consumed_in_parts(
    opener: Any, dsn: str, db: asyncpg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(columns, "STATEMENT_ROWS", 50)
    drawn, insert, drawn_when_sent = 0, connections._insert, list[int]()

    def jobs() -> Iterator[NewJob]:
        nonlocal drawn
        for drawn in range(1, 1001):
            yield NewJob("q", {"n": drawn - 1})

    def sent(part: columns.Columns) -> Any:
        drawn_when_sent.append(drawn)
        return insert(part)

    monkeypatch.setattr(connections, "_insert", sent)
    async with opener(dsn, autocommit=True) as caller:
        ids = await settled(enqueue_many(caller.conn, jobs()))
    assert await stored(db) == {job_id: {"n": n} for n, job_id in enumerate(ids)}
    assert ids == sorted(ids)
    assert all(when <= 50 * (number + 2) for number, when in enumerate(drawn_when_sent))


@pytest.mark.slow("each error with each driver")
@in_autocommit
@pytest.mark.parametrize("fault", ["job", "generator"])
async def test_a_late_error_undoes_all_inserts_but_not_the_callers_transaction(
    fault: str, opener: Any, dsn: str, db: asyncpg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(columns, "STATEMENT_ROWS", 50)

    def jobs() -> Iterator[NewJob]:
        for n in range(333):
            yield NewJob("q", {"n": n})
        if fault == "generator":
            raise KeyError("source")
        yield NewJob("q", {"a": [1, {1, 2}]})

    async with opener(dsn, autocommit=True) as caller:
        wanted = (UsageError, r"^jobs\[333\]\.payload\.a\[1\] ") if fault == "job" else (KeyError, "source")
        with pytest.raises(wanted[0], match=wanted[1]):
            await settled(enqueue_many(caller.conn, jobs()))
        assert await stored(db) == {}
        await settled(enqueue_many(caller.conn, [NewJob("q")] * 60))
    assert len(await stored(db)) == 60


async def test_a_late_error_leaves_the_callers_transaction_usable(
    db: asyncpg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(columns, "STATEMENT_ROWS", 5)
    async with db.transaction():
        with pytest.raises(UsageError, match=r"^jobs\[17\]\.priority"):
            await enqueue_many(db, [NewJob("q", priority=2**31 if n == 17 else n) for n in range(30)])
        (kept,) = await enqueue_many(db, [NewJob("q")])
    assert list(await stored(db)) == [kept]


@pytest.mark.parametrize("before", [0, 7])
async def test_jobs_may_be_read_from_a_cursor_of_the_same_connection(
    before: int, dsn: str, db: asyncpg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(columns, "STATEMENT_ROWS", 5)

    def jobs() -> Iterator[NewJob]:
        yield from [NewJob("q")] * before
        for (n,) in conn.cursor().stream("SELECT generate_series(1, 40)"):
            yield NewJob("q", {"n": n})

    def call() -> int:
        return len(enqueue_many(conn, jobs()))

    with psycopg.connect(dsn, autocommit=True) as conn:
        assert await anyio.to_thread.run_sync(call) == before + 40
    assert len(await stored(db)) == before + 40


_AT = datetime(2031, 1, 1, tzinfo=UTC)
_CHOICES: dict[str, list[Any]] = {
    "queue": ["q", "q2", "", "x\ny", "a\0", 7, None, "q" * 201],
    "kind": [None, "k", "k2", "", 5],
    "priority": [0, 1, True, 1.0, 2**31],
    "run_at": [None, None, _AT, datetime(2031, 1, 1)],
    "delay": [None, None, 5, -1],
    "max_attempts": [None, 3, True, 0],
    "timeout_s": [None, 1, 1.5, 0],
    "dedupe_key": [None, "a", "b", ""],
    "meta": [None, {"m": 1}, {"m": {1}}],
    "serialize_key": [None, "s", "t", "\ud800"],
    "on_retry": ["hold", "hold", "yield"],
    "dedupe_for": [None, None, 5, 0],
    "dedupe_by": [None, "payload", "kind"],
    "payload": [
        None,
        {"n": 1},
        {"n": "a\nb"},
        {"n": [[1.5], {"x": None}]},
        {"n": "\0"},
        {1: 2},
        [1],
        {"n": float("nan")},
    ],
}


@pytest.mark.parametrize("seed", range(4))
def test_column_checks_agree_with_row_checks(seed: int) -> None:
    chance = random.Random(seed)  # noqa: S311
    seen = {"stored": 0, "refused": 0}
    for _ in range(400):
        varied = chance.sample(sorted(_CHOICES), 3)
        fixed: dict[str, Any] = {"queue": "q"} | {name: chance.choice(_CHOICES[name][:3]) for name in varied}
        jobs = [
            NewJob(**fixed | {name: chance.choice(_CHOICES[name]) for name in varied if chance.random() < 0.1})
            for _ in range(chance.randrange(1, 9))
        ]
        wanted: Any = None
        try:
            wanted = [tuple(row(job, f"jobs[{n}].")) for n, job in enumerate(jobs)]
        except UsageError as error:
            wanted = str(error)
        try:
            many = columns.ManyJobs(jobs)
            found: Any = [each for part in _parts(many) for each in _rows(part)]
        except UsageError as error:
            found = str(error)
        assert found == [*map(_without_default, wanted)] if isinstance(wanted, list) else found == wanted
        seen["stored" if isinstance(wanted, list) else "refused"] += 1
    assert min(seen.values()) > 30


def _parts(many: columns.ManyJobs) -> Iterator[columns.Columns]:
    while many:
        steps = many.columns()
        try:
            while True:
                next(steps)
        except StopIteration as end:
            yield end.value


def _rows(part: columns.Columns) -> list[tuple[Any, ...]]:
    """Rows as the server reads them: an empty list means that all have the value in `alike`."""
    count = len(part.ids)
    assert part.values[17].split("\n") == list(part.payloads)
    fields = [list(v) if v else [a] * count for a, v in zip(part.alike, part.varying, strict=True)]
    return [_without_default(each) for each in zip(*fields[:2], part.payloads, *fields[2:], strict=True)]


def _without_default(fields: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(None if field == "hold" else field for field in fields)


def test_payloads_encoded_in_bulk_equal_those_encoded_singly() -> None:
    good: list[object] = [
        {"a": [1, (2.5, None), {"b": 'ü\n\t"\\'}]},
        {},
        {"d": {"e": [True, -1, 1e300]}},
        {"x": "\x7f\u2028"},
    ]
    assert encode_plain(good) == [encode(value) for value in good]
    for bad in ([], {1: 2}, {"a": {1}}, {"a": float("inf")}, {"a": "\0"}, {"a": "\ud800"}, {"a": 10**4400}, _deep(65)):
        assert encode_plain([*good, bad]) is None
    assert encode_plain([_deep(64)]) == [json.dumps(_deep(64), separators=(",", ":"))]


def _deep(levels: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(levels - 1):
        value = {"a": value}
    return value
