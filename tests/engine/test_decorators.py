"""Handlers below decorators run as if there were none, or are refused with what to do; no job dies with a riddle."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from typing import Any

import anyio
import asyncpg
import pytest

from pgworkd import App, Job
from pgworkd.core import events
from pgworkd.core.job import Reason
from tests.kits import decorators
from tests.kits.daemon import insert, running, until, waits_for_status
from tests.kits.decorators import CONNECTION, PASSING

ENDED = "SELECT count(*) = $1 FROM pgworkd.all_jobs WHERE status IN ('dead', 'completed')"


async def in_loop(payload: dict[str, Any], job: Job) -> list[Any]:
    await asyncio.sleep(0)
    return [payload["n"], job.attempt, threading.get_ident()]


def in_thread(payload: dict[str, Any], job: Job) -> list[Any]:
    return [payload["n"], job.attempt, threading.get_ident()]


class OfClass:
    async def method(self, payload: dict[str, Any], job: Job) -> list[Any]:
        return await in_loop(payload, job)

    async def __call__(self, payload: dict[str, Any], job: Job) -> list[Any]:
        return await in_loop(payload, job)


BELOW: dict[str, Callable[..., Any]] = {
    "async def": in_loop,
    "def": in_thread,
    "method": OfClass().method,
    "object": OfClass(),
}
PAIRS = [
    (name, below)
    for name in PASSING
    for below in BELOW
    if not (name == "static" and below != "async def")  # of a class' own functions only
    and not (below in ("method", "object") and name.startswith("prometheus"))  # its decorators take functions only
]


async def ends(
    dsn: str,
    db: asyncpg.Connection[Any],
    handlers: dict[str, Callable[..., Any]],
    payload: str = '{"n": 7}',
    **more: Any,
) -> dict[str, Any]:
    """By kind: what the only job of each handler returned, or the error of which it died."""
    app = App()
    for kind, handle in handlers.items():
        app.handler(kind, queue="q", max_attempts=1, **more)(handle)
    async with running(app, dsn):
        for kind in handlers:
            await insert(db, "q", payload, kind=kind)
        await until(lambda: db.fetchval(ENDED, len(handlers)))
    rows = await db.fetch("SELECT kind, status::text, result, error FROM pgworkd.all_jobs")
    return {
        row["kind"]: json.loads(row["result"] or "null") if row["status"] == "completed" else row["error"]
        for row in rows
    }


async def test_a_handler_below_a_decorator_runs(dsn: str, db: asyncpg.Connection[Any]) -> None:
    found = await ends(dsn, db, {f"{name}, {below}": PASSING[name](BELOW[below]) for name, below in PAIRS})
    assert {kind: end for kind, end in found.items() if end[:2] != [7, 1]} == {}
    elsewhere = {kind for kind, end in found.items() if end[2] != threading.get_ident()}
    assert elsewhere <= {f"{name}, def" for name in PASSING}, "an `async def` always runs in the loop"


async def test_a_decorator_may_return_a_result_at_once(dsn: str, db: asyncpg.Connection[Any]) -> None:
    found = await ends(dsn, db, {"q": decorators.cached(in_loop)}, '{"n": 8, "known": true}')
    assert found == {"q": 8}


async def test_a_decorated_coroutine_may_write_in_the_transaction_of_its_job(
    dsn: str, db: asyncpg.Connection[Any]
) -> None:
    async def handle(payload: dict[str, Any], job: Job) -> None:
        async with job.transaction() as connection:
            job.result = await connection.fetchval("SELECT 7")

    names = ("plain", "by_name", "plain twice")
    assert await ends(dsn, db, {name: PASSING[name](handle) for name in names}) == dict.fromkeys(names, 7)


@pytest.mark.parametrize("name", ["plain", "by_name"])
@pytest.mark.parametrize("how", ["timeout", "cancel", "stop"])
async def test_a_decorated_coroutine_can_be_ended(
    dsn: str, db: asyncpg.Connection[Any], name: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pgworkd.engine.settle.job_events.CHECK_S", 0.02)
    began, cleaned = anyio.Event(), anyio.Event()

    async def handle(payload: dict[str, Any], job: Job) -> None:
        began.set()
        try:
            await anyio.sleep_forever()
        finally:
            cleaned.set()

    app = App()
    app.handler("q", timeout_s=0.2 if how == "timeout" else None, max_attempts=3)(PASSING[name](handle))
    async with running(app, dsn, shutdown_s=0.0) as (daemon, seen):
        job = await insert(db, "q")
        await until(began.is_set)
        if how == "cancel":
            await db.execute("SELECT pgworkd.cancel(ARRAY[$1::uuid])", job)
        if how == "stop":
            daemon.request_stop()
        await until(cleaned.is_set)
        await until(waits_for_status(db, job, {"timeout": "failed", "cancel": "cancelled", "stop": "pending"}[how]))
        if how == "stop":
            assert (await seen.wait(events.JOB_RELEASED))["reason"] == Reason.SHUTDOWN.value


async def test_a_stop_that_comes_before_the_coroutine_ends_it(dsn: str, db: asyncpg.Connection[Any]) -> None:
    """The decorator, in its thread, takes so long that the job has to end before the coroutine has begun."""
    entered, go, ended = threading.Event(), threading.Event(), anyio.Event()

    async def handle() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            ended.set()

    def slow(job: Job) -> Any:
        entered.set()
        go.wait(20)
        return handle()

    app = App()
    app.handler("q")(slow)
    async with running(app, dsn, shutdown_s=0.0) as (daemon, seen):
        await insert(db, "q")
        await until(entered.is_set)
        daemon.request_stop()
        await until(lambda: [each.reason for each in daemon.in_flight] == [Reason.SHUTDOWN])
        go.set()
        await seen.wait(events.DAEMON_STOPPED)
    assert ended.is_set()
    assert seen.all(events.SHUTDOWN_INCOMPLETE) == []


# A decorator that passes an argument of its own.


async def with_default(payload: dict[str, Any], job: Job, session: str = "") -> list[Any]:
    return [payload["n"], session]


async def with_default_first(session: str = "", *, payload: dict[str, Any]) -> list[Any]:
    return [payload["n"], session]


async def taken_for_the_payload(session: Any, job: Job) -> None:
    raise AssertionError("reached")


def taken_in_a_thread(session: Any, job: Job) -> None:
    raise AssertionError("reached")


@decorators.injecting
def taken_in_a_process(session: Any, job: Job) -> None:
    raise AssertionError("reached")


async def test_what_a_decorator_passes_reaches_a_parameter_with_a_default(
    dsn: str, db: asyncpg.Connection[Any]
) -> None:
    handlers = {"last": decorators.injecting_by_name(with_default), "first": decorators.injecting(with_default_first)}
    assert await ends(dsn, db, handlers) == {"last": [7, CONNECTION], "first": [7, CONNECTION]}


async def test_an_argument_that_is_passed_twice_is_explained(dsn: str, db: asyncpg.Connection[Any]) -> None:
    handlers = {
        "loop": decorators.injecting(taken_for_the_payload),
        "loop, by name": decorators.injecting_by_name(taken_for_the_payload),
        "thread": decorators.injecting(taken_in_a_thread),
    }
    _explain_twice(await ends(dsn, db, handlers))


async def test_an_argument_that_is_passed_twice_in_a_process_is_explained(
    dsn: str, db: asyncpg.Connection[Any]
) -> None:
    _explain_twice(await ends(dsn, db, {"process": taken_in_a_process}, run_in="process"))


def _explain_twice(found: dict[str, Any]) -> None:
    for kind, said in found.items():
        assert "pgworkd.errors.UsageError: a decorator could not call taken_" in said, kind
        assert "multiple values for" in said, kind
        assert "what a decorator passes itself needs a default in the function" in said, kind


async def own_error(payload: dict[str, Any]) -> None:
    raise TypeError("mine")


def yields(payload: dict[str, Any]) -> Any:
    yield payload


async def yields_in_loop(payload: dict[str, Any]) -> Any:
    yield payload


def returns_a_coroutine(payload: dict[str, Any]) -> Any:
    return {"n": in_loop(payload, None)}  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:coroutine 'in_loop' was never awaited")
async def test_what_goes_wrong_below_a_decorator_is_explained(dsn: str, db: asyncpg.Connection[Any]) -> None:
    wrong = {
        "own error": (decorators.plain(own_error), "TypeError: mine"),
        "own loop": (
            decorators.own_loop(in_loop),
            "own (asyncio.run() cannot be called from a running event loop): register it with run_in='thread'",
        ),
        "generator": (decorators.plain(yields), "is of type generator, whose values are not taken: return a list"),
        "async generator": (
            decorators.plain(yields_in_loop),
            "is of type async_generator, which cannot be written as JSON: return a list of what it yields",
        ),
        "coroutine": (returns_a_coroutine, "is of type coroutine, which cannot be written as JSON: await it"),
    }
    found = await ends(dsn, db, {kind: handle for kind, (handle, _) in wrong.items()})
    assert {kind: found[kind] for kind, (_, said) in wrong.items() if said not in found[kind]} == {}


async def test_a_decorator_with_a_loop_of_its_own_works_in_a_thread(dsn: str, db: asyncpg.Connection[Any]) -> None:
    found = await ends(dsn, db, {"q": decorators.own_loop(in_loop)}, run_in="thread")
    assert found["q"][:2] == [7, 1]
    assert found["q"][2] != threading.get_ident()
