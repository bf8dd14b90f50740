"""Bad inputs 75 to 82: settings in files, variables and flags, DSNs, apps and their schedules."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import psycopg

from pgworkd.core import events
from tests.engine.bad_inputs import Case, Usage, UsageCheck, bare
from tests.kits.cli import CANARY
from tests.kits.commands import NOWHERE

SHOW = ("config", "show")


# 75: the file


def file_is(make: Any, told: str) -> UsageCheck:
    """PGWORKD_CONFIG names a file that `make` creates."""

    def check(usage: Usage) -> None:
        usage.monkeypatch.setenv("PGWORKD_CONFIG", "mine.toml")
        make(usage.directory / "mine.toml")
        assert bare(*SHOW).startswith(f"mine.toml {told}")

    return check


def empty_file(usage: Usage) -> None:
    usage.write("pgworkd.toml", "")
    assert "default" in usage.shell(*SHOW).stdout


def unreadable_file(usage: Usage) -> None:
    usage.write("pgworkd.toml", "poll_s = 2")

    def denied(_: Path) -> bytes:  # root can read everything, so the error is simulated
        raise PermissionError(13, "Permission denied")

    usage.monkeypatch.setattr(Path, "read_bytes", denied)
    assert bare(*SHOW) == "pgworkd.toml cannot be read (Permission denied): check the path and its permissions"


def public_file_with_a_password(usage: Usage) -> None:
    usage.write("pgworkd.toml", f'dsn = "{NOWHERE}"\nlog_format = "json"\napp = "notes:app"\n', 0o644)
    run = usage.start("run")
    note = run.event("settings.note")["note"]
    assert note == "pgworkd.toml contains a secret and is readable by every user: chmod 600 pgworkd.toml"
    run.stop()
    assert run.ends() == 0


# 76, 77: names and values


def in_file(text: str, told: str) -> UsageCheck:
    def check(usage: Usage) -> None:
        usage.write("pgworkd.toml", text)
        assert told in bare(*SHOW)

    return check


def in_environment(name: str, value: str, told: str) -> UsageCheck:
    def check(usage: Usage) -> None:
        usage.monkeypatch.setenv(name, value)
        assert told in bare(*SHOW)

    return check


def in_flags(*flags: str, told: str) -> UsageCheck:
    def check(_: Usage) -> None:
        assert told in bare("run", *flags)

    return check


def no_queue_setting(*flags: str, told: str) -> UsageCheck:
    def check(usage: Usage) -> None:
        usage.shell("enqueue", "q")
        assert told in usage.shell.refused("queues", "set", "q", *flags)
        assert usage.shell.sql("SELECT count(*) FROM pgworkd.queues") == 0

    return check


# 78, 81: apps

APP = "from pgworkd import App\napp = App()\n"


def app_is(text: str | None, told: str, reference: str = "bad_app:app") -> UsageCheck:
    """`pgworkd run` of such a module exits with this line before it connects to the database."""

    def check(usage: Usage) -> None:
        if text is not None:
            usage.write("bad_app.py", text)
        usage.monkeypatch.setattr(sys, "path", list(sys.path))
        usage.monkeypatch.setattr(sys, "dont_write_bytecode", True)
        try:
            line = bare("run", "--dsn", NOWHERE, "--app", reference)
        finally:
            sys.modules.pop("bad_app", None)
        assert told in line
        assert CANARY not in line

    return check


def no_handlers(usage: Usage) -> None:
    usage.write("bad_app.py", APP)
    run = usage.start("run", "--app", "bad_app:app", PGWORKD_DSN=NOWHERE)
    assert run.ends() == 2
    assert run.lines == ["pgworkd: the app has no handlers: register one with @app.handler(...)"]


def schedule(every: str, told: str, **options: str) -> UsageCheck:
    given = "".join(f", {name}={value!r}" for name, value in options.items())
    return app_is(f"{APP}@app.handler('tick', every={every}{given})\ndef tick(): ...\n", told)


def schedule_in_a_row(column: str, value: str, told: str) -> UsageCheck:
    """An invalid rule that someone inserts is marked as an error and affects no other."""

    def check(usage: Usage) -> None:
        sql = "INSERT INTO pgworkd.schedules (name, queue, cron, timezone) VALUES ('bad', 'mail', %s, %s)"
        rule = {"cron": "0 0 * * *", "timezone": "UTC"} | {column: value}
        usage.shell.sql(sql, rule["cron"], rule["timezone"])
        usage.shell.sql("INSERT INTO pgworkd.schedules (name, queue, every_s) VALUES ('good', 'mail', 1)")
        run = usage.start("run", "--app", "notes:app", "--log-format", "json", PGWORKD_DSN=usage.shell.dsn)
        failed = run.event(events.SCHEDULE_FAILED)
        assert failed["schedule"] == "bad"
        assert told in failed["error"]
        run.event(events.JOB_COMPLETED)
        assert told in usage.shell.sql("SELECT error FROM pgworkd.schedules WHERE name = 'bad'")
        run.stop()
        assert run.ends() == 0

    return check


# 79, 80: DSNs

ODD_USER, ODD_PASSWORD = "o d/d@:?#[]%", "p/a?s#s@:[]%2F é"


def _dsn(usage: Usage, **changes: str) -> str:
    parts = urlsplit(usage.shell.dsn)
    at = {"user": parts.username, "password": parts.password, "at": f"{parts.hostname}:{parts.port}"} | changes
    return f"postgresql://{at['user']}:{at['password']}@{at['at']}{parts.path}"


def odd_characters(usage: Usage) -> None:
    create = psycopg.sql.SQL("CREATE ROLE {} SUPERUSER LOGIN PASSWORD {}")
    usage.shell.db.execute(create.format(psycopg.sql.Identifier(ODD_USER), psycopg.sql.Literal(ODD_PASSWORD)))
    try:
        dsn = _dsn(usage, user=quote(ODD_USER, safe=""), password=quote(ODD_PASSWORD, safe=""))
        assert usage.shell("enqueue", "q", "--dsn", dsn).exit_code == 0
        told = usage.shell.refused("queues", "--dsn", _dsn(usage, user=ODD_USER, password=CANARY + "/x"))
        assert told.startswith("dsn (flag): has a malformed host or port: percent-encode / ? # @ : [ ] in user and")
    finally:
        usage.shell.db.execute(psycopg.sql.SQL("DROP ROLE {}").format(psycopg.sql.Identifier(ODD_USER)))


def two_hosts(usage: Usage) -> None:
    parts = urlsplit(usage.shell.dsn)
    for dead in ("127.0.0.1:1", "nowhere.invalid:1"):
        dsn = _dsn(usage, at=f"{dead},{parts.hostname}:{parts.port}")
        assert usage.shell("queues", "--dsn", f"{dsn}?sslmode=disable").exit_code == 0  # one of them is not local
    told = usage.shell.refused("queues", "--dsn", _dsn(usage, at="127.0.0.1:1,127.0.0.1:2"), code=1)
    assert f"tried postgresql://{parts.username}:***@127.0.0.1:1,127.0.0.1:2{parts.path}" in told


def empty_is_unset(usage: Usage) -> None:
    usage.write("pgworkd.toml", "poll_s = 3\n")
    usage.monkeypatch.setenv("PGWORKD_POLL_S", "")
    usage.monkeypatch.setenv("PGWORKD_CONFIG", "")
    lines = [line.split() for line in usage.shell(*SHOW).stdout.splitlines()]
    assert ["poll_s", "3.0", "pgworkd.toml"] in lines
    usage.monkeypatch.setenv("PGWORKD_DSN", "")
    assert bare("jobs").startswith("no database given: set PGWORKD_DSN")
    assert bare("jobs", "--dsn", "").startswith("dsn (flag): must look like postgresql://")


def others_variables(**environ: str) -> UsageCheck:
    """Variables that libpq would use, but that the DSN overrides."""

    def check(usage: Usage) -> None:
        with usage.monkeypatch.context() as patch:  # the other connections here are the test's
            for name, value in environ.items():
                patch.setenv(name, value)
            usage.shell("enqueue", "q")
        assert usage.shell.sql("SELECT count(*) FROM pgworkd.jobs") == 1

    return check


def bad_sslmode(usage: Usage) -> None:
    """We refuse it, and name where it comes from."""
    with usage.monkeypatch.context() as patch:
        patch.setenv("PGSSLMODE", "bogus")
        assert "sslmode (environment PGSSLMODE): must be one of " in usage.shell.refused("queues")


def bad_variable(name: str, value: str, told: str, code: int = 2) -> UsageCheck:
    """Read where the DSN says nothing of it, as libpq does."""

    def check(usage: Usage) -> None:
        with usage.monkeypatch.context() as patch:
            patch.setenv(name, value)
            assert told in usage.shell.refused("queues", code=code)

    return check


# 82: a reload


def broken_reload(usage: Usage) -> None:
    file = usage.write("pgworkd.toml", 'log_level = "info"\nlog_format = "json"\n')
    run = usage.start("run", "--app", "notes:app", PGWORKD_DSN=usage.shell.dsn)
    run.event(events.DAEMON_READY)
    for text, told in _broken_files():
        said = len(run.lines)
        file.write_text(text)
        run.stop(signal.SIGHUP)
        kept = run.event("reload.rejected", after=said)
        assert (kept["level"], told in kept["error"]) == ("error", True), kept
    usage.shell.sql("INSERT INTO pgworkd.jobs (queue) VALUES ('mail')")
    run.event(events.JOB_COMPLETED)
    run.stop()
    assert run.ends() == 0


def _broken_files() -> Iterator[tuple[str, str]]:
    yield "log_level = ", "pgworkd.toml is not valid TOML"
    yield 'log_levle = "info"', "unknown setting 'log_levle', did you mean log_level?"
    yield 'log_level = "loud"', "log_level (pgworkd.toml): must be one of debug, info, warning, error, not 'loud'"
    yield 'queues = ["mial"]', "no handler serves queue 'mial': did you mean 'mail'?"
    yield "heartbeat_s = 20", "20 is more than a third of lease_s = 30"


LEASE_S = "must be a number of seconds from 5 to 3600 (or 30s, 10m, 1h), not"
NO_CRON = "give 5 fields (minute hour day month weekday), or 6 with seconds first, such as '0 7 * * *'"
CONCURRENCY = "a whole number from 1 to 10000"
A_THIRD = "11 is more than a third of lease_s = 30: set it to 10 or less, or lease_s to 33 or more"
NO_DEPENDENCY = "raised on import: ModuleNotFoundError: No module named 'nosuchthing'"
RAISED = "on import: ValueError: postgresql://nobody:***@127.0.0.1:1/nothing (bad_app.py:1)"
CASES = [
    Case(75, "a file that is missing", file_is(lambda path: None, "does not exist: correct or unset PGWORKD_CONFIG")),
    Case(75, "an empty file", empty_file),
    Case(75, "an unreadable file", unreadable_file),
    Case(75, "a file with a password that all may read", public_file_with_a_password),
    Case(75, "a directory", file_is(Path.mkdir, "is not a regular file: name a TOML file")),
    Case(75, "a FIFO", file_is(os.mkfifo, "is not a regular file: name a TOML file")),
    Case(75, "no TOML", file_is(lambda path: path.write_text("poll_s ="), "is not valid TOML: Invalid value (at")),
    Case(76, "a typo in the file", in_file("lese_s = 30", "unknown setting 'lese_s', did you mean lease_s?")),
    Case(76, "a section in the file", in_file("[pgworkd]\nlease_s = 30", "unknown setting 'pgworkd'")),
    Case(76, "a typo in a variable", in_environment("PGWORKD_LEASE", "30", "did you mean PGWORKD_LEASE_S?")),
    Case(76, "a typo in a flag", in_flags("--leese-s", "30", told="--leese-s (Possible options: --lease-s)")),
    Case(77, "a unit that there is not", in_file('lease_s = "10y"', f"(pgworkd.toml): {LEASE_S} '10y'")),
    Case(77, "text for a number", in_environment("PGWORKD_LEASE_S", "x", f"PGWORKD_LEASE_S): {LEASE_S} 'x'")),
    Case(77, "true for a number", in_file("lease_s = true", f"{LEASE_S} 'True'")),
    Case(77, "a negative number", in_flags("--shutdown-s", "-1", told="shutdown_s (flag): must be a number of")),
    Case(77, "NaN", in_file("lease_s = nan", f"{LEASE_S} 'nan'")),
    Case(77, "zero concurrency", in_flags("--queue", "a=0", told=f"concurrency of queue 'a' must be {CONCURRENCY}")),
    Case(77, "zero concurrency in a row", no_queue_setting("--concurrency", "0", told=f"'0': give {CONCURRENCY}")),
    Case(77, "a rate without a period", no_queue_setting("--rate", "10", told="--rate '10' has no period: write")),
    Case(77, "heartbeat_s above lease_s / 3", in_flags("--heartbeat-s", "11", told=f"heartbeat_s (flag): {A_THIRD}")),
    Case(78, "a cron expression of words", schedule("'daily'", f"cron 'daily': wrong number of fields; {NO_CRON}")),
    Case(78, "30 February", schedule("'0 0 30 2 *'", f"cron '0 0 30 2 *': bad day-of-month; {NO_CRON}")),
    Case(78, "a fifth Monday on the 1st", schedule("'0 0 */15 2 MON#5'", "never due between 2000-01-01")),
    Case(78, "six fields are with seconds", schedule("'60 0 0 * * *'", f"cron '60 0 0 * * *': bad second; {NO_CRON}")),
    Case(78, "seven fields", schedule("'0 0 0 * * * 2030'", f"wrong number of fields; {NO_CRON}")),
    Case(78, "minute 99", schedule("'99 * * * *'", f"cron '99 * * * *': bad minute; {NO_CRON}")),
    Case(78, "a bad zone", schedule("'0 0 * * *'", "give an IANA name such as 'UTC'", timezone="Mars/Olympus")),
    Case(78, "every 0 s", schedule("0", "every_s: give whole seconds from 1 to 31622400 (366 days)")),
    Case(78, "every NaN s", schedule("float('nan')", "every_s: give whole seconds from 1 to 31622400 (366 days)")),
    Case(78, "30 February in a row", schedule_in_a_row("cron", "0 0 30 2 *", f"bad day-of-month; {NO_CRON}")),
    Case(78, "a bad zone in a row", schedule_in_a_row("timezone", "Mars/Olympus", "'Mars/Olympus': not known; give")),
    Case(79, "odd characters in user and password", odd_characters),
    Case(79, "two hosts", two_hosts),
    Case(80, "empty variables", empty_is_unset),
    Case(80, "PGOPTIONS", others_variables(PGOPTIONS="-c statement_timeout=1")),
    Case(80, "PGSERVICE", bad_variable("PGSERVICE", "nosuch", "service 'nosuch' is not in ")),
    Case(80, "PGHOST and the like", others_variables(PGHOST="nowhere.invalid", PGUSER="nobody", PGDATABASE="nowhere")),
    Case(80, "PGPORT=x", others_variables(PGPORT="x")),
    Case(80, "PGSSLMODE=bogus", bad_sslmode),
    Case(81, "no such module", app_is(None, "module 'bad_app': No module named 'bad_app'")),
    Case(81, "a module that raises", app_is(f"raise ValueError('{NOWHERE}')", RAISED)),
    Case(81, "a module that exits", app_is("import sys\nsys.exit(3)", "on import: SystemExit: 3 (bad_app.py:2)")),
    Case(81, "no Python", app_is("def f(:\n", "raised on import: SyntaxError: invalid syntax (bad_app.py:1)")),
    Case(81, "a module that is no package", app_is(APP, "'bad_app' is not a package", "bad_app.jobs:app")),
    Case(81, "a module that lacks a dependency", app_is("import nosuchthing", NO_DEPENDENCY)),
    Case(81, "a path for a module", app_is(APP, "app (flag): must be module:attribute, for", "./bad_app.py:app")),
    Case(81, "no such attribute", app_is(APP, "has no attribute 'ap', did you mean 'app'?", "bad_app:ap")),
    Case(81, "no App", app_is("app = 7\n", "'bad_app:app' is of type int, not a pgworkd.App")),
    Case(81, "no handlers", no_handlers),
    Case(82, "SIGHUP with broken files", broken_reload),
]
