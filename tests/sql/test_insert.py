"""INSERT: the defaults of a row, and which values are refused and how."""

from __future__ import annotations

import json
from typing import Any

import asyncpg
import pytest

from pgworkd.database import schema
from tests.kits.sessions import Notices
from tests.kits.verbs import T0, Db, claim_ids, clock, fail, insert, live, one, release, set_pool, worker

MIB = 1024 * 1024


async def test_a_row_needs_only_a_queue(db: Db) -> None:
    await clock(0, db)
    row = await live(db, await one(db))
    given = {name: value for name, value in row.items() if value is not None}
    assert given.pop("id").version == 7
    assert given == {
        "queue": "q",
        "payload": "{}",
        "status": "pending",
        "errors": "[]",
        "yields": False,
        "run_at": T0,
        "created_at": T0,
        **dict.fromkeys(("priority", "attempts", "begun", "failures", "losses", "waiting_on"), 0),
    }


async def test_the_clock_is_the_statement_time_unless_it_is_set(db: Db) -> None:
    async with db.transaction():
        for empty in (None, ""):
            if empty is not None:
                await db.execute("SELECT set_config('pgworkd.clock', '', false)")
            assert await db.fetchval("SELECT pgworkd.clock() = statement_timestamp()")
        assert await db.fetchval("SELECT pgworkd.clock() > transaction_timestamp()")
        await clock(0, db)
        assert await db.fetchval("SELECT pgworkd.clock()") == T0


# Refusals. The error says what is wrong: the name of the CHECK says what would be right. The numbered ones are in
# tests/engine/test_bad_inputs.py.

NAME = "name_must_have_1_to_200_characters"
KEY = "key_must_have_1_to_512_characters"
KEY_BYTES = "key_must_not_exceed_1536_bytes"
OBJECT = "value_must_be_a_json_object"
SIZE = "value_must_not_exceed_1_mib"
INSTANT = "instant_must_lie_between_1970_and_2200"
ATTEMPTS = "max_attempts_must_be_1_to_1000"
PERIOD = "period_must_be_above_0_and_at_most_366_days"
LEASED = "only_a_running_job_has_a_lease"
OWN_LEASE = "a_lease_of_its_own_needs_an_assignment"
BLOCKED = "blocked_jobs_need_a_serialize_key_or_depend"
ERRORS = "errors_must_be_a_json_array"
COUNTERS = "counters_must_not_be_negative"

REFUSED = [
    ("payload", f"jsonb_build_object('x', repeat('a', {2 * MIB}))", SIZE),
    ("meta", f"jsonb_build_object('x', repeat('a', {2 * MIB}))", SIZE),
    ("payload", "('{\"x\": [1e131071' || repeat(',1e131071', 16) || ']}')::jsonb", SIZE),
    ("meta", "'[1]'", OBJECT),
    ("run_at", "'1969-12-31 23:59:59.999999+00'", INSTANT),
    ("run_at", "'2200-01-01 00:00:00+00'", INSTANT),
    ("expires_at", "'infinity'", INSTANT),
    ("expires_at", "'4713-01-01 BC'", INSTANT),
    ("max_attempts", "2147483647", ATTEMPTS),
    ("timeout_s", "0", PERIOD),
    ("timeout_s", "-1", PERIOD),
    ("timeout_s", "'NaN'", PERIOD),
    ("timeout_s", "'infinity'", PERIOD),
    ("dedupe_key", "''", KEY),
    ("dedupe_key", "repeat('x', 513)", KEY),
    ("schedule", "''", NAME),
    ("schedule", "repeat('x', 201)", NAME),
    ("created_at", "'4000-01-01 BC'", INSTANT),
    ("created_at", "'infinity'", INSTANT),
    ("started_at", "'4000-01-01 BC'", INSTANT),
    ("failed_at", "'294276-12-31'", INSTANT),
    ("cancel_requested_at", "'infinity'", INSTANT),
    ("occurrence", "'294276-12-31'", INSTANT),
    ("occurrence", "'-infinity'", INSTANT),
    ("errors", "'{}'", ERRORS),
    ("errors", "'null'", ERRORS),
    ("errors", "'7'", ERRORS),
    ("attempts", "-1", COUNTERS),
    ("failures", "-1", COUNTERS),
    ("losses", "-1", COUNTERS),
    ("status", "'blocked'", BLOCKED),
    ("waiting_on", "1", BLOCKED),
    ("lease_until", "'2027-01-01'", LEASED),
    ("lease_s", "30", OWN_LEASE),
    ("assignment_id", "gen_random_uuid()", OWN_LEASE),
]


