"""A shop's database as an operator might find it, and the pictures of pages in README and docs that are taken of it.

python -m tests.kits.shop    # takes the pictures anew
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import sys
from pathlib import Path
from uuid import UUID

import asyncpg
from playwright.async_api import Browser

from pgworkd.database import schema
from tests.kits import batches as b
from tests.kits import verbs as v
from tests.kits.browser import browsing, dashboard, looking
from tests.kits.server import create_database, create_template, start_test_server
from tests.kits.verbs import Db

INTO = Path(__file__).parents[2] / "docs" / "pages"
THEMES = ("light", "dark")
SIZE = {"width": 1200, "height": 760}
BYTES_MAX = 150_000
PAGES = {"overview": "/", "job": "/jobs/{job}", "queue": "/queues/invoices"}
"""The pages of which there is a picture in each theme, by its name."""
QUEUES = {"invoices": (6, 4), "mail": (90, 20), "reports": (2, 2), "thumbnails": (40, 8)}
"""Queues, each with the jobs that it completes in a minute, and the slots of a worker."""
TRACEBACK = """Traceback (most recent call last):
  File "/srv/shop/{module}.py", line 41, in {function}
"""
PLACES = {"HTTPStatusError": ("invoices", "send_invoice"), "UnidentifiedImageError": ("images", "thumbnail")}


async def filled(db: Db) -> UUID:
    """Fills the database; a job that waits for its retry."""
    workers = [await v.worker(db, 3600, name) for name in ("shop-1", "shop-2")]
    for queue, (_, slots) in QUEUES.items():
        for worker in workers:
            await db.execute("SELECT pgworkd.set_pool($1, $2, $3, true)", worker, queue, slots)
        await _history(db, queue)
    await v.insert(db, 4, "mail", payload='{"template": "welcome"}')
    await v.insert(db, 3, "reports")
    await db.execute("SELECT pgworkd.set_queue('reports', '{\"max_running\": 2}')")
    await db.execute("UPDATE pgworkd.queues SET paused_until = now() + interval '40 min' WHERE name = 'reports'")
    await db.execute(
        """INSERT INTO pgworkd.schedules (name, queue, cron, timezone, payload)
        VALUES ('month end', 'reports', '0 6 1 * *', 'Europe/Berlin', '{}')"""
    )
    await _die(db, workers[0], 23, "invoices", "HTTPStatusError", "Client error '422 Unprocessable Entity' for url")
    await _die(db, workers[0], 7, "thumbnails", "UnidentifiedImageError", "cannot identify image file 'upload-7.bin'")
    job = await _retried(db, workers[1])
    for queue, count in (("mail", 3), ("thumbnails", 5)):
        await v.insert(db, count, queue)
        await v.claim(db, workers[1], count, queue)
    root = await b.batch(db, "month end", "reports")
    await b.add(db, root, 40)
    await db.execute("SELECT pgworkd.apply_effects(), pgworkd.count_deaths()")
    return job


async def _history(db: Db, queue: str) -> None:
    rate, dice = QUEUES[queue][0], random.Random(queue)  # noqa: S311 - the same each time
    for minute in range(70):
        done = int(rate * (1 + 0.3 * math.sin(minute / 11) + 0.3 * dice.random()))
        waits, runs = [0] * 72, [0] * 72
        for counts, usual in ((waits, 12), (runs, 22)):
            for _ in range(done):
                counts[int(dice.gauss(usual, 3))] += 1
        await db.execute(
            """INSERT INTO pgworkd.queue_minutes (at, period_s, queue, kind, started, completed, failed, dead, released,
                waits, runs, wait_s, run_s)
            VALUES (now() - $1::int * interval '1 min', 60, $2, $2, $3, $3, $4, $5, 0, $6, $7, 1, 4)""",
            minute,
            queue,
            done,
            int(done * dice.random() / 8),
            int(queue == "invoices" and minute < 20),
            waits,
            runs,
        )


async def _die(db: Db, worker: int, count: int, queue: str, error_type: str, message: str) -> None:
    ids = await v.insert(db, count, queue)
    await v.claim(db, worker, count, queue)
    await _fail(db, ids, 1, error_type, message, permanent=True)


async def _fail(
    db: Db, ids: list[UUID], attempt: int, error_type: str, message: str, *, permanent: bool = False
) -> None:
    module, function = PLACES[error_type]
    traceback = TRACEBACK.format(module=module, function=function) + f"{error_type}: {message}"
    entry = {"type": error_type, "message": message, "traceback": traceback, "worker": "shop-1"}
    await db.fetch(
        "SELECT * FROM pgworkd.settle_failed($1, $2, $3, $4, $5, $6)",
        ids,
        [attempt] * len(ids),
        [600.0] * len(ids),
        [permanent] * len(ids),
        [f"{error_type}: {message}"] * len(ids),
        [json.dumps(entry)] * len(ids),
    )


async def _retried(db: Db, worker: int) -> UUID:
    """A job that has failed twice, and waits; behind it waits another one of its key."""
    given = {"payload": '{"invoice": 4711, "customer": "ada@example.com"}', "serialize_key": "customer 4711"}
    job = await v.one(db, "invoices", **given, max_attempts=5)
    await v.one(db, "invoices", serialize_key="customer 4711")
    for attempt in (1, 2):
        await v.claim(db, worker, 1, "invoices")
        await _fail(db, [job], attempt, "HTTPStatusError", "Server error '503 Service Unavailable' for url")
        if attempt == 1:
            await db.execute("UPDATE pgworkd.jobs SET run_at = now() WHERE id = $1", job)
    await db.execute(
        """UPDATE pgworkd.jobs SET created_at = created_at - interval '20 min', errors = (
            SELECT jsonb_agg(e || jsonb_build_object('at', now() - (7 - 5 * n) * interval '1 min') ORDER BY n)
            FROM jsonb_array_elements(errors) WITH ORDINALITY AS x (e, n)) WHERE id = $1""",
        job,
    )
    return job


async def take(db: Db, browser: Browser, address: str, into: Path) -> list[Path]:
    """Takes the pictures of a database that is filled here; their files."""
    job, taken = await filled(db), []
    for theme in THEMES:
        async with looking(browser, address, viewport=SIZE, color_scheme=theme) as seen:
            for name, path in PAGES.items():
                page = await seen.open(path.format(job=job))
                await page.locator("h1").wait_for()
                taken.append(into / f"{name}-{theme}.png")
                await page.screenshot(path=taken[-1])
    return taken


async def _main(server_dsn: str) -> None:
    await create_template(server_dsn, schema.text())
    dsn = await create_database(server_dsn, "shop")
    db = await asyncpg.connect(dsn)
    with dashboard(dsn) as address:
        async with browsing() as browser:
            for path in await take(db, browser, address, INTO):
                sys.stdout.write(f"{path.name}: {path.stat().st_size:,} bytes\n")
    await db.close()


if __name__ == "__main__":
    server = start_test_server(None)
    try:
        asyncio.run(_main(server.dsn()))
    finally:
        server.stop("immediate")
