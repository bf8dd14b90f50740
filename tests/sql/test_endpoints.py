"""Endpoints: what a row may hold, and how pausing and disabling one holds and frees its queues."""

from __future__ import annotations

import json
from typing import Any

import asyncpg
import pytest

from pgworkd.errors import UsageError
from pgworkd.push.endpoint import Endpoint
from tests.kits.verbs import Db, at, clock

pytestmark = pytest.mark.usefixtures("t0")

SET = "SELECT pgworkd.set_endpoint($1, $2::text::jsonb, $3, 'ann')"


async def put(db: Db, name: str = "e", *queues: str, create: bool = True, **columns: Any) -> bool:
    """Makes or changes an endpoint, and sends queues there."""
    given = columns if not create else {"url": "https://example.com/", "unsigned": True} | columns
    done = bool(await db.fetchval(SET, name, json.dumps(given), create))
    for queue in queues:
        await db.execute("SELECT pgworkd.set_queue($1, $2::text::jsonb)", queue, json.dumps({"endpoint": name}))
    return done


async def pauses(db: Db) -> dict[str, Any]:
    """Until when each queue is paused."""
    return {row[0]: row[1] for row in await db.fetch("SELECT name::text, paused_until::text FROM pgworkd.queues")}


@pytest.mark.parametrize(
    ("column", "value", "check"),
    [
        ("url", "ftp://example.com/", "endpoint_url_must_begin_with_http_or_https"),
        ("url", "https://", "endpoint_url_must_begin_with_http_or_https"),
        ("url", "https://example.com/" + "x" * 2000, "endpoint_url_must_begin_with_http_or_https"),
        ("mode", "push", "endpoint_mode_must_be_sync_or_callback"),
        ("timeout_s", 0, "endpoint_timeout_must_be_0_1_s_to_an_hour"),
        ("timeout_s", 3601, "endpoint_timeout_must_be_0_1_s_to_an_hour"),
        ("timeout_s", "NaN", "endpoint_timeout_must_be_0_1_s_to_an_hour"),
        ("callback_timeout_s", 9, "endpoint_callback_timeout_must_be_10_s_to_7_min"),
        ("callback_timeout_s", 421, "endpoint_callback_timeout_must_be_10_s_to_7_min"),
        ("headers", [], "endpoint_headers_must_be_a_json_object"),
        ("secret_name", "1", "endpoint_secret_must_be_a_name"),
        ("secret_name", "../etc/passwd", "endpoint_secret_must_be_a_name"),
        ("secret_name", "a", "endpoint_needs_a_secret_or_unsigned"),
        ("unsigned", False, "endpoint_needs_a_secret_or_unsigned"),
    ],
)
async def test_a_bad_value_is_refused_by_name(db: Db, column: str, value: object, check: str) -> None:
    await put(db)
    changes = {column: value} | ({"unsigned": False} if check == "endpoint_secret_must_be_a_name" else {})
    with pytest.raises(asyncpg.CheckViolationError) as caught:
        await put(db, create=False, **changes)
    assert caught.value.constraint_name == check


async def test_a_callback_comes_within_seven_minutes_of_its_request(db: Db) -> None:
    """Unless it is extended: the time for the answer is a part of these."""
    together = "endpoint_timeouts_of_callbacks_must_be_7_min_together"
    for answer_s, callback_s, fits in ((30, 390, True), (30.5, 390, False), (410, 10, True), (0.1, 419.9, True)):
        for mode in ("sync", "callback"):
            given = {"mode": mode, "timeout_s": answer_s, "callback_timeout_s": callback_s}
            row = {"name": "e", "url": "https://example.com/", "unsigned": True} | given
            if fits or mode == "sync":
                assert await put(db, **given)
                assert Endpoint.of(row).timeout_s == answer_s
            else:
                with pytest.raises(asyncpg.CheckViolationError) as caught:
                    await put(db, **given)
                assert caught.value.constraint_name == together
                with pytest.raises(UsageError, match=r"more than 420 s together: lower one"):
                    Endpoint.of(row)