@pytest.mark.parametrize(("column", "value", "check"), REFUSED)
async def test_a_bad_value_is_refused_by_a_check_named_after_the_remedy(
    db: Db, column: str, value: str, check: str
) -> None:
    with pytest.raises(asyncpg.CheckViolationError) as caught:
        await db.execute(f"INSERT INTO pgworkd.jobs (queue, {column}) VALUES ('q', {value})")  # noqa: S608
    assert caught.value.constraint_name == check
    assert check in str(caught.value)
    assert await db.fetchval("SELECT count(*) FROM pgworkd.jobs") == 0


@pytest.mark.parametrize("value", ["''", "repeat('x', 201)", "repeat('ü', 201)"])
async def test_a_queues_name_has_1_to_200_characters(db: Db, value: str) -> None:
    with pytest.raises(asyncpg.CheckViolationError) as caught:
        await db.execute(f"INSERT INTO pgworkd.jobs (queue) VALUES ({value})")  # noqa: S608
    assert caught.value.constraint_name == NAME


@pytest.mark.parametrize("column", ["run_at", "status", "priority", "attempts", "errors"])
async def test_null_is_refused(db: Db, column: str) -> None:
    with pytest.raises(asyncpg.NotNullViolationError) as caught:
        await db.execute(f"INSERT INTO pgworkd.jobs (queue, {column}) VALUES ('q', NULL)")  # noqa: S608
    assert caught.value.column_name == column


async def test_a_nul_character_is_refused(db: Db) -> None:
    with pytest.raises(asyncpg.UntranslatableCharacterError):
        await one(db, payload='{"x": "\\u0000"}')
    for column in ("kind", "dedupe_key"):
        with pytest.raises(asyncpg.CharacterNotInRepertoireError):
            await one(db, **{column: "a\x00b"})


async def test_one_bad_row_refuses_only_its_own_statement(db: Db) -> None:
    with pytest.raises(asyncpg.CheckViolationError):
        await db.execute("""INSERT INTO pgworkd.jobs (queue, payload) VALUES ('q', '{}'), ('q', '[]')""")
    await one(db)
    assert await db.fetchval("SELECT count(*) FROM pgworkd.jobs") == 1


