"""An open page that does not follow the database any more says so, and why; and follows it again afterwards."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator

import anyio
import asyncpg
import pytest
from playwright.async_api import Browser, Page, Route, expect

from pgworkd.admin import Admin
from pgworkd.database import schema
from pgworkd.database.connection import ConnectionOptions
from tests.kits import verbs as v
from tests.kits.browser import Seen, browsing, dashboard, looking, needs_chromium
from tests.kits.gateway import served, token
from tests.kits.server import create_database, create_template, start_test_server
from tests.kits.verbs import Db

pytestmark = [needs_chromium, pytest.mark.slow("a browser")]
TOLD_MS = 15_000
"""Within this time an open page says that it is not up to date."""
SILENT_MS = 60_000
"""And this long after the last sign of a gateway that has kept the connection and is silent."""


@pytest.fixture
async def browser() -> AsyncIterator[Browser]:
    async with browsing() as found:
        yield found


async def open_jobs(seen: Seen, db: Db) -> Page:
    """The list of jobs, which follows the database."""
    page = await seen.open("/jobs")
    await follows(page, db)
    return page


async def follows(page: Page, db: Db) -> None:
    """A new job comes onto the page, which does not say that it is stale."""
    job_id = await v.one(db)
    await expect(page.locator(f"#row-{job_id}")).to_have_count(1)
    await expect(page.locator("#stale")).to_be_hidden()
    assert not await page.evaluate("document.body.classList.contains('stale')")


async def says(page: Page, why: str, limit_ms: float = TOLD_MS) -> None:
    """The page says that it is stale, and keeps what it has shown."""
    await expect(page.locator("#stale")).to_contain_text(f"Not up to date: {why}", timeout=limit_ms)
    await expect(page.locator("body")).to_have_class("stale")
    await expect(page.locator("tr[id^=row-]")).not_to_have_count(0)


async def test_while_the_database_is_stopped(request: pytest.FixtureRequest, browser: Browser) -> None:
    server = start_test_server(request.config.getoption("--pg-bin"))
    try:
        await create_template(server.dsn(), schema.text())
        dsn = await create_database(server.dsn(), "stale")
        db = await asyncpg.connect(dsn)
        with dashboard(dsn) as address:
            async with looking(browser, address) as seen:
                page = await open_jobs(seen, db)
                db.terminate()
                await anyio.to_thread.run_sync(server.kill)
                await says(page, "The database is unavailable")
                await anyio.to_thread.run_sync(server.start)
                db = await asyncpg.connect(dsn)
                await follows(page, db)
                db.terminate()
    finally:
        server.stop("immediate")


async def test_while_the_gateway_is_gone(dsn: str, db: Db, browser: Browser) -> None:
    with served(dsn, "--with", "dashboard", "--auth", "none") as (process, address):
        async with looking(browser, address) as seen:
            page = await open_jobs(seen, db)
            process.kill()
            process.wait()
            await says(page, "the gateway does not answer")
            with served(dsn, "--with", "dashboard", "--auth", "none", listen=address.removeprefix("http://")):
                await follows(page, db)
            known = ("Failed to load resource", "htmx:sse:error")
            seen.faults[:] = [each for each in seen.faults if not any(text in each for text in known)]


async def test_while_the_gateway_is_silent(dsn: str, db: Db, browser: Browser) -> None:
    with served(dsn, "--with", "dashboard", "--auth", "none") as (process, address):
        async with looking(browser, address) as seen:
            page = await open_jobs(seen, db)
            process.send_signal(signal.SIGSTOP)
            try:
                await says(page, "the gateway says nothing", SILENT_MS)
            finally:
                process.send_signal(signal.SIGCONT)
            await follows(page, db)


@pytest.mark.parametrize("status", [503, 0])
async def test_while_a_page_is_refused_its_first_news(dsn: str, db: Db, browser: Browser, status: int) -> None:
    refused = [True]

    async def answer(route: Route) -> None:
        if "event-stream" not in route.request.headers.get("accept", "") or not refused[0]:
            await route.continue_()
        elif status:
            await route.fulfill(status=status, content_type="text/html", body="<h1>Too many wait</h1>")
        else:
            await route.abort()

    await v.one(db)
    with dashboard(dsn) as address:
        async with looking(browser, address) as seen:
            await seen.page.route("**/jobs", answer)
            page = await seen.open("/jobs")
            await says(page, "the gateway answers 503" if status else "the gateway does not answer")
            await expect(page.locator("h1")).to_have_text("Jobs")
            refused[0] = False
            await follows(page, db)
            known = ("Failed to load resource", "htmx:error")
            seen.faults[:] = [each for each in seen.faults if not any(text in each for text in known)]


async def test_who_is_signed_out_meanwhile_is_asked_to_sign_in_and_led_back(dsn: str, db: Db, browser: Browser) -> None:
    async def sign_in(page: Page) -> str:
        mine = await token(dsn, {"read": None})
        await page.get_by_label("Token").fill(mine)
        await page.get_by_role("button", name="Sign in").click()
        return mine

    with served(dsn, "--with", "dashboard") as (_, address):
        async with looking(browser, address) as seen:
            page = await seen.open("/jobs?queue=q")
            mine = await sign_in(page)
            await follows(page, db)
            async with Admin(ConnectionOptions(dsn)) as admin:
                await admin.tokens.revoke(mine.split("_")[1])
            await expect(page.locator("h1")).to_have_text("Sign in", timeout=2 * TOLD_MS)
            await sign_in(page)
            await follows(page, db)
            assert page.url == f"{address}/jobs?queue=q"
            seen.faults[:] = [each for each in seen.faults if "401" not in each]
