"""Debian's chromium, driven by playwright; and gateways whose pages it opens."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from playwright.async_api import Browser, Page, async_playwright, expect

from tests.kits.gateway import served

CHROMIUM = shutil.which("chromium")
FLAGS = """
    --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking
    --disable-component-update --disable-sync
""".split()
expect.set_options(timeout=30_000)  # of a busy machine
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium: apt-get install chromium")


@dataclass
class Seen:
    """A page, and all that went wrong on it."""

    page: Page
    address: str
    faults: list[str] = field(default_factory=list)
    scripts: bool = True

    async def open(self, path: str) -> Page:
        """Opens a page of the dashboard."""
        await self.page.goto(self.address + path)
        return self.page


@contextlib.asynccontextmanager
async def browsing() -> AsyncIterator[Browser]:
    """A browser."""
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        try:
            yield browser
        finally:
            await browser.close()


@contextlib.asynccontextmanager
async def looking(browser: Browser, address: str, **context: Any) -> AsyncIterator[Seen]:
    """A page in a context of its own; at the end nothing may have gone wrong: no error, no request to another host."""
    options = {"viewport": {"width": 1440, "height": 900}, "color_scheme": "light"} | context
    async with await browser.new_context(**options) as opened:
        page = await opened.new_page()
        seen = Seen(page, address, scripts=options.get("java_script_enabled", True))
        page.on("console", lambda said: seen.faults.append(said.text) if said.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: seen.faults.append(str(error)))
        page.on(
            "request", lambda made: None if made.url.startswith((address, "data:")) else seen.faults.append(made.url)
        )
        yield seen
        assert seen.faults == []


@contextlib.contextmanager
def dashboard(dsn: str, *flags: str, **environ: str) -> Iterator[str]:
    """The address of a gateway in a process of its own, which serves the dashboard to anyone."""
    with served(dsn, "--with", "dashboard", "--auth", "none", *flags, **environ) as (_, address):
        yield address


PAGES: Sequence[str] = (
    "/ /queues /jobs /dead /batches /schedules /workers /push /audit /keys /system /operations".split()
)
