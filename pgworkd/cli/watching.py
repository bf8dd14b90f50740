"""The commands exporter and health."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pgworkd.cli.common import Dsn, settings_of
from pgworkd.cli.output import out
from pgworkd.errors import PgworkdError, UsageError
from pgworkd.process import stop_signals
from pgworkd.process.redaction import escaped

if TYPE_CHECKING:
    import socket

    from pgworkd.settings.config import Settings

EXPORTER_LISTEN = "127.0.0.1:9465"
STOP_S = 10.0
"""How long a stop may take: for the question that is under way."""
ANSWER_S = 10.0
ANSWER_BYTES_MAX = 1024 * 1024
_ANY = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 # nosec B104 # where to ask, not where to listen


def exporter(
    *,
    listen: Annotated[
        str, typer.Option("--listen", metavar="HOST:PORT", help="Where to serve /metrics, /healthz and /readyz.")
    ] = EXPORTER_LISTEN,
    dsn: Dsn = None,
) -> int:
    """Serve metrics of the database to Prometheus: queues, workers, schedules and tables. One per database is enough.

    It only reads, with one connection, and needs no more than the role reader.
    """
    from pgworkd import log
    from pgworkd.core.address import parse_address
    from pgworkd.metrics import server
    from pgworkd.settings.file import quoted

    settings = settings_of(dsn)
    try:
        address = parse_address(listen)
    except ValueError as error:
        raise UsageError(f"--listen {quoted(listen)} {error}") from None
    with contextlib.closing(server.listen(address, "--listen")) as listener:
        log.configure(settings.log_level, settings.log_format)
        return int(stop_signals.run(_export, listener, settings))


async def _export(listener: socket.socket, settings: Settings) -> int:
    from pgworkd.cli.running import run_until_stopped

    return await run_until_stopped(_Exporter(listener, settings), settings, settings.notes)


class _Exporter:
    """Serves what the database shows."""

    def __init__(self, listener: socket.socket, settings: Settings) -> None:
        import anyio

        self._listener, self._settings, self._stopped = listener, settings, anyio.Event()

    async def run(self) -> int:
        """Serves metrics until it is stopped."""
        import anyio
        from anyio.from_thread import BlockingPortal

        from pgworkd import log
        from pgworkd.cli import listening
        from pgworkd.core.events import Events
        from pgworkd.metrics import endpoint
        from pgworkd.metrics.exporter import DatabaseSource
        from pgworkd.options import connection_options

        events = Events()
        events.listen(log.listener(self._settings.log_level))
        async with BlockingPortal() as portal, anyio.create_task_group() as tasks:
            source = DatabaseSource(connection_options(self._settings), portal, events)
            log.logger().info("metrics.listening", address=str(endpoint.bound(self._listener)))
            listening.observe(lambda: source)
            with endpoint.served(source, self._listener):
                tasks.start_soon(source.begin)
                await self._stopped.wait()
            tasks.cancel_scope.cancel()
            await source.close()
        return 0

    def stop(self, requests: int) -> float | None:
        """Ends the exporter."""
        self._stopped.set()
        return STOP_S if requests < 3 else None


def health(
    *,
    url: Annotated[
        str | None,
        typer.Option("--url", metavar="URL", help="Of the daemon, http://host:port; default: metrics_listen."),
    ] = None,
) -> int:
    """Ask a running daemon on its metrics port whether it is ready, and why not; exit code 0 or 1."""
    from pgworkd.settings.config import load

    host, port = _place(url) if url is not None else _own(load())
    ready, checks = _asked(host, port)
    for name, check in checks.items():
        out(escaped(f"{'ok' if check['ok'] else 'bad':<5} {name:<14} {check['says']}"))
    return 0 if ready else 1


def _own(settings: Settings) -> tuple[str, int]:
    """The address on which a daemon with these settings listens, as seen from this host."""
    from pgworkd.core.address import parse_address

    if settings.metrics_listen is None:
        raise UsageError("no address given: pass --url http://127.0.0.1:9464, or set PGWORKD_METRICS_LISTEN")
    host, port = parse_address(settings.metrics_listen)
    if port == 0:
        raise UsageError("metrics_listen has port 0: pass --url with the port that the log names (metrics.listening)")
    return _ANY.get(host, host), port


def _place(url: str) -> tuple[str, int]:
    from urllib.parse import urlsplit

    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if host is None or port is None or parts.scheme != "http" or parts.path not in ("", "/") or parts.username:
        raise UsageError("--url: give http://host:port, for example http://127.0.0.1:9464")
    return host, port


def _asked(host: str, port: int) -> tuple[bool, dict[str, dict[str, Any]]]:
    """Whether the daemon at this address is ready, and its checks. PgworkdError if it does not answer."""
    import json
    from http.client import HTTPConnection, HTTPException

    connection = HTTPConnection(host, port, timeout=ANSWER_S)  # not by urllib, which would ask a proxy
    try:
        connection.request("GET", "/readyz")
        found = json.loads(connection.getresponse().read(ANSWER_BYTES_MAX))
        return bool(found["ready"]), {name: {"ok": c["ok"], "says": c["says"]} for name, c in found["checks"].items()}
    except OSError as error:
        reason = error.strerror or str(error) or type(error).__name__
        raise PgworkdError(f"no answer from {host} port {port} ({reason}): does the daemon run there?") from None
    except (HTTPException, ValueError, KeyError, TypeError, AttributeError):
        raise PgworkdError(f"what answers at {host} port {port} is no daemon of pgworkd: check the port") from None
    finally:
        connection.close()