async def test_values_at_the_bounds_are_accepted(db: Db) -> None:
    await clock(0, db)
    compact_mib_of_text = json.dumps({"x": "a" * (MIB - 8)}, separators=(",", ":"))
    compact_mib_of_numbers = '{"x":[' + ",".join(["7"] * (MIB // 2 - 4)) + "]}"
    columns: dict[str, list[Any]] = {
        "kind": ["x", "ü" * 200, "os.system", "a.b:c"],
        "priority": [2**31 - 1, -(2**31)],
        "max_attempts": [1, 1000],
        "timeout_s": [0.001, 366 * 86400],
        "dedupe_key": ["k", "ü" * 512],
        "payload": [compact_mib_of_text, compact_mib_of_numbers, '{"a": 1, "a": 2}', '{"n": ' + "9" * 5000 + "}"],
    }
    for column, values in columns.items():
        for value in values:
            await one(db, **{column: value})
    await db.execute("INSERT INTO pgworkd.jobs (queue, run_at) VALUES ('q', '1970-01-01 00:00:00+00')")
    await db.execute("INSERT INTO pgworkd.jobs (queue, run_at) VALUES ('q', '2199-12-31 23:59:59+00')")
    # All of them that are due can be claimed in one call.
    due = await db.fetchval("SELECT count(*) FROM pgworkd.jobs WHERE run_at <= pgworkd.clock()")
    assert len(await claim_ids(db, await worker(db), 100)) == due == 17


async def test_one_live_job_per_queue_and_dedupe_key_compared_bytewise(db: Db) -> None:
    await one(db, dedupe_key="\u00e9")
    with pytest.raises(asyncpg.UniqueViolationError) as caught:
        await one(db, dedupe_key="\u00e9")
    assert caught.value.constraint_name == "jobs_dedupe"
    await one(db, dedupe_key="e\u0301")  # renders identically
    await one(db, "another queue", dedupe_key="\u00e9")
    await one(db)
    await one(db)


async def test_ids_are_version_7_uuids_in_the_order_of_insertion(db: Db) -> None:
    before = await db.fetchval("SELECT clock_timestamp()")
    ids = [*await insert(db, 5000), *[await one(db) for _ in range(100)]]
    after = await db.fetchval("SELECT clock_timestamp()")
    assert {i.version for i in ids} == {7}
    assert {i.variant for i in ids} == {"specified in RFC 4122"}
    assert ids == sorted(ids)
    milliseconds = [i.int >> 80 for i in ids]
    assert milliseconds[0] >= int(before.timestamp() * 1000) - 1
    assert milliseconds[-1] <= int(after.timestamp() * 1000) + 1
    assert len({i.int & (2**62 - 1) for i in ids}) == len(ids), "the rest is random"


# By hand


async def test_truncating_and_deleting_by_hand_leave_workers_unharmed(db: Db, notices: Notices) -> None:
    worker_id = await worker(db)
    await set_pool(db, worker_id)
    ids = await insert(db, 3)
    assert await claim_ids(db, worker_id) == ids
    await db.execute("DELETE FROM pgworkd.jobs WHERE id = $1", ids[0])
    assert await release(db, ids[:1]) == set()
    await db.execute("TRUNCATE pgworkd.jobs")
    assert await fail(db, ids) == {}
    assert await notices.queues() == ["q"]
    again = await one(db)
    assert await notices.queues() == ["q"]
    assert await claim_ids(db, worker_id) == [again]


async def test_updating_a_running_row_by_hand_ends_its_attempt(db: Db) -> None:
    worker_id = await worker(db)
    job_id = await one(db)
    await claim_ids(db, worker_id)
    with pytest.raises(asyncpg.CheckViolationError):
        await db.execute("UPDATE pgworkd.jobs SET status = 'pending'")
    await db.execute("UPDATE pgworkd.jobs SET status = 'pending', worker_id = NULL")
    assert await release(db, [job_id]) == set()
    assert await claim_ids(db, worker_id) == [job_id]


# Regressions


async def test_the_size_limit_applies_to_a_value_stored_compressed(db: Db) -> None:
    """pg_column_size of a stored value is its compressed size: 10 MB of a's are 120 kB."""
    await db.execute("CREATE TEMP TABLE docs (doc jsonb)")
    await db.execute("INSERT INTO docs SELECT jsonb_build_object('x', repeat('a', 10000000))")
    with pytest.raises(asyncpg.CheckViolationError) as caught:
        await db.execute("INSERT INTO pgworkd.jobs (queue, payload) SELECT 'q', doc FROM docs")
    assert caught.value.constraint_name == SIZE


async def test_the_longest_names_and_keys_fit_into_the_indexes(db: Db) -> None:
    """A B-tree entry is limited to 2,704 bytes; it would refuse the row with 54000 and no hint of what is allowed."""
    queue = "".join(chr(0x10000 + i * 37) for i in range(200))
    key = "".join(chr(0x10000 + i * 41) for i in range(512))
    await one(db, queue, kind=queue, dedupe_key=key[:384])
    with pytest.raises(asyncpg.CheckViolationError) as caught:
        await one(db, queue, dedupe_key=key[:385])
    assert caught.value.constraint_name == KEY_BYTES


async def test_an_upgrade_adds_the_size_bound_of_numbers(db: Db) -> None:
    for domain, check in (("payload_object", SIZE), ("json_result", "result_must_not_exceed_1_mib")):
        await db.execute(f"ALTER DOMAIN pgworkd.{domain} DROP CONSTRAINT {check}")
        text = "pg_column_size(VALUE) <= 2000 OR octet_length(VALUE::text) <= 2097152"
        await db.execute(f"ALTER DOMAIN pgworkd.{domain} ADD CONSTRAINT {check} CHECK ({text}) NOT VALID")
    large = "('{\"x\": [1e131071' || repeat(',1e131071', 16) || ']}')::jsonb"
    await db.execute(f"INSERT INTO pgworkd.jobs (queue, payload) VALUES ('q', {large})")  # noqa: S608
    await db.execute("UPDATE pgworkd.schema_version SET version = 1")
    await db.execute(schema.text())
    for domain, check in (("payload_object", SIZE), ("json_result", "result_must_not_exceed_1_mib")):
        with pytest.raises(asyncpg.CheckViolationError, match=check):
            await db.execute(f"SELECT {large}::pgworkd.{domain}")
    assert await db.fetchval("SELECT count(*) FROM pgworkd.jobs") == 1, "what is stored already stays"
