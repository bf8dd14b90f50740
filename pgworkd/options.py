"""The options of each program, from the settings: the only place that turns one into the other."""

from __future__ import annotations

import socket
from dataclasses import replace
from typing import TYPE_CHECKING

from pgworkd.core.address import listed
from pgworkd.database.connection import ConnectionOptions
from pgworkd.engine.life.maintenance import Periods
from pgworkd.engine.life.options import DaemonOptions
from pgworkd.settings.config import Settings

if TYPE_CHECKING:
    from pgworkd.gateway.api.request.gateway import GatewayOptions

_NO_DATABASE = "postgresql://"
"""The address of a daemon that works through a gateway: it is never connected to."""


def connection_options(settings: Settings, *, by: str = "", any_server: bool = False) -> ConnectionOptions:
    """How to connect to the database; `by` and `any_server` as in `ConnectionOptions`. UsageError without a DSN."""
    timeouts = (settings.connect_timeout_s, settings.command_timeout_s)
    return ConnectionOptions(settings.dsn_required(), *timeouts, by=by, any_server=any_server)


def daemon_options(settings: Settings) -> DaemonOptions:
    """The options of `pgworkd run` and `pgworkd push`. UsageError without a DSN, unless it works through a gateway."""
    timeouts = (settings.connect_timeout_s, settings.command_timeout_s)
    is_remote = settings.remote is not None
    return DaemonOptions(
        ConnectionOptions(_NO_DATABASE, *timeouts) if is_remote else connection_options(settings),
        worker_name=settings.worker_name,
        lease_s=settings.lease_s,
        heartbeat_s=settings.heartbeat_s,
        loop_limit_s=settings.loop_limit_s,
        poll_s=settings.poll_s,
        shutdown_s=settings.shutdown_s,
        transactions_max=settings.transactions_max,
        slow_min_s=settings.slow_min_s,
        slow_factor=settings.slow_factor,
        statistics=settings.statistics == "on",
        stacks=settings.stacks == "on",
        periods=_periods(settings),
        environment=settings.environment,
    )


def gateway_options(settings: Settings, address: str | None = None) -> GatewayOptions:
    """The options of a gateway; `address`: of its socket, None where the application around it checks the header Host.

    UsageError without a DSN. Needs the extra `http`.
    """
    from pgworkd.gateway.api.request.gateway import LOOPBACK, GatewayOptions

    hosts = None
    if address is not None:
        own = f"[{address}]" if ":" in address else address
        given = listed(settings.http_hosts)
        hosts = tuple(sorted({name.lower() for name in (*LOOPBACK, *given, *_own_names(), own)}))
    database, pages = connection_options(settings), settings.http_dashboard_dsn
    return GatewayOptions(
        database,
        connections_max=settings.http_connections_max,
        waiters_max=settings.http_waiters_max,
        hosts=hosts,
        requests_per_s=settings.http_requests_per_s,
        api="api" in listed(settings.http_with),
        workers="workers" in listed(settings.http_with),
        dashboard="dashboard" in listed(settings.http_with),
        dashboard_database=None if pages is None else replace(database, dsn=pages.get_secret_value()),
        user_header=settings.http_user_header,
        user_scopes=dict.fromkeys(listed(settings.http_user_scopes)),
        mask=listed(settings.http_mask),
        frame_url=settings.http_frame_url,
        name=settings.worker_name,
        poll_s=settings.poll_s,
        statistics=settings.statistics == "on",
        periods=_periods(settings),
        environment=settings.environment,
        loop_limit_s=settings.loop_limit_s,
    )


def _own_names() -> tuple[str, str]:
    return socket.gethostname(), socket.getfqdn()


def _periods(settings: Settings) -> Periods:
    return Periods(keep_days=settings.keep_days, keep_dead_days=settings.keep_dead_days)