async def test_a_change_leaves_the_rest_and_null_restores_the_default(db: Db) -> None:
    assert not await put(db, "unknown", create=False, timeout_s=1)
    assert await put(db, timeout_s=5, headers={"X-A": "1"})
    assert await put(db, create=False, url="https://example.org/", timeout_s=None)
    row = await db.fetchrow("SELECT url, timeout_s, headers::text, unsigned FROM pgworkd.endpoints")
    assert tuple(row or ()) == ("https://example.org/", 30, '{"X-A": "1"}', True)
    assert await put(db, create=False, secret_name="s", unsigned=False)
    # What says how it fares is not an operator's to set so.
    assert await db.fetchval(SET, "e", json.dumps({"disabled_at": str(at(0)), "paused_until": "infinity"}), False)
    row = await db.fetchrow("SELECT name::text, disabled_at, paused_until FROM pgworkd.endpoints")
    assert tuple(row or ()) == ("e", None, None)


async def test_the_audit_has_what_changed_but_no_place_for_secrets(db: Db) -> None:
    await put(db, url="https://example.com/SECRET", headers={"X-Key": "SECRET"})
    await put(db, create=False, url="https://example.com/OTHER-SECRET", timeout_s=7)
    await db.execute("SELECT pgworkd.disable_endpoint('e', 'why', 'ann'), pgworkd.enable_endpoint('e', 'ann')")
    await db.execute("SELECT pgworkd.remove_endpoint('e', 'ann')")
    rows = await db.fetch("SELECT who, what, before::text, after::text FROM pgworkd.audit ORDER BY id")
    assert {(row["who"], row["what"]) for row in rows} == {("ann", "endpoint")}
    assert "SECRET" not in str(rows)
    assert [json.loads(row["before"]) for row in rows][1] == {"endpoint": "e", "url": "...", "timeout_s": 30}
    after = [json.loads(row["after"]) for row in rows]
    assert after[1:] == [
        {"endpoint": "e", "url": "...", "timeout_s": 7},
        {"endpoint": "e", "disabled": True, "why": "why"},
        {"endpoint": "e", "disabled": False},
        {"endpoint": "e", "removed": True},
    ]


async def test_a_queue_needs_an_endpoint_that_is_there(db: Db) -> None:
    with pytest.raises(asyncpg.ForeignKeyViolationError) as caught:
        await db.execute("""SELECT pgworkd.set_queue('q', '{"endpoint": "none"}')""")
    assert caught.value.constraint_name == "queue_endpoint_must_exist"
    await put(db, "e", "q")
    with pytest.raises(asyncpg.ForeignKeyViolationError) as caught:
        await db.execute("SELECT pgworkd.remove_endpoint('e')")
    assert caught.value.constraint_name == "queue_endpoint_must_exist"
    await db.execute("""SELECT pgworkd.set_queue('q', '{"endpoint": null}')""")
    assert await db.fetchval("SELECT pgworkd.remove_endpoint('e')")
    assert not await db.fetchval("SELECT pgworkd.remove_endpoint('e')")
    assert await pauses(db) == {}, "a queue without settings has no row"


async def test_a_pause_holds_all_queues_of_the_endpoint_and_shortens_none(db: Db) -> None:
    await put(db, "e", "a", "b", "long", "held")
    await put(db, "other", "c")
    await db.execute("UPDATE pgworkd.queues SET paused_until = $1 WHERE name = 'long'", at(100))
    await db.execute("UPDATE pgworkd.queues SET paused_until = 'infinity' WHERE name = 'held'")
    assert await db.fetchval("SELECT pgworkd.pause_endpoint('e', 10, 'busy')") == at(10)
    assert await db.fetchval("SELECT pgworkd.pause_endpoint('e', 5, 'less')") == at(10)
    assert await db.fetchval("SELECT pgworkd.pause_endpoint('unknown', 10, 'busy')") is None
    found = await pauses(db)
    assert found["a"] == found["b"] == str(at(10))[:19] + "+00"
    assert (found["c"], found["long"], found["held"]) == (None, str(at(100))[:19] + "+00", "infinity")
    await clock(20, db)
    assert await db.fetchval("SELECT pgworkd.pause_endpoint('e', 10, 'busy')") == at(30)
    assert await db.fetchval("SELECT pgworkd.enable_endpoint('e')")
    found = await pauses(db)
    assert found["a"] is found["b"] is None, "they were paused because of it"
    assert (found["long"], found["held"]) == (str(at(100))[:19] + "+00", "infinity")


