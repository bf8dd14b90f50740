"""`pgworkd run` whose metrics are watched over HTTP, and the jobs that it gets."""

from __future__ import annotations

import time
from pathlib import Path

from tests.kits.commands import Start, database
from tests.kits.metrics import Page, address_of, fell, fetch, total

APP = """
import os, signal, time
import anyio
from pgworkd import App

app = App()

@app.handler("mail", concurrency=3)
async def mail(payload: dict) -> None:
    if payload.get("fails"):
        raise ValueError("no")

@app.handler("block")
async def block(payload: dict) -> None:
    until = time.monotonic() + payload["seconds"]
    while time.monotonic() < until:
        pass

@app.handler("hang")
async def hang() -> None:
    await anyio.sleep_forever()

@app.handler("die", max_attempts=1)
async def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)

@app.handler("freeze")
async def freeze() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)
"""
ASK = """
import pathlib, sys

@app.handler("ask")
async def ask() -> None:
    pathlib.Path("found").write_text(repr(%s))
"""
LISTEN = ("--metrics-listen", "127.0.0.1:0")


def serve(start: Start, tmp_path: Path, dsn: str, *args: str, text: str = APP, **environ: str) -> str:
    """Starts daemons; the address of their metrics."""
    (tmp_path / "watched.py").write_text(text)
    run = start(
        "run",
        "--app=watched:app",
        "--poll-s=0.05",
        *LISTEN,
        *args,
        **{"PGWORKD_DSN": dsn, "PGWORKD_LOG_FORMAT": "json"} | environ,
    )
    return address_of(run)


def ready(address: str) -> bool:
    return fetch(address, "/readyz").status == 200


def insert(dsn: str, queue: str, count: int = 1, payload: str = "{}") -> None:
    with database(dsn) as db:
        sql = "INSERT INTO pgworkd.jobs (queue, payload) SELECT %s, %s::jsonb FROM generate_series(1, %s)"
        db.execute(sql, (queue, payload, count))


def finished(page: Page, outcome: str = "completed", **labels: str) -> float:
    return total(page, "pgworkd_jobs_finished_total", outcome=outcome, **labels)


def until_finished(address: str, count: int, outcome: str = "completed") -> Page:
    """Waits until so many jobs have ended; the page that says so. No page on the way has a total that fell."""
    pages = [fetch(address).page]
    while finished(pages[-1], outcome) < count:
        assert len(pages) < 500, finished(pages[-1], outcome)
        time.sleep(0.05)
        pages.append(fetch(address).page)
        assert not fell(pages[-2], pages[-1])
    return pages[-1]
