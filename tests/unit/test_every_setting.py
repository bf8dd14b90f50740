"""Every setting is read by every program that it concerns, and reaches its options."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import psycopg
import pytest

from pgworkd import ConnectionOptions
from pgworkd.alerts.mail import send_mail
from pgworkd.cli import serve, watching
from pgworkd.engine.life.daemon import Daemon, DaemonOptions
from pgworkd.engine.life.maintenance import Periods
from pgworkd.gateway.api.app import asgi
from pgworkd.gateway.api.request.gateway import GatewayOptions
from pgworkd.gateway.api.server import Server
from pgworkd.options import connection_options, daemon_options, gateway_options
from pgworkd.process import stop_signals
from pgworkd.processes.autoscaler import Autoscaler
from pgworkd.processes.supervisor import Supervisor
from pgworkd.settings import config
from pgworkd.settings.config import Settings
from tests.kits.cli import clean, invoke

__all__ = ["clean"]

DSN = "postgresql://nobody@127.0.0.1:1/nothing"
STANDBY = "postgresql://nobody@127.0.0.2:1/nothing"
TOKEN = "token = 'pgw_7_s3cr3t'\n"

_OF_GATEWAYS = {name: "of a gateway" for name in Settings.model_fields if name.startswith("http_")}
_OF_PUSH = dict.fromkeys(("secrets_dir", "callback_url"), "of pgworkd push")
_OF_MAIL = dict.fromkeys(("smtp_url", "smtp_from"), "read when a mail is sent: see below")
_OF_REMOTE = dict.fromkeys(("remote", "token"), "this program works in the database itself")
_OF_DAEMONS = {
    **dict.fromkeys(("app", "queues"), "runs no handlers, and serves no queue"),
    **dict.fromkeys(("transactions_max", "slow_min_s", "slow_factor", "stacks"), "runs no handlers"),
    **dict.fromkeys(("lease_s", "heartbeat_s"), "a gateway's own lease is the shortest: remote workers rely on it"),
    "processes": "is one process; it may be started several times",
    "metrics_listen": "serves /metrics, /healthz and /readyz on its own port",
}
_WATCHES = dict.fromkeys(
    """
        app queues processes lease_s heartbeat_s poll_s shutdown_s transactions_max keep_days keep_dead_days
        statistics stacks slow_min_s slow_factor environment loop_limit_s
    """.split(),
    "is no worker: it claims nothing and maintains nothing",
)
_COMMAND = {
    **_WATCHES,
    **_OF_GATEWAYS,
    **_OF_PUSH,
    **_OF_MAIL,
    **_OF_REMOTE,
    **dict.fromkeys(("log_level", "log_format", "metrics_listen"), "prints what it does, and ends"),
    "worker_name": "is no worker",
}
UNREAD: dict[str, dict[str, str]] = {
    "run": {**_OF_GATEWAYS, **_OF_PUSH, **_OF_MAIL, "token": "of --remote"},
    "run --processes": {**_OF_GATEWAYS, **_OF_PUSH, **_OF_MAIL, "token": "of --remote"},
    "run --remote": {**_OF_GATEWAYS, **_OF_PUSH, **_OF_MAIL, "dsn": "has no database"},
    "push": {**_OF_GATEWAYS, **_OF_MAIL, "token": "of --remote", "app": "has no application"},
    "serve": {
        **{name: why for name, why in _OF_DAEMONS.items() if name != "metrics_listen"},
        **_OF_PUSH,
        **_OF_MAIL,
        **_OF_REMOTE,
    },
    "asgi": {
        **_OF_DAEMONS,
        **_OF_PUSH,
        **_OF_MAIL,
        **_OF_REMOTE,
        **dict.fromkeys(
            "http_listen http_proxies http_hosts http_auth shutdown_s log_level log_format metrics_listen".split(),
            "of the server around it",
        ),
    },
    "exporter": {
        **_WATCHES,
        **_OF_GATEWAYS,
        **_OF_PUSH,
        **_OF_MAIL,
        **_OF_REMOTE,
        "worker_name": "is no worker",
        "metrics_listen": "would be the address of a daemon of this environment: it has --listen",
    },
    "autoscale": {**_WATCHES, **_OF_GATEWAYS, **_OF_PUSH, **_OF_MAIL, **_OF_REMOTE},
    "migrate": _COMMAND,
    "stats": _COMMAND,
    "doctor": {name: why for name, why in _COMMAND.items() if name != "environment"},
    "adopt --yes": {name: why for name, why in _COMMAND.items() if name != "environment"},
    "bench --clean": _COMMAND,
    "endpoints test": {name: why for name, why in _COMMAND.items() if name != "secrets_dir"},
    "health": {
        **{name: why for name, why in _COMMAND.items() if name != "metrics_listen"},
        **dict.fromkeys(("dsn", "connect_timeout_s", "command_timeout_s"), "asks a daemon over HTTP"),
    },
}
"""Of each program: the settings that it does not read, and why."""
ARGUMENTS = {
    "run": ["run", "--app", "walked:app"],
    "run --processes": ["run", "--app", "walked:app", "--processes", "2"],
    "run --remote": ["run", "--app", "walked:app", "--remote", "http://127.0.0.1:1"],
    "serve": ["serve", "--auth", "none", "--listen", "127.0.0.1:0"],
    "exporter": ["exporter", "--listen", "127.0.0.1:0"],
    "autoscale": ["autoscale", "-q", "q", "--max", "2", "--up-at", "2", "--down-at", "1", "--", "true"],
    "endpoints test": ["endpoints", "test", "e"],
}
LOGGED = ("run", "run --processes", "run --remote", "push", "serve", "exporter", "autoscale")
"""The programs with a log, in which the notes of the settings stand."""


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The settings that something outside `settings/` reads from now on."""
    found: set[str] = set()
    plain = Settings.__getattribute__
    inside = str(Path(config.__file__).parent)

    def reading(self: Settings, name: str) -> Any:
        if name in Settings.model_fields:
            frame = sys._getframe(1)
            if frame.f_code.co_name == f"{name}_required":
                frame = frame.f_back or frame
            if not frame.f_code.co_filename.startswith(inside):
                found.add(name)
        return plain(self, name)

    monkeypatch.setattr(Settings, "__getattribute__", reading)
    return found


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Programs that are over as soon as they have been set up, in an environment with a note."""

    async def over(*_: Any, **__: Any) -> int:
        return 0

    for kind in (Daemon, Supervisor, Autoscaler):
        monkeypatch.setattr(kind, "run", over)
    monkeypatch.setattr(Server, "serve", over)
    monkeypatch.setattr(watching, "_asked", lambda *_: (True, {}))
    monkeypatch.setattr(stop_signals, "ignore", lambda: None)
    monkeypatch.setitem(stop_signals._state, "asked", True)
    monkeypatch.setattr(serve, "spare_collector", lambda: None)
    monkeypatch.setattr(serve, "_left", lambda code: code)
    monkeypatch.setenv("PGWORKD_DSN", DSN)
    monkeypatch.setenv("PGWORKD_METRICS_LISTEN", "127.0.0.1:9464")
    (tmp_path / "pgworkd.toml").write_text(TOKEN)
    (tmp_path / "pgworkd.toml").chmod(0o644)
    (tmp_path / "walked.py").write_text("from pgworkd import App\napp = App()\n@app.handler('q')\nasync def q(): ...\n")
    yield
    sys.modules.pop("walked", None)


def outcome(program: str, dsn: str) -> str:
    """Runs it; what it has printed."""
    if program == "asgi":
        asgi(DSN)
        return ""
    listen = {} if program == "health" or program in LOGGED[3:4] else {"PGWORKD_METRICS_LISTEN": "127.0.0.1:0"}
    result = invoke(ARGUMENTS.get(program, program.split()), env={"PGWORKD_DSN": dsn, **listen})
    assert "Traceback" not in result.stderr
    assert "internal error" not in result.stderr
    return result.stderr


@pytest.mark.parametrize("program", UNREAD)
def test_every_setting_is_read_by_every_program_or_listed(
    program: str, read: set[str], short: None, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with psycopg.connect(dsn) as db:
        db.execute("INSERT INTO pgworkd.endpoints (name, url, unsigned) VALUES ('e', 'https://x.test/', true)")
    monkeypatch.setattr("pgworkd.push.test_message.attempted", _answered)
    said = outcome(program, dsn)
    assert Settings.model_fields.keys() - read == UNREAD[program].keys(), said
    assert program not in LOGGED or "pgworkd.toml contains a" in said, said


async def _answered(*_: Any) -> tuple[bool, str]:
    return True, "200"


def test_mail_reads_its_settings_when_it_is_sent(read: set[str], short: None) -> None:
    with pytest.raises(Exception, match="smtp"):
        anyio.run(send_mail, "a@example.com", "s", "t", "k")
    assert "smtp_url" in read


def _distinct() -> dict[str, Any]:
    """A value for each number that no other has, so that none can stand in for another."""
    numbers = (int, float, int | None, float | None)
    names = [name for name, field in Settings.model_fields.items() if field.annotation in numbers]
    values: dict[str, Any] = {name: 41 + number for number, name in enumerate(names)}
    values |= {
        "lease_s": 900,
        "heartbeat_s": 42,
        "poll_s": 7,
        "loop_limit_s": 6,
        "connect_timeout_s": 8,
        "command_timeout_s": 9,
    }
    values |= {"http_user_header": "X-User", "http_user_scopes": "operate", "http_dashboard_dsn": STANDBY}
    values |= {"http_mask": "payload.a", "http_frame_url": "https://m.test/x"}
    return values | {"statistics": "off", "stacks": "off", "worker_name": "w7", "environment": "e7", "dsn": DSN}


def test_each_value_reaches_its_option() -> None:
    given = _distinct()
    settings = Settings(**given)
    connection = ConnectionOptions(DSN, 8, 9)
    periods = Periods(keep_days=given["keep_days"], keep_dead_days=given["keep_dead_days"])
    shared = ("lease_s", "heartbeat_s", "poll_s", "shutdown_s", "transactions_max", "slow_min_s", "slow_factor")
    named = {name: given[name] for name in (*shared, "loop_limit_s")}
    assert connection_options(settings) == connection
    assert daemon_options(settings) == DaemonOptions(
        connection, worker_name="w7", environment="e7", statistics=False, stacks=False, periods=periods, **named
    )
    assert gateway_options(settings) == GatewayOptions(
        connection,
        connections_max=given["http_connections_max"],
        waiters_max=given["http_waiters_max"],
        requests_per_s=given["http_requests_per_s"],
        hosts=None,
        name="w7",
        poll_s=7,
        statistics=False,
        periods=periods,
        environment="e7",
        loop_limit_s=given["loop_limit_s"],
        dashboard_database=ConnectionOptions(STANDBY, 8, 9),
        user_header=given["http_user_header"],
        user_scopes={given["http_user_scopes"]: None},
        mask=(given["http_mask"],),
        frame_url=given["http_frame_url"],
    )


def test_a_daemon_in_an_application_has_the_defaults_of_the_settings() -> None:
    assert daemon_options(Settings(dsn=DSN)) == DaemonOptions(ConnectionOptions(DSN))


@pytest.mark.parametrize(
    ("parts", "served"),
    [
        ("api", (True, False, False)),
        ("workers", (False, True, False)),
        ("workers, api", (True, True, False)),
        ("dashboard", (False, False, True)),
    ],
)
def test_a_gateway_has_the_parts_of_http_with(parts: str, served: tuple[bool, bool, bool]) -> None:
    found = gateway_options(Settings(dsn=DSN, http_with=parts))
    assert (found.api, found.workers, found.dashboard) == served


@pytest.mark.parametrize("address", ["127.0.0.1", "::1", "10.1.2.3"])
def test_a_gateway_may_be_called_by_its_address_and_the_names_given(address: str) -> None:
    found = gateway_options(Settings(dsn=DSN, http_hosts="Jobs.Example.COM"), address)
    assert {"jobs.example.com", "localhost", f"[{address}]" if ":" in address else address} <= set(found.hosts or ())


Make = Callable[[Settings], Any]


@pytest.mark.parametrize("make", [daemon_options, gateway_options, connection_options])
def test_what_options_are_made_of_is_complete(make: Make, read: set[str]) -> None:
    """Every option that has a setting's name is read from that setting."""
    made = make(Settings(dsn=DSN))
    names = set(type(made).__dataclass_fields__) & Settings.model_fields.keys()
    assert names <= read