async def test_a_warning_is_noted_beside_all_else(db: Db, dsn: str) -> None:
    await put(db, "e")
    await db.execute("SELECT pgworkd.warn_of('e', $1), pgworkd.warn_of('none', 'x')", "x" * 1000)
    row = await db.fetchrow("SELECT warned_at, char_length(warned_why) FROM pgworkd.endpoints")
    assert tuple(row or ()) == (at(0), 500)
    async with db.transaction():
        await db.execute("SELECT FROM pgworkd.endpoints FOR UPDATE")
        other = await asyncpg.connect(dsn)
        await other.execute("SELECT pgworkd.warn_of('e', 'locked')", timeout=5)  # does not wait
        await other.close()
    await put(db, "e", create=False, strict_results=True, warned_why="set by hand")
    assert await db.fetchval("SELECT strict_results AND warned_why LIKE 'xx%' FROM pgworkd.endpoints")


async def test_a_disabled_endpoint_frees_its_queues_only_when_it_is_enabled(db: Db) -> None:
    await put(db, "e", "a", "b", "held")
    await db.execute("UPDATE pgworkd.queues SET paused_until = 'infinity' WHERE name = 'held'")
    assert await db.fetchval("SELECT pgworkd.disable_endpoint('e', $1)", "x" * 1000)
    assert not await db.fetchval("SELECT pgworkd.disable_endpoint('e', 'again')")
    assert await db.fetchval("SELECT pgworkd.pause_endpoint('e', 10, 'busy')") is None
    assert set((await pauses(db)).values()) == {"infinity"}
    assert await db.fetchval("SELECT char_length(disabled_why) FROM pgworkd.endpoints") == 500
    await db.execute("""SELECT pgworkd.set_queue('b', '{"paused_until": null}')""")  # an operator wants that
    assert await db.fetchval("SELECT pgworkd.enable_endpoint('e')")
    assert await pauses(db) == {"a": None, "b": None, "held": "infinity"}
    assert not await db.fetchval("SELECT pgworkd.enable_endpoint('unknown')")


@pytest.mark.parametrize("to", [None, "other"])
@pytest.mark.parametrize("how", ["pause_endpoint('e', 10, 'busy')", "disable_endpoint('e', 'gone')"])
async def test_a_queue_that_is_sent_elsewhere_is_not_held_any_more(db: Db, how: str, to: str | None) -> None:
    await put(db, "other")
    await put(db, "e", "a", "held", "stays")
    await db.execute("UPDATE pgworkd.queues SET paused_until = 'infinity' WHERE name = 'held'")
    await db.execute(f"SELECT pgworkd.{how}")
    for queue in ("a", "held"):
        await db.execute("SELECT pgworkd.set_queue($1, $2::text::jsonb)", queue, json.dumps({"endpoint": to}))
    found = await pauses(db)
    assert (found["a"], found["held"]) == (None, "infinity")
    assert found["stays"] is not None


async def test_jobs_of_a_paused_endpoint_are_not_claimed(db: Db) -> None:
    await put(db, "e", "q")
    await db.execute("SELECT pgworkd.pause_endpoint('e', 10, 'busy')")
    await db.execute("INSERT INTO pgworkd.jobs (queue) VALUES ('q')")
    worker = await db.fetchval("SELECT pgworkd.register('w', 1, 'v', 3600)")
    assert await db.fetch("SELECT * FROM pgworkd.claim($1, 'q', 1)", worker) == []
    await clock(11, db)
    assert len(await db.fetch("SELECT * FROM pgworkd.claim($1, 'q', 1)", worker)) == 1
