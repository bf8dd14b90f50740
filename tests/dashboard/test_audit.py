"""The audit says what changed, from what to what: to those who may see it, escaped, and no more than fits a page."""

from __future__ import annotations

import json
import re
from html import unescape

from pgworkd.dashboard.changes import CHARS_MAX, MEMBERS_MAX, Change, changes
from tests.kits import verbs as v
from tests.kits.gateway import ALL, also, calling, token
from tests.kits.pages import NASTY, viewing
from tests.kits.verbs import Db

ENTRY = "INSERT INTO pgworkd.audit (who, what, queue, before, after) VALUES ('me', 'queue', 'q', $1, $2)"


def text(page: str) -> str:
    """What is read on a page, without its tags."""
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", page.partition("<main")[2].partition("</main>")[0])).split())


def test_an_entry_tells_what_differs_and_names_what_does_not() -> None:
    found = changes(
        {"rate": 5, "queue": "q", "was": [1], "same": None}, {"rate": 7.5, "queue": "q", "new": "x", "same": None}
    )
    assert found.members == [
        Change("queue", "q", "q", is_same=True),
        Change("same", "null", "null", is_same=True),
        Change("rate", "5", "7.5"),
        Change("was", "[1]", None),
        Change("new", None, "x"),
    ]
    assert changes({}, {}) == ([], 0)
    assert changes("***", "***").members == [Change("", "***", "***", is_same=True)]
    many = changes({str(name): 1 for name in range(MEMBERS_MAX + 5)}, {})
    assert (len(many.members), many.more) == (MEMBERS_MAX, 5)
    long = changes({}, {"n" * 1000: "x" * 10_000}).members[0]
    assert (long.name, long.after) == ("n" * CHARS_MAX, "x" * CHARS_MAX + " … (10,000 characters)")
    twins = ["x" * 1000 + each for each in "ab"]
    short = "x" * CHARS_MAX + " … (1,001 characters)"
    assert changes({"a": twins[0]}, {"a": twins[1]}).members == [Change("a", short, short)], "they differ all the same"


async def test_the_pages_say_what_was_changed(dsn: str, db: Db) -> None:
    job_id = await v.one(db, payload='{"to": "ann"}', run_at=v.at(3600))
    await db.execute("SELECT pgworkd.edit($1, $2, NULL, 7)", job_id, '{"to": "bob"}')
    await db.execute("SELECT pgworkd.set_queue('q', $1)", json.dumps({"max_running": 5}))
    await db.execute("SELECT pgworkd.set_queue('q', $1)", json.dumps({"max_running": 9}))
    async with calling(dsn, dashboard=True) as call:
        for scopes, sees in ((ALL, True), ({"read": None}, False)):
            caller = also(call, await token(dsn, scopes))
            for path in ("/audit", f"/jobs/{job_id}"):
                page = text((await caller("GET", path)).text)
                assert "priority: 0 → 7" in page
                assert ('payload: {"to": "ann"} → {"to": "bob"}' in page) == sees, (path, sees)
                assert sees or "ann" not in page
            assert "max_running: 5 → 9" in text((await caller("GET", "/audit")).text)


async def test_an_entry_of_any_text_is_escaped_and_short(dsn: str, db: Db) -> None:
    await db.execute(ENTRY, json.dumps({NASTY: NASTY}), json.dumps({NASTY: "x" * 1_000_000}))
    await db.execute(ENTRY, "{}", json.dumps({str(name): name for name in range(1000)}))
    async with viewing(dsn, ALL) as client:
        page = (await client.get("/audit")).text
    assert "<script>alert" not in page
    assert len(page) < 20_000
    assert NASTY in text(page)
    assert "(1,000,000 characters)" in text(page)
    assert "and 980 more" in text(page)
