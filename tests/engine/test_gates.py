"""Events without a listener are not emitted, and their facts are not computed."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import anyio
import asyncpg
import pytest

from pgworkd import App, log
from pgworkd.cli import serve
from pgworkd.cli.programs import Program
from pgworkd.core import events
from pgworkd.core.events import Events
from pgworkd.engine.attempts import Attempt
from pgworkd.engine.life.daemon import Daemon
from pgworkd.settings.config import load
from tests.kits.daemon import LIMIT_S, insert, quick_options, until, waits_for_status

Said = list[str]


def listener_of(said: Said) -> events.Listener:
    def listen(name: str, facts: Mapping[str, Any]) -> None:
        said.append(name)

    return listen


@pytest.fixture
def lines() -> io.StringIO:
    """A stream that replaces standard error."""
    return io.StringIO()


# Events.


def test_an_event_is_emitted_if_any_listener_wants_it() -> None:
    speaker = Events()
    assert not speaker.has_listener("a")
    speaker.listen(listener_of([]), except_for=frozenset({"a"}))
    assert not speaker.has_listener("a")
    assert speaker.has_listener("b")
    speaker.listen(listener_of([]), except_for=frozenset({"b"}))
    assert speaker.has_listener("a")
    assert speaker.has_listener("b")


def test_removing_a_listener_affects_no_other() -> None:
    speaker, one, other = Events(), Said(), Said()
    first, second = listener_of(one), listener_of(other)
    speaker.listen(first)
    speaker.listen(second, except_for=frozenset({"a"}))
    assert speaker.has_listener("a")
    speaker.emit("a")
    speaker.unlisten(first)
    assert not speaker.has_listener("a"), "the answer was known, and is another now"
    assert speaker.has_listener("b")
    speaker.emit("a")
    speaker.emit("b")
    speaker.unlisten(first)
    assert (one, other) == (["a"], ["b"])
    speaker.unlisten(second)
    assert not speaker.has_listener("b")


def test_a_listener_may_remove_itself_while_it_is_called() -> None:
    speaker, said = Events(), Said()

    def leaving(name: str, facts: Mapping[str, Any]) -> None:
        speaker.unlisten(leaving)

    speaker.listen(leaving)
    speaker.listen(listener_of(said))
    speaker.emit("a")
    speaker.emit("b")
    assert said == ["a", "b"]


EVERY = [value for name, value in vars(events).items() if name.isupper()]


@pytest.mark.parametrize("level", ["debug", "info", "warning", "error"])
def test_silent_events_are_exactly_those_below_the_log_level(
    monkeypatch: pytest.MonkeyPatch, lines: io.StringIO, level: str
) -> None:
    monkeypatch.setattr(sys, "stderr", lines)
    log.configure(level, "json")
    listener = log.listener(level)
    for name in EVERY:
        listener(name, {})
    logged = {json.loads(line)["event"] for line in lines.getvalue().splitlines()}
    # Events without a level are logged at info, and always emitted.
    assert log.below_level(level) & logged == set()
    assert log.below_level(level) | logged >= set(log._LEVELS)


# Facts without a listener.


@pytest.fixture
def gathered(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often the facts of each job were computed."""
    count: Counter[str] = Counter()
    facts = Attempt.facts

    def counting(held: Attempt) -> dict[str, object]:
        found = facts(held)
        count[str(found["job_id"])] += 1
        return found

    monkeypatch.setattr(Attempt, "facts", counting)
    return count


def app_that_may_fail() -> App:
    app = App()

    @app.handler("q", concurrency=2, max_attempts=1)
    async def handle(payload: dict[str, Any]) -> None:
        if payload:
            raise ValueError("no")

    return app


@asynccontextmanager
async def mute(app: App, dsn: str, **changes: Any) -> AsyncIterator[Daemon]:
    """A daemon without any listener."""
    daemon = Daemon(app, quick_options(dsn, **changes))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(daemon.run)
        with anyio.fail_after(LIMIT_S):
            await daemon.ready.wait()
        try:
            yield daemon
        finally:
            daemon.request_stop()


async def completed(db: asyncpg.Connection[Any], count: int) -> None:
    await until(lambda: db.fetchval("SELECT count(*) >= $1 FROM pgworkd.finished_jobs", count), limit_s=4)


