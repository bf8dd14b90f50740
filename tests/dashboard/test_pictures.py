"""The pictures of pages in README and docs: taken of the pages as they are, small, and for both themes."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from tests.kits import shop
from tests.kits.browser import browsing, dashboard, needs_chromium
from tests.kits.docs import ROOT
from tests.kits.verbs import Db

FILES = sorted(f"{name}-{theme}.png" for name in shop.PAGES for theme in shop.THEMES)


def size_of(path: Path) -> tuple[int, int]:
    """Width and height of a PNG, which stand in its head."""
    head = path.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", head[16:24])
    return width, height


def test_each_is_there_small_and_on_a_page_in_both_themes() -> None:
    assert sorted(path.name for path in shop.INTO.iterdir()) == FILES
    shown = (ROOT / "README.md").read_text() + (ROOT / "docs/dashboard.md").read_text()
    for name in FILES:
        path = shop.INTO / name
        assert path.stat().st_size <= shop.BYTES_MAX, name
        assert size_of(path) == (shop.SIZE["width"], shop.SIZE["height"])
        assert f"pages/{name}" in shown


@needs_chromium
@pytest.mark.slow("a browser")
async def test_they_can_be_taken_anew(dsn: str, db: Db, tmp_path: Path) -> None:
    with dashboard(dsn) as address:
        async with browsing() as browser:
            taken = await shop.take(db, browser, address, tmp_path)
    assert sorted(path.name for path in taken) == FILES
    for path in taken:
        assert path.stat().st_size <= shop.BYTES_MAX, path.name
