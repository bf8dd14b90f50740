"""Daemons that work through a gateway, in the place of those that a test makes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import threading
from collections.abc import AsyncIterator

import anyio
import asyncpg
import pytest

from pgworkd.core import events
from tests.kits.daemon import REMOTE, Recorder
from tests.kits.gateway import served, token

SHORT_LEASES = """
    CREATE FUNCTION shorten_lease() RETURNS trigger LANGUAGE plpgsql AS $$
    DECLARE
        v_lease_s real := substring(NEW.name FROM ' lease ([0-9.]+)$');
    BEGIN
        IF NEW.kind = 'remote' AND v_lease_s IS NOT NULL THEN
            NEW.name := regexp_replace(NEW.name, ' lease [0-9.]+$', '');
            NEW.lease_s := v_lease_s;
            NEW.lease_until := NEW.started_at + make_interval(secs => v_lease_s);
        END IF;
        RETURN NEW;
    END $$;
    CREATE TRIGGER shorten_lease BEFORE INSERT ON pgworkd.workers FOR EACH ROW EXECUTE FUNCTION shorten_lease();
"""
"""A gateway accepts leases of 10 s and more; those of tests are shorter, and part of the worker's name."""


@contextlib.asynccontextmanager
async def remote_daemons(dsn: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[str]:
    """Until the end of the block daemons work through a gateway in a process of its own; its address.

    What the gateway logs of lost jobs is among the events of each daemon: it is the gateway that takes them back.
    """
    connection = await asyncpg.connect(dsn)
    await connection.execute(SHORT_LEASES)
    await connection.close()
    with served(dsn, module=("tests.kits.quick_gateway",)) as (process, url):
        follow = threading.Thread(target=_follow, args=(process, asyncio.get_running_loop()), daemon=True)
        follow.start()
        monkeypatch.setenv(REMOTE, f"{url} {await token(dsn)}")
        yield url
        process.terminate()
        await anyio.to_thread.run_sync(follow.join)


def _follow(process: subprocess.Popen[str], loop: asyncio.AbstractEventLoop) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        with contextlib.suppress(json.JSONDecodeError, KeyError, RuntimeError):
            facts = json.loads(line)
            if (name := facts.pop("event")) == events.JOB_LOST:
                for recorder in list(Recorder.present):
                    loop.call_soon_threadsafe(recorder, name, facts)
