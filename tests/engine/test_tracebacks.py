"""What is shown of an error begins where the handler does."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import asyncpg
from pydantic import BaseModel

from pgworkd import App
from tests.kits.daemon import insert, running, until
from tests.kits.decorators import plain


class Note(BaseModel):
    note: int


def in_thread(payload: dict[str, Any]) -> None:
    _fail()


async def in_loop(payload: dict[str, Any]) -> None:
    _fail()


def hidden(payload: dict[str, Any]) -> Any:
    return in_loop(payload)


async def with_a_cause(payload: dict[str, Any]) -> None:
    try:
        _fail()
    except ZeroDivisionError as error:
        raise ValueError("no") from error


def _fail() -> None:
    raise ZeroDivisionError("mine")


async def never(note: Note) -> None:
    raise AssertionError("reached")


HANDLERS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "loop": (in_loop, {}),
    "timed": (in_loop, {"timeout_s": 60}),
    "thread": (in_thread, {}),
    "process": (in_thread, {"run_in": "process"}),
    "decorated": (plain(in_loop), {}),
    "hidden": (hidden, {}),
    "cause": (with_a_cause, {}),
}


async def test_a_traceback_begins_with_a_frame_of_the_application(dsn: str, db: asyncpg.Connection[Any]) -> None:
    app = App()
    for kind, (handle, options) in HANDLERS.items():
        app.handler(kind, queue="q", max_attempts=1, **options)(handle)
    app.handler("payload", queue="q", max_attempts=1)(never)
    async with running(app, dsn):
        for kind in app.handlers:
            await insert(db, "q", kind=kind)
        await until(
            lambda: db.fetchval("SELECT count(*) = $1 FROM pgworkd.jobs WHERE status = 'dead'", len(app.handlers))
        )
    found = {
        row["kind"]: json.loads(row["e"])["traceback"]
        for row in await db.fetch("SELECT kind, (errors -> -1)::text AS e FROM pgworkd.jobs")
    }
    for kind, shown in found.items():
        lines = shown.splitlines()
        if kind == "payload":
            assert "pgworkd/engine" not in shown
            continue
        assert lines[0] == "Traceback (most recent call last):", kind
        assert "/tests/" in lines[1], (kind, lines[1])
        assert "/pgworkd/" not in shown, kind
        assert "ZeroDivisionError: mine" in shown
