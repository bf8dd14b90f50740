"""A page of the user's own in the overview: browsers load frames from that origin only, and from none without it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from playwright.async_api import Browser, Route, expect

from pgworkd.core.address import frame_origin
from pgworkd.errors import UsageError
from pgworkd.settings.config import load
from tests.kits import verbs as v
from tests.kits.browser import browsing, dashboard, looking, needs_chromium
from tests.kits.pages import viewing
from tests.kits.verbs import Db

URL = "https://metrics.test:8443/d/jobs?orgId=1&panel='2'#x"


@pytest.fixture
async def browser() -> AsyncIterator[Browser]:
    async with browsing() as found:
        yield found


@pytest.mark.parametrize(
    ("url", "origin"),
    [
        (URL, "https://metrics.test:8443"),
        ("http://127.0.0.1:3000", "http://127.0.0.1:3000"),
        ("HTTPS://Metrics.test/", "https://metrics.test"),
    ],
)
def test_the_policy_names_the_origin_of_a_frame(url: str, origin: str) -> None:
    assert frame_origin(url) == origin
    assert load(http_frame_url=url).http_frame_url == url


@pytest.mark.parametrize(
    "wrong",
    [
        "metrics.test",
        "javascript:alert(1)",
        "data:text/html,x",
        "//metrics.test",
        "https://",
        "https://*/x",
        "https://a b/",
        "https://a.test; script-src *",
        "https://a.test/\nX-Evil: 1",
        'https://a.test/"onload=',
        "https://a.test:0/",
        "https://a.test:99999/",
        "https://[::1]/",
        "https://a.test/" + "x" * 10_000,
    ],
)
async def test_a_wrong_address_is_refused_at_the_start(dsn: str, wrong: str) -> None:
    with pytest.raises(UsageError, match=r"http_frame_url .*must be the address of a page to embed"):
        load(http_frame_url=wrong)
    with pytest.raises(UsageError, match="frame_url must be the address"):
        async with viewing(dsn, frame_url=wrong):
            pass


def test_an_address_with_a_password_is_refused_and_not_repeated() -> None:
    with pytest.raises(UsageError, match="must not contain a password") as raised:
        load(http_frame_url="https://ann:s3cr3t@a.test/")
    assert "s3cr3t" not in str(raised.value)


async def test_only_the_overview_has_the_frame_and_only_where_it_is_wanted(dsn: str) -> None:
    for url, policy in ((None, []), (URL, ["frame-src https://metrics.test:8443"])):
        async with viewing(dsn, frame_url=url) as client:
            for path in ("/", "/queues", "/jobs"):
                page = await client.get(path)
                parts = [each.strip() for each in page.headers["content-security-policy"].split(";")]
                wanted = policy if path == "/" else []
                assert [each for each in parts if each.startswith("frame-src")] == wanted, path
                assert parts[0] == "default-src 'none'"
                assert page.text.count("<iframe") == len(wanted)
                assert ("https://metrics.test:8443/d/jobs?orgId=1&amp;panel=&#39;2&#39;#x" in page.text) == bool(wanted)
                assert "<iframe" not in page.text.partition("<main")[2].partition("</main>")[0]


@needs_chromium
@pytest.mark.slow("a browser")
@pytest.mark.parametrize("scripts", [True, False])
async def test_a_browser_shows_the_frame_and_no_page_of_others_in_it(
    dsn: str, db: Db, browser: Browser, *, scripts: bool
) -> None:
    came = []

    async def answer(route: Route) -> None:
        came.append(route.request.url)
        body = '<p>our graph</p><a href="https://evil.test/">evil</a>'
        await route.fulfill(status=200, content_type="text/html", body=body)

    with dashboard(dsn, "--frame-url", "https://metrics.test/d") as address:
        async with looking(browser, address, java_script_enabled=scripts) as seen:
            await seen.page.route("https://*.test/**", answer)
            page = await seen.open("/")
            frame = page.frame_locator("iframe")
            await page.locator("iframe").scroll_into_view_if_needed()
            await expect(frame.locator("p")).to_have_text("our graph")
            assert seen.faults == ["https://metrics.test/d"], "a request to another host, which is the wanted one"
            if scripts:
                await v.one(db, "shown-while-open")
                await expect(page.locator("main")).to_contain_text("shown-while-open")
            async with page.expect_console_message(lambda said: "frame-src" in said.text):
                await frame.locator("a").click()
            assert came == ["https://metrics.test/d"], "it is loaded once, and no other page in its place"
            seen.faults.clear()
