"""Two releases, or two services, that declare one schedule: the log and doctor tell, and the new rule wins."""

from __future__ import annotations

import json
from typing import Any

import anyio
import asyncpg
import pytest

from pgworkd import App
from pgworkd.core import events
from tests.kits.cli import Shell, clean, shell
from tests.kits.daemon import running, until

__all__ = ["clean", "shell"]  # fixtures

RULE = "SELECT queue, every_s FROM pgworkd.schedules WHERE name = 'cleanup'"


def service(queue: str, every_s: int) -> App:
    """An application with the schedule `cleanup`."""
    app = App()

    @app.handler("cleanup", queue=queue, every=every_s)
    async def cleanup() -> None:
        """Is never due."""

    return app


@pytest.fixture
async def rule_is(db: asyncpg.Connection[Any]) -> Any:
    """A condition for `until`."""

    def is_(queue: str, every_s: int) -> Any:
        async def fact() -> bool:
            row = await db.fetchrow(RULE)
            return row is not None and tuple(row) == (queue, every_s)

        return fact

    return is_


async def test_a_deployment_ends_with_the_new_rule_although_the_old_daemon_starts_again(dsn: str, rule_is: Any) -> None:
    old, new = service("q", 3600), service("q", 7200)
    async with running(old, dsn) as (first, _), running(new, dsn) as (_, seen):
        await seen.wait(events.SCHEDULE_DIFFERS, schedule="cleanup", ours={"every_s": 7200}, theirs={"every_s": 3600})
        async with running(old, dsn):
            await until(rule_is("q", 3600))
            first.request_stop()
        await until(rule_is("q", 7200))
        assert len(seen.all(events.SCHEDULE_DIFFERS)) <= 3, "once for each worker that it names"
        async with running(old, dsn) as (_, late):
            await late.wait(events.SCHEDULE_DIFFERS, ours={"every_s": 3600}, theirs={"every_s": 7200})
            await until(rule_is("q", 7200))


async def test_two_services_of_one_name_are_told_by_log_and_doctor(
    dsn: str, shell: Shell, rule_is: Any, db: asyncpg.Connection[Any]
) -> None:
    billing = running(service("billing", 5), dsn, worker_name="billing")
    async with running(service("shop", 3600), dsn, worker_name="shop"), billing as (_, seen):
        told = await seen.wait(events.SCHEDULE_DIFFERS)
        assert told["worker"].startswith("shop (id ")
        assert (told["ours"]["queue"], told["theirs"]["queue"]) == ("billing", "shop")
        found = await anyio.to_thread.run_sync(lambda: shell("doctor", "--json", "--dsn", dsn).stdout)
        (finding,) = [each for each in json.loads(found) if each["subject"] == "schedules"]
        assert finding["level"] == "warn"
        assert "'cleanup' is declared differently by billing (id" in finding["finding"]
        assert await rule_is("shop", 3600)()


async def test_a_schedule_whose_row_is_gone_comes_back(dsn: str, rule_is: Any, db: asyncpg.Connection[Any]) -> None:
    async with running(service("q", 3600), dsn):
        await until(rule_is("q", 3600))
        await db.execute("DELETE FROM pgworkd.schedules")
        await until(rule_is("q", 3600))
