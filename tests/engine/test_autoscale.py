"""`pgworkd autoscale` with child processes: how many there are, and how they start and stop."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import anyio
import asyncpg
import pytest

from tests.kits.commands import NOWHERE, Play, Start, ended, events, lives, logged, start
from tests.kits.daemon import until

pytestmark = pytest.mark.slow("commands and daemons in processes of their own")

__all__ = ["start"]  # a fixture


@pytest.fixture
def play(start: Start, tmp_path: Path, dsn: str, db: asyncpg.Connection[Any]) -> Play:
    return Play(start, tmp_path, dsn, db)


def scaled(run: Any) -> list[tuple[int, int]]:
    return [(facts["before"], facts["after"]) for facts in events(run, "autoscale.decided")]


async def test_workers_scale_with_depth_within_bounds_and_stop_newest_first(play: Play) -> None:
    run = play("--cooldown-s=0.5")
    await play.says("up")
    await play.depth(5)
    await logged(run, "autoscale.decided", 2)
    await play.says("up", 4)
    started = [facts["worker"] for facts in await logged(run, "worker.started", 4)]
    assert (started[0], sorted(started[1:3]), started[3]) == ("w-1", ["w-2", "w-3"], "w-4")
    await play.depth(0)
    await logged(run, "autoscale.decided", 4)
    downs = await play.says("SIGTERM", 3)
    newest_two = {fact.name for fact in downs[:2]}
    assert newest_two in ({"w-4", "w-3"}, {"w-4", "w-2"}), "w-2 and w-3 began together"
    assert scaled(run) == [(1, 3), (3, 4), (4, 2), (2, 1)]
    up, down = events(run, "autoscale.decided")[0], events(run, "autoscale.decided")[2]
    assert (up["queue"], up["depth"], up["reason"]) == ("q", 5, "depth 5 >= up-at 5")
    assert (down["depth"], down["reason"]) == (0, "depth 0 <= down-at 1")
    run.stop()
    assert await ended(run) == 0
    assert [fact.name for fact in play.facts("SIGTERM")[3:]] == ["w-1"], "it has lived all the time"
    assert not play.facts("SIGINT")


async def test_the_cooldown_separates_two_decisions(play: Play) -> None:
    await play.depth(5)
    run = play("--cooldown-s=3600")
    await play.says("up", 3)
    await play.depth(0)
    await until_polled(play.db, await last_poll(play.db))
    assert scaled(run) == [(1, 3)]
    run.stop(signal.SIGINT)
    assert await ended(run) == 0


async def last_poll(db: asyncpg.Connection[Any]) -> Any:
    return await db.fetchval(
        "SELECT query_start FROM pg_stat_activity"
        " WHERE application_name = 'pgworkd admin' AND datname = current_database()"
    )


async def until_polled(db: asyncpg.Connection[Any], since: Any) -> None:
    """Waits for a poll that began after `since` and for the next one, so that the first has taken effect."""
    for _ in range(2):
        while (last := await last_poll(db)) == since:
            await anyio.sleep(0.01)
        since = last


async def test_a_worker_gets_its_own_session_no_stdin_and_a_clean_environment(play: Play) -> None:
    environ = {"NOTIFY_SOCKET": "/nowhere", "WATCHDOG_USEC": "1", "PGWORKD_DSN": NOWHERE}
    command = (sys.executable, "kid.py", "tells", "--queue=other", "--", "-x")
    run = play(f"--dsn={play.dsn}", command=command, **environ)
    (fact,) = await play.says("up")
    arguments, read, session, its_environ = fact.more
    assert arguments == ["--queue=other", "--", "-x"]
    assert read == ""
    assert session == (await logged(run, "worker.started"))[0]["pid"] == os.getsid(fact.pid)
    assert its_environ["PGWORKD_DSN"] == play.dsn
    assert not {"NOTIFY_SOCKET", "WATCHDOG_USEC"} & set(its_environ)


async def test_the_command_may_follow_without_dashes(play: Play) -> None:
    flags = ("--queue=q", "--max=1", "--up-at=5", "--down-at=1")
    environ = {"PGWORKD_DSN": play.dsn, "PGWORKD_WORKER_NAME": "w"}
    play._start("autoscale", *flags, sys.executable, "kid.py", "tells", "--queue", "other", **environ)
    (fact,) = await play.says("up")
    assert fact.more[0] == ["--queue", "other"]


async def test_a_killed_worker_is_replaced_at_once(play: Play) -> None:
    run = play("--min=2")
    for fact in await play.says("up", 2):
        if fact.name == "w-1":
            os.kill(fact.pid, signal.SIGKILL)
    (end,) = await logged(run, "worker.ended")
    assert (end["worker"], end["signal"], end["restart_in_s"]) == ("w-1", "SIGKILL", 0)
    assert (await play.says("up", 3))[2].name == "w-1"
    assert scaled(run) == []
    run.stop()
    assert await ended(run) == 0


async def test_a_misconfigured_worker_ends_autoscale_with_2(play: Play) -> None:
    run = play(mode="wrong")
    await play.says("up")
    await play.depth(5)
    assert await ended(run) == 2
    assert "w-1" in {fact.name for fact in play.facts("SIGTERM")}
    assert [facts["worker"] for facts in events(run, "worker.ended") if facts["level"] == "error"] == ["w-2"]
    assert not any(lives(fact.pid) for fact in play.facts("up"))


async def test_a_worker_that_does_not_stop_is_killed_with_its_children(play: Play) -> None:
    run = play("--stop-timeout-s=1.5", mode="deaf")
    (deaf,) = await play.says("up")
    run.stop()
    assert await ended(run) == 1
    assert [facts["worker"] for facts in events(run, "worker.killed")] == ["w-1"]
    assert [fact.name for fact in play.facts("SIGTERM")] == ["w-1"], "it was asked first"
    await until(lambda: not lives(deaf.pid) and not lives(deaf.more))


async def test_a_stopping_worker_counts_towards_max(play: Play) -> None:
    await play.depth(5)
    run = play("--max=2", "--step=1", mode="slow")
    ups = await play.says("up", 2)
    await play.depth(0)
    await play.says("SIGTERM")
    await play.depth(5)
    await logged(run, "autoscale.decided", 3)
    assert scaled(run) == [(1, 2), (2, 1), (1, 2)]
    await until_polled(play.db, await last_poll(play.db))
    assert len(play.facts("up")) == 2
    os.kill(next(fact.pid for fact in ups if fact.name == "w-2"), signal.SIGINT)
    assert (await play.says("up", 3))[2].name == "w-2"
    run.stop()
    await play.says("SIGTERM", 3)
    run.stop()
    assert await ended(run) == 0


async def test_a_second_signal_stops_at_once_and_a_third_kills(play: Play) -> None:
    slow = play(mode="slow")
    await play.says("up")
    slow.stop()
    await play.says("SIGTERM")
    slow.stop()
    assert await ended(slow) == 0
    assert [fact.what for fact in play.facts("SIGINT")] == ["SIGINT"]

    deaf = play(mode="deaf")
    await play.says("up", 2)
    for number, count in ((signal.SIGTERM, 2), (signal.SIGINT, 2)):
        deaf.stop(number)
        await play.says(number.name, count)
    deaf.stop()
    assert await ended(deaf) == 1


async def test_workers_do_not_outlive_autoscale(play: Play) -> None:
    run = play("--min=2")
    ups = await play.says("up", 2)
    run.process.kill()
    assert await ended(run) == -signal.SIGKILL
    assert {fact.name for fact in await play.says("SIGTERM", 2)} == {"w-1", "w-2"}
    await until(lambda: not any(lives(fact.pid) for fact in ups))


# The database


async def test_nothing_changes_while_the_database_does_not_respond(play: Play) -> None:
    run = play("--min=2", PGWORKD_COMMAND_TIMEOUT_S="1")
    await play.says("up", 2)
    await play.depth(5)
    await logged(run, "autoscale.decided", 1)
    lock = play.db.transaction()
    await lock.start()
    await play.db.execute("DELETE FROM pgworkd.jobs")
    await play.db.execute("LOCK TABLE pgworkd.jobs IN ACCESS EXCLUSIVE MODE")

    def unanswered() -> list[dict[str, Any]]:
        """Either of the two, as the server or the client may give up first."""
        return events(run, "statement.failed") + events(run, "database.unavailable")

    await until(lambda: len(unanswered()) > 0, limit_s=20)
    assert unanswered()[0]["part"] == "autoscale"
    assert scaled(run) == [(2, 4)]
    assert not play.facts("SIGTERM")
    await lock.commit()
    await logged(run, "autoscale.decided", 2)
    run.stop()
    assert await ended(run) == 0


async def test_a_stop_does_not_wait_for_a_response(play: Play) -> None:
    run = play(PGWORKD_COMMAND_TIMEOUT_S="10")
    await play.says("up")
    async with play.db.transaction():
        await play.db.execute("LOCK TABLE pgworkd.jobs IN ACCESS EXCLUSIVE MODE")
        waits = (
            "SELECT count(*) = 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
        )
        while not await play.db.fetchval(waits):
            await play.db.execute("SELECT pg_stat_clear_snapshot()")
        run.stop()
        asked_s = time.monotonic()
        assert await ended(run) == 0
        assert time.monotonic() - asked_s < 5, "the answer would come after 8 s"
    assert not events(run, "database.unavailable")


async def test_the_minimum_is_started_while_the_database_is_unavailable(play: Play) -> None:
    run = play("--min=2", PGWORKD_DSN=NOWHERE)
    await play.says("up", 2)
    assert len(await logged(run, "database.unavailable")) == 1
    run.stop()
    assert await ended(run) == 0


async def test_no_worker_is_started_on_a_database_without_the_schema(play: Play, empty_dsn: str) -> None:
    run = play(PGWORKD_DSN=empty_dsn)
    assert await ended(run) == 2
    assert run.lines == ["pgworkd: this database has no pgworkd schema: run pgworkd migrate"]
    assert not play.facts("up")
