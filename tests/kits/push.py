"""A daemon that pushes, in this process, and the endpoints of its queues."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import anyio

from pgworkd.core import events
from pgworkd.push.daemon.daemon import PushApp, PushDaemon
from tests.kits.daemon import Recorder, quick_options
from tests.kits.verbs import Db


async def put_endpoint(db: Db, name: str, url: str, *queues: str, **columns: Any) -> None:
    """Adds or changes an endpoint on this host, unsigned unless `columns` say otherwise, and sends `queues` there."""
    changes = {"url": url, "allow_private": True, "unsigned": "secret_name" not in columns} | columns
    await db.execute("SELECT pgworkd.set_endpoint($1, $2::text::jsonb)", name, _json(changes))
    for queue in queues:
        await db.execute("SELECT pgworkd.set_queue($1, $2::text::jsonb)", queue, _json({"endpoint": name}))


def _json(value: object) -> str:
    return json.dumps(value)


@contextlib.asynccontextmanager
async def pushing(
    dsn: str,
    *,
    queues: Mapping[str, int | None] | None = None,
    secrets_dir: Path | None = None,
    callback_url: str = "http://localhost",
    parts: tuple[Any, ...] = (),
    **options: Any,
) -> AsyncIterator[tuple[PushDaemon, Recorder]]:
    """A daemon that is ready, and its events; it is stopped at the end."""
    more = {"queues": queues, "secrets_dir": secrets_dir, "callback_url": callback_url, "parts": parts}
    daemon = PushDaemon(PushApp(), quick_options(dsn, **options), **more)
    seen = Recorder()
    daemon.events.listen(seen)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(daemon.run)
        try:
            await seen.wait(events.DAEMON_READY)
            yield daemon, seen
        finally:
            daemon.request_stop(now=True)
