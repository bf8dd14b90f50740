"""What a process runs: an application of the user's, near the database or through a gateway; or what pushes."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from pgworkd.cli.load_app import load_app
from pgworkd.core.validation import closest
from pgworkd.engine.life.daemon import Daemon
from pgworkd.engine.registry import Registry
from pgworkd.errors import UsageError
from pgworkd.log.http import log_sent
from pgworkd.settings.config import Settings


class Program(NamedTuple):
    """`make` makes a daemon of `app`, with the arguments of `Daemon`."""

    app: Registry
    make: Callable[..., Daemon]


def program(settings: Settings, *, push: bool, requests: bool = False, bodies: bool = False) -> Program:
    """The program that these settings ask for; UsageError where they contradict it. See `serve.serve`."""
    if push:
        return _push(settings, requests=requests, bodies=bodies)
    if settings.app is None:
        raise UsageError("no app given: set PGWORKD_APP, or pass --app module:attribute")
    app = load_app(settings.app)
    _check_threads(settings.app)
    check_queues(settings, app)
    if settings.remote is None:
        return Program(app, Daemon)
    if settings.processes > 1:
        raise UsageError(f"processes ({settings.origin('processes')}): with remote, start several daemons instead")
    return Program(app, _remote(settings))


def _check_threads(app: str) -> None:
    """Raises UsageError where the application has replaced threads: asyncio would not find its main one."""
    for module, patched in (("gevent.monkey", "is_module_patched"), ("eventlet.patcher", "is_monkey_patched")):
        ask: Any = getattr(sys.modules.get(module), patched, None)
        if ask is not None and (ask("threading") or ask("thread")):
            library = module.partition(".")[0]
            raise UsageError(
                f"the app {app!r} patches threads with {library}; the daemon runs on asyncio, which needs them: call "
                "patch_all(thread=False), or start what needs it in a process of its own"
            )


def check_queues(settings: Settings, app: Registry) -> None:
    """Raises UsageError for a queue that the application does not know; where queues come from the database, never."""
    known = app.queues() if app.handlers else {}
    for queue in settings.queues if known else ():
        if queue not in known:
            found = closest(queue, known)
            hint = f": did you mean {found!r}?" if found else f"; the app has: {', '.join(sorted(known))}"
            raise UsageError(f"queues ({settings.origin('queues')}): no handler serves queue {queue!r}{hint}")


def _push(settings: Settings, *, requests: bool, bodies: bool) -> Program:
    try:
        from pgworkd.push.daemon.daemon import PushApp, PushDaemon
        from pgworkd.push.traffic import Traffic
    except ModuleNotFoundError as error:
        raise UsageError(f"{error.name} is not installed: pip install 'pgworkd[http]'") from None
    if settings.remote is not None:
        raise UsageError(f"remote ({settings.origin('remote')}): pgworkd push needs the database itself")
    if settings.processes > 1:
        raise UsageError(f"processes ({settings.origin('processes')}): start several pgworkd push instead")
    callback_url = settings.callback_url or ""
    traffic = Traffic(log_sent, bodies=bodies) if requests or bodies else None
    make = functools.partial(PushDaemon, secrets_dir=settings.secrets_dir, callback_url=callback_url, traffic=traffic)
    return Program(PushApp(), make)


def _remote(settings: Settings) -> Callable[..., Daemon]:
    """Makes a daemon that works through a gateway."""
    try:
        from pgworkd.remote.client import LEASE_S_MIN, GatewayAddress
        from pgworkd.remote.daemon import RemoteDaemon
    except ModuleNotFoundError as error:
        raise UsageError(f"{error.name} is not installed: pip install 'pgworkd[remote]'") from None
    if settings.lease_s < LEASE_S_MIN:
        raise UsageError(f"lease_s ({settings.origin('lease_s')}): with remote, {LEASE_S_MIN:g} or more")
    requests_log = logging.getLogger("httpx")  # one record for each claim, settle and beat
    if requests_log.level == logging.NOTSET:  # not set by the app
        requests_log.setLevel(logging.WARNING)
    gateway = GatewayAddress(settings.remote or "", settings.token_required(), settings.command_timeout_s)
    return functools.partial(RemoteDaemon, gateway=gateway)
