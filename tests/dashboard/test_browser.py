"""The pages in a browser: what is open follows the database, stands still while it is used, and works by keys alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import quote

import pytest
from playwright.async_api import Browser, Route, expect

from tests.kits import batches as b
from tests.kits import verbs as v
from tests.kits.browser import PAGES, browsing, dashboard, looking, needs_chromium
from tests.kits.gateway import served, token
from tests.kits.node import CLIENTS, MODULES, needs_packages
from tests.kits.pages import NASTY, filled
from tests.kits.verbs import Db

KEY = f"/keys?queue={quote(NASTY, safe='')}&key=running"
pytestmark = [needs_chromium, pytest.mark.slow("a browser")]


@pytest.fixture
async def browser() -> AsyncIterator[Browser]:
    async with browsing() as found:
        yield found


async def died(db: Db, *ids: Any) -> None:
    """Lets waiting jobs of q die."""
    worker_id = await v.worker(db, 3600)
    await v.claim(db, worker_id, 100)
    await v.fail(db, list(ids), permanent=True)


async def test_an_open_page_follows_the_database_but_not_under_the_hands_of_its_reader(
    dsn: str, db: Db, browser: Browser
) -> None:
    first = await v.one(db)
    with dashboard(dsn) as address:
        async with looking(browser, address) as seen:
            page = await seen.open(f"/jobs/{first}")
            await page.locator("#payload summary").click()  # closes it
            await expect(page.locator(".status").first).to_have_text("pending")
            await db.execute("SELECT pgworkd.cancel($1)", [first])
            await expect(page.locator(".status").first).to_have_text("cancelled")
            assert not await page.locator("#payload").evaluate("element => element.open"), "what was closed stays so"

            page = await seen.open("/jobs")
            await page.keyboard.press("/")
            await page.keyboard.type("half a na")
            second = await v.one(db)
            await page.wait_for_timeout(3000)  # a second is what an open page needs: three show that it stands still
            await expect(page.locator("input[data-search]")).to_have_value("half a na")
            await expect(page.locator(f"#row-{second}")).to_have_count(0)
            await page.locator("h1").click()
            third = await v.one(db)
            await expect(page.locator(f"#row-{third}")).to_have_count(1)
            await expect(page.locator(f"#row-{second}")).to_have_count(1)


async def test_news_make_no_other_act_of_a_button_that_is_being_pressed(dsn: str, db: Db, browser: Browser) -> None:
    """A batch finishes meanwhile, so that the page offers Delete where the mouse is down on Cancel: nothing is sent."""
    root, [job] = await b.sealed(db)
    with dashboard(dsn) as address:
        async with looking(browser, address) as seen:
            page = await seen.open(f"/batches/{root}")
            sent: list[str] = []
            page.on("dialog", lambda asked: asked.accept())
            page.on("request", lambda request: sent.append(request.method))
            await page.get_by_role("button", name="Cancel").hover()
            await page.mouse.down()
            await db.execute("SELECT pgworkd.cancel($1), pgworkd.apply_effects()", [job])
            await expect(page.get_by_role("button", name="Delete")).to_be_visible()
            async with asyncio.timeout(30):  # a question that is asked now would hold it up
                await page.mouse.up()
                await page.evaluate("new Promise(requestAnimationFrame)")
            assert "POST" not in sent
            assert await db.fetchval("SELECT count(*) FROM pgworkd.batches") == 1


async def test_dead_jobs_are_selected_and_retried_by_keys_alone(dsn: str, db: Db, browser: Browser) -> None:
    ids = await v.insert(db, 3)
    await died(db, *ids)
    with dashboard(dsn) as address:
        async with looking(browser, address) as seen:
            page = await seen.open("/jobs?queue=q&status=dead")
            for key in ("?", "Escape", "j", "x", "j", "j", "k", "x", "r"):
                await page.keyboard.press(key)
            await expect(page.get_by_role("status")).to_have_text("2 jobs retried")
            assert page.url == f"{address}/jobs?queue=q&status=dead", "the filter has survived"
            await expect(page.locator("tbody tr")).to_have_count(1)
            newest_first = sorted(ids, reverse=True)
            assert await v.statuses(db, newest_first) == ["pending", "pending", "dead"]
            await page.keyboard.press("j")
            await page.keyboard.press("Enter")
            await expect(page.locator("h1")).to_contain_text(str(newest_first[2]))


@pytest.mark.parametrize("name", [".", ".."])
async def test_a_queue_with_the_name_of_a_step_is_opened_and_followed(
    dsn: str, db: Db, browser: Browser, name: str
) -> None:
    await v.one(db, name)
    with dashboard(dsn) as address:
        async with looking(browser, address) as seen:
            page = await seen.open("/queues")
            await page.get_by_role("link", name=name, exact=True).click()
            await expect(page.locator("h1")).to_have_text(name)
            await page.get_by_label("Pause for").select_option("1 h")
            await page.get_by_role("button", name="Pause", exact=True).click()
            await expect(page.get_by_role("status")).to_have_text(f"queue {name} is paused")
            await v.one(db, name)
            await expect(page.locator("td.num").first).to_have_text("2")
    assert await db.fetchval("SELECT name FROM pgworkd.queues WHERE paused_until > now()") == name


@needs_packages
@pytest.mark.parametrize("theme", ["light", "dark"])
async def test_pages_are_read_by_everyone(dsn: str, db: Db, browser: Browser, theme: str) -> None:
    jobs = await filled(db)
    batch_id = await db.fetchval("SELECT id FROM pgworkd.batches")
    await died(db, *await v.insert(db, 3))
    forms = ["/queues/q/settings", "/queues/q/enqueue", f"/jobs/{jobs['pending']}/edit", "/schedules/edit"]
    axe = ((MODULES or CLIENTS) / "axe-core/axe.min.js").read_text()
    with dashboard(dsn) as address:
        for width in (360, 768, 1440):
            async with looking(browser, address, viewport={"width": width, "height": 900}, color_scheme=theme) as seen:
                shown = [
                    f"/batches/{batch_id}",
                    "/queues/q?span=24h",
                    KEY,
                    *(f"/jobs/{jobs[state]}" for state in ("dead", "pending")),
                ]
                for path in [*PAGES, *shown, *forms, "/sign-in"]:
                    page = await seen.open(path)
                    await page.evaluate("for (const each of document.querySelectorAll('details')) each.open = true")
                    await page.evaluate(axe)
                    tags = {"runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"]}
                    found = await page.evaluate("tags => axe.run(document, tags)", tags)
                    faults = [(each["id"], each["nodes"][0]["html"][:200]) for each in found["violations"]]
                    assert faults == [], (path, width)
                    overflow = await page.evaluate("document.documentElement.scrollWidth - innerWidth")
                    assert overflow <= 0, (path, width)


async def test_the_address_that_serve_prints_signs_in(dsn: str, browser: Browser) -> None:
    with served(dsn, "--with", "dashboard", PGWORKD_LOG_FORMAT="json") as (process, address):
        assert process.stdout is not None
        line = process.stdout.readline()
        once = line.partition("http://")[2].strip()
        async with looking(browser, address) as seen:
            page = await seen.page.goto(f"http://{once}")
            assert page is not None
            await expect(seen.page.locator("h1")).to_have_text("Overview")


async def test_a_double_press_on_add_shows_the_token(dsn: str, db: Db, browser: Browser) -> None:
    with dashboard(dsn) as address:
        async with looking(browser, address) as seen:
            page = await seen.open("/system")
            await page.get_by_label("For whom").fill("shop")
            goes_on = asyncio.Event()

            async def held(route: Route) -> None:
                await goes_on.wait()
                await route.continue_()

            await page.route("**/system/tokens", held)
            press_twice = """button => new Promise((tell) => {
                const found = [];
                window.addEventListener("submit", (event) => found.push(event.defaultPrevented));
                button.click();
                setTimeout(() => { button.click(); tell(found); });
            })"""
            pressed = await page.get_by_role("button", name="Add", exact=True).evaluate(press_twice)
            assert pressed == [False, True], "while the form is on its way, it is not sent again"
            goes_on.set()
            await expect(page.locator("pre")).to_contain_text("pgw_")
            await page.go_back()
            await page.get_by_label("For whom").fill("bank")
            await page.get_by_role("button", name="Add", exact=True).click()
            await expect(page.locator("h1")).to_have_text("The token of bank")
    assert await db.fetchval("SELECT string_agg(name, ' ' ORDER BY name) FROM pgworkd.tokens") == "bank shop"


@pytest.mark.parametrize("scripts", [True, False])
async def test_who_signs_in_has_a_cookie_until_signing_out(dsn: str, browser: Browser, *, scripts: bool) -> None:
    with served(dsn, "--with", "dashboard") as (_, address):
        async with looking(browser, address, java_script_enabled=scripts) as seen:
            page = await seen.open("/queues")
            await page.get_by_label("Token").fill(await token(dsn))
            await page.get_by_role("button", name="Sign in").click()
            await expect(page.locator("h1")).to_have_text("Queues")
            await page.get_by_role("button", name="Colours").click()
            await expect(page.locator("html")).to_have_attribute("data-theme", "dark")
            await page.get_by_role("button", name="Sign out").click()
            await expect(page.locator("h1")).to_have_text("Sign in")
            page = await seen.open("/queues")
            await expect(page.locator("h1")).to_have_text("Sign in")