@pytest.mark.parametrize(("level", "per_job"), [("warning", 0), ("error", 0), ("info", 1), ("debug", 2)], ids=str)
async def test_facts_are_computed_only_if_a_listener_wants_them(
    dsn: str, db: asyncpg.Connection[Any], gathered: Counter[str], level: str, per_job: int
) -> None:
    said = Said()
    async with mute(app_that_may_fail(), dsn) as daemon:
        daemon.events.listen(listener_of(said), except_for=log.below_level(level))
        ids = [str(await insert(db, "q")) for _ in range(10)]
        await completed(db, 10)
        await until(lambda: len(daemon.in_flight) == 0)
        assert [gathered[job_id] for job_id in ids] == [per_job] * 10
        failing = await insert(db, "q", '{"fail": true}')
        await until(waits_for_status(db, failing, "dead"))
        await until(lambda: said.count(events.JOB_DEAD) == 1)
    assert said.count(events.JOB_STARTED) == (11 if level == "debug" else 0)
    assert said.count(events.JOB_COMPLETED) == (10 if per_job else 0)


async def test_a_listener_takes_effect_at_once_and_costs_nothing_once_removed(
    dsn: str, db: asyncpg.Connection[Any], gathered: Counter[str]
) -> None:
    said = Said()
    listener = listener_of(said)
    async with mute(app_that_may_fail(), dsn) as daemon:
        for n in (1, 2, 3):
            await insert(db, "q")
            await completed(db, 2 * n - 1)
            await until(lambda: len(daemon.in_flight) == 0)
            before = gathered.total()
            daemon.events.listen(listener)
            await insert(db, "q")
            await until(lambda n=n: said.count(events.JOB_COMPLETED) == n)  # type: ignore[misc]
            assert said.count(events.JOB_STARTED) == n
            assert gathered.total() == before + 2
            daemon.events.unlisten(listener)
    assert gathered.total() == 6


# The log of a daemon as a process, and its level.


def logged(lines: io.StringIO, event: str) -> list[dict[str, Any]]:
    return [line for line in map(json.loads, lines.getvalue().splitlines()) if line["event"] == event]


async def test_a_log_level_changed_by_a_signal_takes_effect_at_once(
    dsn: str,
    db: asyncpg.Connection[Any],
    monkeypatch: pytest.MonkeyPatch,
    gathered: Counter[str],
    lines: io.StringIO,
) -> None:
    monkeypatch.setattr(sys, "stderr", lines)
    monkeypatch.setenv("PGWORKD_LOG_LEVEL", "warning")
    flags = {"dsn": dsn, "log_format": "json"}
    service = serve._Service(load(**flags), flags, Program(app_that_may_fail(), Daemon))
    make, made = service._make_daemon, list[Daemon]()

    def daemon_of() -> Daemon:
        made.append(make())
        return made[0]

    monkeypatch.setattr(service, "_make_daemon", daemon_of)
    monkeypatch.setattr(serve, "_tracing", tuple)  # other tests have imported OpenTelemetry

    async def reload(level: str) -> None:
        monkeypatch.setenv("PGWORKD_LOG_LEVEL", level)
        reloaded = service._settings
        os.kill(os.getpid(), signal.SIGHUP)
        await until(lambda: service._settings is not reloaded, limit_s=1)

    async def run_one() -> str:
        job_id = await insert(db, "q")
        await until(waits_for_status(db, job_id, "completed"))
        await until(lambda: len(made[0].in_flight) == 0)  # and reported
        return str(job_id)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(service.run)
        quiet = await run_one()
        await reload("debug")
        heard = await run_one()
        await reload("info")
        half = await run_one()
        await reload("warning")
        quiet_again = await run_one()
        failing = await insert(db, "q", '{"fail": true}')
        await until(lambda: logged(lines, events.JOB_DEAD), limit_s=2)
        os.kill(os.getpid(), signal.SIGTERM)
    assert [line["job_id"] for line in logged(lines, events.JOB_STARTED)] == [heard]
    assert [line["job_id"] for line in logged(lines, events.JOB_COMPLETED)] == [heard, half]
    assert [line["job_id"] for line in logged(lines, events.JOB_DEAD)] == [str(failing)]
    assert (gathered[quiet], gathered[heard], gathered[half], gathered[quiet_again]) == (0, 2, 1, 0)
