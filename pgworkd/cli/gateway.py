"""The commands serve and token: the gateway, and who may call it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pgworkd.cli.common import DebugBodies, DebugHttp, Dsn, Json, MetricsListen, ask, ask_any, instant_of, settings_of
from pgworkd.cli.output import as_json, note, out, print_rows
from pgworkd.core.address import Address, listed
from pgworkd.core.validation import counted
from pgworkd.errors import AccessRefused, DatabaseUnavailable, PgworkdError, UsageError
from pgworkd.process import stop_signals

if TYPE_CHECKING:
    import socket
    from datetime import datetime

    from pgworkd.admin.admin import Admin
    from pgworkd.core.access import TokenText
    from pgworkd.settings.config import Settings

tokens = typer.Typer(help="Add, list and revoke the tokens by which programs call the gateway.", no_args_is_help=True)
Scope = Annotated[
    list[str] | None,
    typer.Option(
        "--scope",
        metavar="SCOPE[:QUEUE,...]",
        help="What it allows (repeatable): enqueue, work, read, payload, operate, metrics, admin; for all queues, or "
        "for some: enqueue:mail,report-*",
    ),
]

UserScopes = Annotated[
    str | None, typer.Option("--user-scopes", metavar="SCOPE,...", help="What those may do; default: read.")
]
Mask = Annotated[
    str | None, typer.Option("--mask", metavar="PATH,...", help="What no page shows: payload.*.email,result.token.")
]

FrameUrl = Annotated[
    str | None, typer.Option("--frame-url", metavar="URL", help="A page of yours to embed in the overview: metrics.")
]


def serve(
    *,
    listen: Annotated[str | None, typer.Option("--listen", metavar="HOST:PORT", help="Where to serve.")] = None,
    auth: Annotated[
        str | None,
        typer.Option("--auth", metavar="tokens|none", help="none: any program on this host may do everything."),
    ] = None,
    hosts: Annotated[
        str | None,
        typer.Option("--hosts", metavar="NAME,...", help="Accepted Host headers beside its own names; *: any."),
    ] = None,
    proxies: Annotated[
        str | None, typer.Option("--proxies", metavar="ADDRESS,...", help="Proxies whose X-Forwarded-For is trusted.")
    ] = None,
    parts: Annotated[
        str | None,
        typer.Option(
            "--with", metavar="PART,...", help="What to serve: api, workers, dashboard; default: the first two."
        ),
    ] = None,
    dashboard_dsn: Annotated[
        str | None,
        typer.Option("--dashboard-dsn", metavar="URL", help="Database that pages are read from, such as a standby."),
    ] = None,
    user_header: Annotated[
        str | None, typer.Option("--user-header", metavar="NAME", help="Where a proxy names who sees the dashboard.")
    ] = None,
    user_scopes: UserScopes = None,
    mask: Mask = None,
    frame_url: FrameUrl = None,
    metrics_listen: MetricsListen = None,
    debug_http: DebugHttp = False,
    debug_bodies: DebugBodies = False,
    dsn: Dsn = None,
) -> int:
    """Serve the gateway: jobs, batches and operations over HTTP (extra http).

    Callers need a token (pgworkd token add). Put a proxy in front for TLS. Routes: /v1/openapi.json, docs/http.md.
    """
    more = {"http_hosts": hosts, "http_proxies": proxies, "http_with": parts, "metrics_listen": metrics_listen}
    more |= {"http_dashboard_dsn": dashboard_dsn, "http_user_header": user_header, "http_user_scopes": user_scopes}
    more |= {"http_mask": mask, "http_frame_url": frame_url}
    settings = settings_of(dsn, http_listen=listen, http_auth=auth, **more)
    try:
        import pgworkd.gateway.api.server  # noqa: F401
    except ModuleNotFoundError as error:
        raise UsageError(f"{error.name} is not installed: pip install 'pgworkd[http]'") from None
    from pgworkd import log
    from pgworkd.cli.serve import spare_collector
    from pgworkd.core.address import parse_address
    from pgworkd.metrics.server import listen as bound

    address = parse_address(settings.http_listen)
    with contextlib.closing(bound(address, f"http_listen ({settings.origin('http_listen')})")) as listener:
        _check_open(settings, listener)
        app = _application(settings, listener, requests=debug_http, bodies=debug_bodies)
        log.configure(settings.log_level, settings.log_format, settings.worker_name)
        spare_collector()
        return int(stop_signals.run(_serve, settings, app, listener, backend_options={"use_uvloop": True}))


def _application(settings: Settings, listener: socket.socket, *, requests: bool, bodies: bool) -> Any:
    """The application of a gateway; `requests`, `bodies`: what is logged of each request."""
    from dataclasses import replace

    from pgworkd import log
    from pgworkd.core.events import Events
    from pgworkd.engine.life.heartbeat import end_process
    from pgworkd.gateway.api.app import Application
    from pgworkd.gateway.api.request.access import anyone
    from pgworkd.gateway.api.request.gateway import Gateway
    from pgworkd.log.http import log_request
    from pgworkd.options import gateway_options

    options = replace(gateway_options(settings, listener.getsockname()[0]), end_process=end_process)
    events = Events()
    events.listen(log.listener(settings.log_level), except_for=log.below_level(settings.log_level))
    gateway = Gateway(options, anyone if settings.http_auth == "none" else None, events)
    return Application(gateway, log=log_request if requests or bodies else None, log_bodies=bodies)


async def _serve(settings: Settings, app: Any, listener: socket.socket) -> int:
    """Serves until a stop signal; the exit code."""
    from pgworkd.cli import listening
    from pgworkd.cli.running import run_until_stopped

    listening.observe(lambda: app.gateway.source)
    program = _Gateway(settings, app, listener)
    return await run_until_stopped(program, settings, settings.notes, source=lambda: app.gateway.source)


@contextlib.asynccontextmanager
async def dashboard_of(dsn: str) -> AsyncIterator[str]:
    """Serves the dashboard of a database to this host while the block lasts; says where, or what it needs.

    No setting is read: for the database of `dev` or `demo`. If the default port is taken, any free one is used.
    """
    try:
        import pgworkd.gateway.api.server  # noqa: F401
    except ModuleNotFoundError:
        yield "The dashboard needs the extra http: pip install 'pgworkd[http]'"
        return
    import anyio
    from pydantic import SecretStr

    from pgworkd import log
    from pgworkd.core.address import parse_address
    from pgworkd.metrics.server import listen as bound
    from pgworkd.settings.config import Settings

    settings = Settings(dsn=SecretStr(dsn), http_with="dashboard", log_level="error", shutdown_s=1)
    told, taken, problem = list[str](), "", None
    try:
        listener = bound(parse_address(settings.http_listen), "http_listen")
    except UsageError:
        listener = bound(parse_address("127.0.0.1:0"), "http_listen")
        taken = f" ({settings.http_listen} is taken by another program)"
    log.configure(settings.log_level)
    with contextlib.closing(listener):
        app = _application(settings, listener, requests=False, bodies=False)
        gateway = _Gateway(settings, app, listener, told.append)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(gateway.run)
            await gateway.ready.wait()
            try:
                yield "".join(told) + taken
            except Exception as error:  # noqa: BLE001 - raised below: the task group would wrap it
                problem = error
            finally:
                gateway.stop(1)
    if problem is not None:
        raise problem


class _Gateway:
    """The server of an application, and what systemd is told of it."""

    def __init__(
        self, settings: Settings, app: Any, listener: socket.socket, tell: Callable[[str], object] = note
    ) -> None:
        """`tell`: is called with where the dashboard can be seen."""
        import anyio

        from pgworkd.gateway.api.server import server

        self.ready, self.stop_requested, self._tell = anyio.Event(), anyio.Event(), tell
        self._app, self._listener, self._shutdown_s = app, listener, settings.shutdown_s
        self._server = server(app, settings.shutdown_s, listed(settings.http_proxies))

    async def run(self) -> int:
        """Serves until it is stopped."""
        import anyio

        from pgworkd import log
        from pgworkd.metrics.endpoint import bound
        from pgworkd.processes.sd_notify import SystemdNotifier

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._tell_start, bound(self._listener))
            tasks.start_soon(SystemdNotifier().run, self)
            await self._server.serve([self._listener])
            tasks.cancel_scope.cancel()
        log.logger().info("http.stopped")
        return 0

    async def _tell_start(self, address: Address) -> None:
        import anyio

        from pgworkd import log

        while not self._server.started:
            await anyio.sleep(0.01)
        log.logger().info("http.listening", address=str(address))
        if (dashboard := self._app.dashboard) is not None and address.is_local and "JOURNAL_STREAM" not in os.environ:
            once = f"/sign-in?once={dashboard.callers.once()}" if dashboard.callers.by_tokens else "/"
            self._tell(f"the dashboard, for you and ten minutes: http://{address}{once}")
        self.ready.set()

    def stop(self, requests: int) -> float | None:
        """Ends waiting requests, and the server; at request number 2 at once."""
        if requests > 2:
            return None
        self.stop_requested.set()
        self._app.gateway.stop_waiting()
        self._server.request_stop(now=requests > 1)
        return float(self._shutdown_s + self._app.gateway.remote.stop_s)

    def healthy(self) -> bool:
        """Returns True: the loop runs, and a restart would not bring the database back."""
        return True

    def status(self) -> str:
        """The state of the gateway in one line, for `systemctl status`."""
        refused = self._app.gateway.remote.counters.refusals.text()
        connections = counted(len(self._server.server_state.connections), "connection")
        return f"{refused and refused + '; '}{connections}, {self._app.gateway.waiters} waiting"


def _check_open(settings: Settings, listener: socket.socket) -> None:
    """Raises UsageError for a gateway that everybody could call from elsewhere, or nobody."""
    from pgworkd.metrics.endpoint import bound

    is_local = bound(listener).is_local
    if settings.http_auth == "none":
        if not is_local:
            raise UsageError(
                f"http_auth is none ({settings.origin('http_auth')}), and {settings.http_listen} can be reached from "
                "other hosts, who could do everything: use tokens, or listen on 127.0.0.1"
            )
        return

    async def question(admin: Admin) -> bool:
        return await admin.tokens.is_any_live()

    try:
        found = ask_any(settings.dsn_required(), question)
    except (DatabaseUnavailable, AccessRefused):
        return  # a start does not wait for the database: requests are answered with 503 until it is there
    if not found:
        said = "no token exists, so nobody could call the gateway: pgworkd token add NAME --scope enqueue --scope read"
        if not is_local:
            raise UsageError(said)
        typer.echo(f"pgworkd: {said}, or serve --auth none", err=True)


@tokens.command("add")
def add(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Whom it is for, as the audit shows it.")],
    *,
    scope: Scope = None,
    expires: Annotated[
        str | None, typer.Option("--expires", metavar="INSTANT", help="2027-01-31T07:00:00+01:00; default: never.")
    ] = None,
    json: Json = False,
    dsn: Dsn = None,
) -> None:
    """Add a token, and print it: it is shown only once."""
    if not scope:
        raise UsageError("no scope given: add --scope enqueue, read, or others; see pgworkd token add --help")
    scopes = _scopes(scope)
    expires_at: datetime | None = None if expires is None else instant_of(expires, "--expires")

    async def question(admin: Admin) -> TokenText:
        return await admin.tokens.add(name, scopes, expires_at)

    token = ask(dsn, question)
    if json:
        as_json({"id": token.id, "token": str(token)})
    else:
        out(str(token))


@tokens.command("list")
def list_(*, json: Json = False, dsn: Dsn = None) -> None:
    """List the tokens, without their secrets."""

    async def question(admin: Admin) -> list[Any]:
        return await admin.tokens.find(1000)

    rows = ask_any(dsn, question)
    columns = ("id", "name", "state", "scopes", "created_at", "created_by", "expires_at")
    print_rows(rows if json else [row._replace(scopes=_brief(row.scopes)) for row in rows], columns, json=json)


@tokens.command("revoke")
def revoke(
    token_id: Annotated[str, typer.Argument(metavar="ID", help="As pgworkd token list shows it.")], *, dsn: Dsn = None
) -> int:
    """Revoke a token; gateways refuse it within ten seconds."""

    async def question(admin: Admin) -> bool:
        return await admin.tokens.revoke(token_id)

    if not ask(dsn, question):
        raise PgworkdError("there is no live token of this id: see pgworkd token list")
    out(f"token {token_id} is revoked")
    return 0


def _scopes(given: list[str]) -> dict[str, list[str] | None]:
    found: dict[str, list[str] | None] = {}
    for each in given:
        scope, colon, queues = each.partition(":")
        if scope in found:
            raise UsageError(f"--scope {scope} is given twice: give its queues as {scope}:a,b")
        found[scope] = list(listed(queues)) if colon else None
    return found


def _brief(found: Mapping[str, Sequence[str] | None]) -> str:
    from pgworkd.core.access import SCOPES

    in_order = sorted(found, key=list(SCOPES).index)
    return " ".join(scope if (queues := found[scope]) is None else f"{scope}:{','.join(queues)}" for scope in in_order)
