"""What pages load: nothing that others have written differs from what they have published."""

from __future__ import annotations

import hashlib
import tomllib
from pathlib import Path

import httpx
import pytest

from pgworkd import dashboard
from pgworkd.dashboard import render
from tests.kits.node import MODULES, needs_packages
from tests.kits.pages import viewing

STATIC = Path(dashboard.__file__).parent / "static"
VENDOR = tomllib.loads((STATIC / "vendor/vendor.toml").read_text())


def test_each_file_of_others_is_named_with_its_digest() -> None:
    named = {name: digest for each in VENDOR.values() for name, digest in each["sha256"].items()}
    found = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in (STATIC / "vendor").glob("*.js")}
    assert found == named


@needs_packages
def test_each_file_of_others_is_that_of_its_package() -> None:
    for each in VENDOR.values():
        for name, place in each["files"].items():
            published = ((MODULES or STATIC) / each["package"] / place).read_bytes()
            assert (STATIC / "vendor" / name).read_bytes() == published


def test_pages_weigh_little() -> None:
    loaded = [path for path in STATIC.rglob("*") if path.suffix in (".js", ".css", ".svg")]
    assert sum(path.stat().st_size for path in loaded) < 100_000


@pytest.mark.parametrize("name", ["../render.py", "..%2Frender.py", "vendor", "nothing.css", ""])
async def test_nothing_else_is_served(dsn: str, name: str) -> None:
    async with viewing(dsn) as client:
        assert (await client.get(f"/static/{name}")).status_code == 404


async def test_a_file_is_kept_by_browsers_for_as_long_as_it_is_the_same(dsn: str) -> None:
    async with viewing(dsn) as client:

        async def kept(path: str) -> httpx.Response:
            answer = await client.get(path)
            assert answer.status_code == 200
            assert answer.headers["x-content-type-options"] == "nosniff"
            return answer

        page = await kept("/")
        assert page.headers["cache-control"] == "no-store"
        found = render.file("dashboard.css")
        assert found is not None
        assert f"/static/dashboard.css?v={found.version}" in page.text
        assert "immutable" in (await kept(f"/static/dashboard.css?v={found.version}")).headers["cache-control"]
        assert (await kept("/static/dashboard.css?v=old")).headers["cache-control"] == "no-cache"
        assert "htmx" in (await kept("/static/vendor/htmx.min.js")).text
