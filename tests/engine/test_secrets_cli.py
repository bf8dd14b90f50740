"""No command prints the password, whatever is wrong with the DSN or the other arguments."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

import pytest
import typer

from pgworkd.cli import fleet
from pgworkd.cli.app import app
from tests.engine.test_secrets import broken
from tests.kits.cli import clean, invoke
from tests.kits.schema import PASSWORDS, leaks, secret_dsn

pytestmark = pytest.mark.slow("commands and daemons in processes of their own")

__all__ = ["clean", "secret_dsn"]  # fixtures

ID = str(uuid.UUID(int=7))
COMMANDS = {
    "migrate": [],
    "adopt": ["--yes"],
    "enqueue": ["q"],
    "jobs": [],
    "job": [ID],
    "explain": [ID],
    "stack": [ID],
    "replay": [ID],
    "retry": [ID],
    "cancel": ["--queue", "q", "--yes"],
    "discard": [ID],
    "undepend": [ID],
    "edit": [ID, "--priority", "1"],
    "audit": [],
    "pause": ["q"],
    "resume": ["q"],
    "workers": [],
    "schedules": [],
    "schedules disable": ["nightly"],
    "schedules enable": ["nightly"],
    "schedules remove": ["nightly", "--yes"],
    "schedules run-now": ["nightly"],
    "stats": [],
    "doctor": [],
    "config show": [],
    "health": [],
    "grants": [],
    "queues": [],
    "queues show": ["q"],
    "queues set": ["q", "--concurrency", "1"],
    "queues pause": ["q"],
    "queues resume": ["q"],
    "batches": [],
    "batches show": [ID],
    "batches seal": [ID],
    "batches cancel": [ID],
    "batches delete": [ID],
    "keys": [],
    "operations": [],
    "operations stop": ["1"],
    "keys free": ["q", "k"],
    "alerts": [],
    "grafana": [],
    "dead": [],
    "mute": ["1", "--until", "2h"],
    "token add": ["n", "--scope", "read"],
    "token list": [],
    "token revoke": ["abcdefgh"],
    "endpoints": [],
    "endpoints show": ["e"],
    "endpoints add": ["e", "https://example.com/", "--unsigned"],
    "endpoints set": ["e", "--timeout-s", "5"],
    "endpoints test": ["e"],
    "endpoints disable": ["e"],
    "endpoints enable": ["e"],
    "endpoints remove": ["e"],
}
"""Each with arguments that let it reach the database."""
OFFLINE = {"config show", "grants", "health", "alerts", "grafana"}
"""They do not use the database."""
NO_SETTINGS = {"grants", "alerts", "grafana"}
"""They read none."""
SERVICES = {"run", "push", "dev", "demo", "autoscale", "exporter", "bench", "conformance", "serve"}
"""They run until stopped: tests/engine/test_secrets.py checks them as processes."""
AUTOSCALE = ["-q", "q", "--max", "1", "--up-at", "9", "--down-at", "1", "--", "true"]
MISPLACED = {
    "a slash": "postgresql://u:c4n4ry/t41l@h/db",
    "a question mark": "postgresql://u:c4n4ry?t41l@h/db",
    "a hash": "postgresql://u:c4n4ry#t41l@h/db",
    "an @": "postgresql://u:c4n4ry@t41l@h/db",
    "a line break": "postgresql://u:c4n4ry\nt41l@h/db",
    "another scheme": "mysql://u:c4n4ryt41l@h/db",
    "words": "host=h password=c4n4ryt41l",
}


def leaves(command: Any, path: tuple[str, ...] = ()) -> Iterator[str]:
    """Every command that does something, as its words."""
    inner = getattr(command, "commands", {})
    if path and (not inner or command.invoke_without_command):
        yield " ".join(path)
    for name, each in inner.items():
        yield from leaves(each, (*path, name))


def said(*args: str, **environ: str) -> tuple[int, str]:
    """The exit code and the whole output of a command."""
    result = invoke(list(args), env={"PGWORKD_CONNECT_TIMEOUT_S": "1", **environ})
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout + result.stderr


def test_every_command_is_covered() -> None:
    assert set(leaves(typer.main.get_command(app))) == COMMANDS.keys() | SERVICES


@pytest.mark.parametrize("how", broken("postgresql://"))
def test_no_password_when_a_command_cannot_reach_the_database(dsn: str, how: str) -> None:
    address = broken(dsn)[how]
    for number, (name, args) in enumerate(COMMANDS.items()):
        way = ["--dsn", address] if number % 2 and name not in OFFLINE else []
        code, text = said(*name.split(), *args, *way, PGWORKD_DSN=address)
        assert code in (1, 2) or name in OFFLINE
        assert text
        assert not leaks(text)


@pytest.mark.parametrize("how", MISPLACED)
def test_no_password_when_the_dsn_is_malformed(how: str) -> None:
    address = MISPLACED[how]
    for name, args in (COMMANDS | {"run": ["--app", "x:y"], "autoscale": AUTOSCALE}).items():
        code, text = said(*name.split(), *args, PGWORKD_DSN=address)
        assert code == (0 if name in NO_SETTINGS else 2), name
        assert not leaks(text)


@pytest.mark.parametrize("name", sorted(COMMANDS.keys() | SERVICES))
def test_no_password_when_the_dsn_is_misplaced(name: str) -> None:
    args = COMMANDS.get(name, [])
    for password in PASSWORDS.values():
        address = f"postgresql://u:{password}@127.0.0.1:1/db"
        for words in ([*args, address], [*args, f"--nonsense={address}"]):
            code, text = said(*name.split(), *words)
            assert code in (1, 2)
            assert not leaks(text), words
        assert not leaks(said(address)[1])


FLAGS = ("--lease-s", "--processes", "--log-level", "--log-format", "--app", "--queue", "--worker-name")


@pytest.mark.parametrize(
    "command",
    [
        *(("run", flag) for flag in (*FLAGS, "--metrics-listen")),
        ("exporter", "--listen"),
        ("health", "--url"),
        ("serve", "--listen"),
        ("serve", "--hosts"),
    ],
)
def test_no_password_when_the_dsn_is_the_value_of_another_option(command: tuple[str, str]) -> None:
    for password in PASSWORDS.values():
        address = f"postgresql://u:{password}@127.0.0.1:1/db"
        code, text = said(*command, address, PGWORKD_DSN=address)
        assert code == 2
        assert not leaks(text)


@pytest.mark.parametrize("secret_dsn", ["encoded"], indirect=True)
@pytest.mark.parametrize("how", ["json", "text"])
def test_no_password_when_a_command_succeeds(secret_dsn: str, how: str) -> None:
    can = ("jobs", "stats", "workers", "doctor", "queues", "audit", "batches")
    for name in can if how == "json" else COMMANDS:
        flags = ["--json"] if how == "json" else []
        assert not leaks(said(*name.split(), *COMMANDS[name], *flags, PGWORKD_DSN=secret_dsn)[1]), name
    assert "***@" in said("doctor", PGWORKD_DSN=secret_dsn)[1]
    shown = said("config", "show", PGWORKD_DSN=secret_dsn, PGWORKD_HTTP_DASHBOARD_DSN=secret_dsn)[1]
    assert (shown.count("***@"), leaks(shown)) == (2, leaks(""))


def test_no_password_in_the_traceback_of_a_bug(secret_dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken_table(*_: object) -> None:
        raise RuntimeError(f"cannot draw {secret_dsn}\x1b[2J\nat all")

    monkeypatch.setattr(fleet, "table", broken_table)
    for level in ("info", "debug"):
        code, text = said("stats", PGWORKD_DSN=secret_dsn, PGWORKD_LOG_LEVEL=level)
        assert code == 1
        assert "internal error, please report it: RuntimeError: cannot draw postgresql://canary" in text
        assert ("Traceback" in text) == (level == "debug")
        assert not leaks(text)
        assert "\x1b" not in text
        assert all(line.startswith("pgworkd: ") for line in text.splitlines())
