"""Each act of the pages, pressed in a browser, with and without JavaScript; then the row in Postgres is looked at."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from datetime import UTC, datetime
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
from playwright.async_api import Browser, Page, expect

from pgworkd.dashboard.pages import ROUTERS
from tests.kits import batches as b
from tests.kits import remote
from tests.kits import verbs as v
from tests.kits.browser import Seen, browsing, dashboard, looking, needs_chromium
from tests.kits.verbs import Db

Story = Callable[[Seen, Db], Awaitable[None]]
STORIES: dict[Story, set[tuple[str, str]]] = {}
"""Each story, and the acts that it tells: the route, and what its last part may be."""
SIGNING = {("/sign-in", ""), ("/sign-out", ""), ("/theme", "")}


@pytest.fixture
async def browser() -> AsyncIterator[Browser]:
    async with browsing() as found:
        yield found


def tells(path: str, *acts: str) -> Callable[[Story], Story]:
    """Notes which acts a story is about."""

    def noted(story: Story) -> Story:
        STORIES.setdefault(story, set()).update((path, act) for act in acts or ("",))
        return story

    return noted


def _acts() -> Iterator[tuple[str, str]]:
    """All that pages can change, from the table of routes."""
    routes: list[Any] = [route for router in ROUTERS for route in router.routes]
    for route in routes:
        if route.methods - {"GET", "HEAD"}:
            kinds = [kind for kind in get_type_hints(route.endpoint).values() if get_origin(kind) is Literal]
            for act in get_args(kinds[0]) if kinds else ("",):
                yield route.path, act


async def press(page: Page, label: str, said: str, within: str = "main") -> None:
    """Presses a button, after which the page says this."""
    await page.locator(within).get_by_role("button", name=label, exact=True).first.click()
    await expect(page.get_by_role("status")).to_contain_text(said)


async def died(db: Db, count: int) -> list[Any]:
    """Jobs of q that are dead, and counted in their group of errors."""
    ids = await v.insert(db, count)
    worker_id = await v.worker(db, 3600)
    await v.claim(db, worker_id, 100)
    await v.fail(db, ids, permanent=True)
    await db.execute("SELECT pgworkd.apply_effects(), pgworkd.count_deaths()")
    return ids


@tells("/jobs/{operation}", "retry", "cancel", "discard", "undepend", "prioritize")
async def jobs(seen: Seen, db: Db) -> None:
    ids = await died(db, 2)
    page = await seen.open(f"/jobs/{ids[0]}")
    await press(page, "Retry", "1 job retried")
    assert await v.statuses(db, ids) == ["pending", "dead"]
    await press(page, "Cancel", "1 job cancelled")
    page = await seen.open("/jobs?status=dead")
    await page.locator(f"#row-{ids[1]} input").check()
    await press(page, "Discard", "1 job discarded", "#jobs")
    ended = await db.fetch("SELECT status::text FROM pgworkd.finished_jobs WHERE id = ANY ($1) ORDER BY id", ids)
    assert [row[0] for row in ended] == ["cancelled", "dead"]
    first = await v.one(db, run_at=v.at(3600))
    second = await b.after(db, first)
    page = await seen.open(f"/jobs/{second}")
    await press(page, "Drop its dependencies", "dependencies of 1 job dropped")
    assert await v.statuses(db, [second]) == ["pending"]
    page = await seen.open("/jobs?queue=q")
    await page.locator(f"#row-{second} input").check()
    await page.get_by_label("Priority").fill("9")
    await page.keyboard.press("Enter")  # which would press the first button, Retry
    await press(page, "Set", "1 job given priority 9", "#jobs")
    rows = await db.fetch("SELECT id, priority FROM pgworkd.jobs WHERE id = ANY ($1)", [first, second])
    assert dict(rows) == {first: 0, second: 9}


@tells("/jobs/{operation}/matching", "retry", "cancel", "discard")
async def matching(seen: Seen, db: Db) -> None:
    ids = await died(db, 3)
    other = await v.one(db, "other")
    page = await seen.open("/jobs?queue=q&status=dead")
    await press(page, "Retry all", "3 jobs retried")
    assert await v.statuses(db, ids) == ["pending"] * 3
    page = await seen.open("/jobs?queue=q")
    await page.get_by_label("Payload").fill("a.b:7")
    await page.get_by_role("button", name="Show").click()
    await expect(page.get_by_role("button", name="Cancel all")).to_have_count(0)
    page = await seen.open("/jobs?queue=q")
    await press(page, "Cancel all", "3 jobs cancelled")
    await died(db, 2)
    page = await seen.open("/jobs?queue=q&status=dead")
    await press(page, "Discard all", "2 jobs discarded")
    assert [row[0] for row in await db.fetch("SELECT id FROM pgworkd.jobs")] == [other]


@tells("/operations/{operation_id}/stop")
async def many(seen: Seen, db: Db) -> None:
    """More than one call may change: they are retried in the background, which can be stopped."""
    await v.insert(db, 1500, status="dead", attempts=1, failures=1, failed_at=datetime.now(UTC))
    page = await seen.open("/jobs?queue=q&status=dead")
    await press(page, "Retry all", "is started: daemons retry all that match")
    row = page.locator("tr[id^=operation-]").first
    await expect(row).to_contain_text("1: retry")
    assert await db.fetchval("SELECT expected FROM pgworkd.operations") == 1500
    await db.execute("SELECT pgworkd.advance_operations(500)")
    page = await seen.open("/operations")
    await expect(row).to_contain_text("33 %")
    await press(page, "Stop", "operation 1 is stopped")
    await expect(row).to_contain_text("stopped by")
    assert await db.fetchval("SELECT stopped_by IS NOT NULL FROM pgworkd.operations")
    assert await db.fetchval("SELECT count(*) FROM pgworkd.jobs WHERE status = 'pending'") == 500


@tells("/jobs/{job_id}/edit")
@tells("/jobs/{job_id}/replay")
async def one_job(seen: Seen, db: Db) -> None:
    job_id = await v.one(db, payload='{"to": "ann"}', run_at=v.at(3600))
    page = await seen.open(f"/jobs/{job_id}")
    await page.get_by_role("link", name="Edit").click()
    await expect(page.get_by_label("payload")).to_have_value('{\n  "to": "ann"\n}')
    await page.get_by_label("priority").fill("x")
    await page.get_by_label("payload").fill('{"to": "bob"}')
    await page.get_by_role("button", name="Save").click()
    await expect(page.get_by_role("alert")).to_contain_text("integer")
    await page.get_by_label("priority").fill("7")
    await press(page, "Save", "changed: payload, priority")
    row = await db.fetchrow("SELECT payload::text, priority, run_at > now() FROM pgworkd.jobs WHERE id = $1", job_id)
    assert tuple(row) == ('{"to": "bob"}', 7, True)
    await press(page, "Cancel", "1 job cancelled")
    await press(page, "Replay", f"this job is like {job_id}")
    (row,) = await db.fetch("SELECT id, payload::text, priority FROM pgworkd.jobs")
    assert tuple(row)[1:] == ('{"to": "bob"}', 7)
    await expect(page.locator("h1")).to_contain_text(str(row[0]))


@tells("/jobs/{job_id}/stack")
async def stacks(seen: Seen, db: Db) -> None:
    """A worker that is told by the database answers by SQL."""
    job_id, worker_id = await v.one(db), await v.worker(db, 3600, "w7")
    await v.claim(db, worker_id)
    page = await seen.open(f"/jobs/{job_id}")
    await press(page, "Show stack", "its worker is asked where it is")
    await expect(page.locator("main")).to_contain_text("It answers with its next heartbeat.")
    asked = await v.heartbeat(db, worker_id)
    assert asked is not None
    assert (asked["stack_ids"], asked["stack_attempts"]) == ([job_id], [1])
    answer = "SELECT pgworkd.answer_stack($1, 1, $2, $3, $4)"
    assert await db.fetchval(answer, job_id, worker_id, await v.token(db, worker_id), 'File "a.py", <b>line 7</b>\n')
    if not seen.scripts:  # else the open page follows
        page = await seen.open(f"/jobs/{job_id}")
    await expect(page.locator("pre", has_text='File "a.py", <b>line 7</b>')).to_be_visible()
    await expect(page.locator("main")).not_to_contain_text("It answers with its next heartbeat.")


@tells("/queues/{queue}/pause")
@tells("/queues/{queue}/resume")
async def pauses(seen: Seen, db: Db) -> None:
    await v.one(db)
    page = await seen.open("/queues")
    await page.get_by_role("link", name="Pause").click()
    await page.get_by_label("Pause for").select_option("1 h")
    await press(page, "Pause", "queue q is paused")
    until = "SELECT extract(epoch FROM paused_until - now())::int FROM pgworkd.queues"
    assert 3500 < await db.fetchval(until) <= 3600
    page = await seen.open("/queues")
    await press(page, "Resume", "queue q is resumed")
    assert await db.fetchval("SELECT paused_until FROM pgworkd.queues") is None


@tells("/queues/{queue}/settings")
@tells("/queues/{queue}/enqueue")
async def one_queue(seen: Seen, db: Db) -> None:
    await v.one(db)
    page = await seen.open("/queues/q")
    await page.get_by_role("link", name="Change settings").click()
    await page.get_by_label("max_running", exact=True).fill("-1")
    await page.get_by_label("rate", exact=True).fill("10/s")
    await page.get_by_role("button", name="Save").click()
    await expect(page.get_by_role("alert")).to_contain_text("max_running '-1': give a whole number")
    await page.get_by_label("max_running", exact=True).fill("5")
    await page.get_by_label("fair", exact=True).select_option("yes")
    await press(page, "Save", "3 settings of q changed")
    found = "SELECT max_running, rate, rate_period_s, fair FROM pgworkd.queues"
    assert tuple(await db.fetchrow(found)) == (5, 10, 1, True)
    await page.get_by_role("link", name="Change settings").click()
    await page.get_by_label("rate", exact=True).fill("")
    await press(page, "Save", "1 setting of q changed")
    assert tuple(await db.fetchrow(found)) == (5, None, None, True)
    await page.get_by_role("link", name="Enqueue a job").click()
    await page.get_by_label("kind").fill("mail")
    await page.get_by_label("payload").fill('{"amount": 1.10')
    await page.get_by_label("delay_s").fill("3600")
    await page.get_by_role("button", name="Enqueue").click()
    await expect(page.get_by_role("alert")).to_contain_text("JSON")
    await page.get_by_label("payload").fill('{"amount": 1.10}')
    await page.get_by_role("button", name="Enqueue").dblclick()
    await expect(page.get_by_role("status")).to_contain_text("enqueued")
    (row,) = await db.fetch(
        "SELECT kind, payload::text, run_at > now() + interval '3500 s' FROM pgworkd.jobs WHERE kind IS NOT NULL"
    )
    assert tuple(row) == ("mail", '{"amount": 1.10}', True)


@tells("/dead/{group}/{act}", "retry", "mute", "unmute")
async def dead(seen: Seen, db: Db) -> None:
    ids = await died(db, 3)
    page = await seen.open("/dead")
    await press(page, "Mute 24 h", "no alert about group")
    assert await db.fetchval("SELECT muted_until > now() + interval '23 h' FROM pgworkd.error_groups")
    await press(page, "Unmute", "are sent again")
    assert await db.fetchval("SELECT muted_until FROM pgworkd.error_groups") is None
    await press(page, "Retry", "3 jobs retried")
    assert await v.statuses(db, ids) == ["pending"] * 3


@tells("/batches/{batch_id}/{act}", "seal", "cancel", "delete")
async def batches(seen: Seen, db: Db) -> None:
    root = await b.batch(db, "payroll", "q")
    jobs = await b.add(db, root, 2)
    page = await seen.open(f"/batches/{root}")
    await press(page, "Seal", "the batch is sealed")
    assert await db.fetchval("SELECT sealed_at IS NOT NULL FROM pgworkd.batches")
    await press(page, "Cancel", "2 jobs cancelled")
    assert await db.fetchval("SELECT count(*) FROM pgworkd.jobs WHERE id = ANY ($1)", jobs) == 0
    await db.execute("SELECT pgworkd.apply_effects()")
    page = await seen.open(f"/batches/{root}")
    await press(page, "Delete", "1 batch deleted")
    assert await db.fetchval("SELECT count(*) FROM pgworkd.batches") == 0


@tells("/push/{name}/{act}", "enable", "disable")
async def push(seen: Seen, db: Db) -> None:
    await db.execute("INSERT INTO pgworkd.endpoints (name, url, unsigned) VALUES ('e', 'https://x.test/', true)")
    page = await seen.open("/push")
    await press(page, "Disable", "endpoint e is disabled")
    assert await db.fetchval("SELECT disabled_at IS NOT NULL FROM pgworkd.endpoints")
    await press(page, "Enable", "endpoint e is enabled")
    assert await db.fetchval("SELECT disabled_at FROM pgworkd.endpoints") is None


@tells("/schedules/{name}/{act}", "run", "enable", "disable", "remove")
@tells("/schedules/edit")
async def schedules(seen: Seen, db: Db) -> None:
    page = await seen.open("/schedules")
    await page.get_by_role("link", name="New schedule").click()
    for name, value in {"name": "nightly", "queue": "q", "cron": "30 7 * *", "payload": '{"a": 1}'}.items():
        await page.get_by_label(name, exact=True).fill(value)
    await page.get_by_role("button", name="Save").click()
    await expect(page.get_by_role("alert")).to_contain_text("cron")
    await page.get_by_label("cron", exact=True).fill("30 7 * * *")
    await press(page, "Save", "schedule nightly is saved")
    await page.get_by_role("link", name="Edit").click()
    await page.get_by_label("timezone", exact=True).fill("Europe/Berlin")
    await press(page, "Save", "schedule nightly is saved")
    row = await db.fetchrow("SELECT queue, cron, timezone, payload::text, enabled FROM pgworkd.schedules")
    assert tuple(row) == ("q", "30 7 * * *", "Europe/Berlin", '{"a": 1}', True)
    await press(page, "Disable", "nightly is disabled")
    assert not await db.fetchval("SELECT enabled FROM pgworkd.schedules")
    await press(page, "Enable", "nightly is enabled")
    assert await db.fetchval("SELECT enabled FROM pgworkd.schedules")
    await press(page, "Run now", "runs nightly now")
    assert json.loads(await db.fetchval("SELECT payload::text FROM pgworkd.jobs")) == {"a": 1}
    await press(page, "Remove", "nightly is removed")
    assert await db.fetchval("SELECT count(*) FROM pgworkd.schedules") == 0


@tells("/workers/{worker_id}/{act}", "quiet", "stop", "run")
async def workers(seen: Seen, db: Db) -> None:
    worker_id = await remote.registered(db, lease_s=3600)
    page = await seen.open("/workers")
    for label, said, asked in (
        ("Quiet", "claims nothing more", "quiet"),
        ("Stop", "ends", "stop"),
        ("Go on", "on", None),
    ):
        await press(page, label, f"worker {worker_id} ")
        await expect(page.get_by_role("status")).to_contain_text(said)
        assert await db.fetchval("SELECT requested FROM pgworkd.workers WHERE id = $1", worker_id) == asked


@tells("/keys/free")
async def keys(seen: Seen, db: Db) -> None:
    job_id = await v.one(db, dedupe_key="order 7", dedupe_until=v.at(86_400))
    await v.cancel(db, job_id)
    assert await db.fetchval("SELECT count(*) FROM pgworkd.kept_keys") == 1
    page = await seen.open("/keys")
    await press(page, "Free", "order 7")
    assert await db.fetchval("SELECT count(*) FROM pgworkd.kept_keys") == 0


@tells("/system/tokens")
@tells("/system/tokens/{token_id}/revoke")
async def tokens(seen: Seen, db: Db) -> None:
    page = await seen.open("/system")
    await page.get_by_label("For whom").fill("shop")
    await page.get_by_role("button", name="Add", exact=True).click()
    await expect(page.locator("h1")).to_have_text("The token of shop")
    assert (await page.locator("pre").inner_text()).startswith("pgw_")
    row = await db.fetchrow("SELECT name, scopes::text, revoked_at FROM pgworkd.tokens")
    assert tuple(row) == ("shop", '{"read": null}', None)
    await page.get_by_role("link", name="Back to System").click()
    await press(page, "Revoke", "revoked")
    assert await db.fetchval("SELECT revoked_at IS NOT NULL FROM pgworkd.tokens")


def test_each_act_has_a_story() -> None:
    told = {act for acts in STORIES.values() for act in acts} | SIGNING
    assert set(_acts()) == told
    assert len(told) > 25


@needs_chromium
@pytest.mark.slow("a browser")
@pytest.mark.parametrize("scripts", [True, False], ids=["scripts", "plain"])
@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.__name__)
async def test_acts_do_in_the_database_what_they_say(
    dsn: str, db: Db, browser: Browser, story: Story, *, scripts: bool
) -> None:
    with dashboard(dsn) as address:
        async with looking(browser, address, java_script_enabled=scripts) as seen:
            seen.page.on("dialog", lambda asked: asked.accept())
            await story(seen, db)
            seen.faults[:] = [each for each in seen.faults if "422" not in each]
