"""Bad inputs 44 to 53: wrong command lines, and the input and output of commands."""

from __future__ import annotations

import subprocess
import sys
from typing import Any
from urllib.parse import urlsplit

import psycopg

from pgworkd.database import schema
from tests.engine.bad_inputs import Case, Usage, UsageCheck, bare
from tests.kits.cli import CANARY, NOBODY, WORKER
from tests.kits.commands import NOWHERE, database, waits_until

NO_DSN = "no database given: set PGWORKD_DSN, or pass --dsn postgresql://"
HOSTILE = "\x1b]0;pwned\x07\x1b[31mred\x9b\u202ename\r"
STEERS = {*map(chr, [*range(10), *range(11, 32), *range(127, 160)]), "\u202e"}


# 45: a database that cannot be reached


def unreachable(change: dict[str, Any], code: int, told: str) -> UsageCheck:
    """The DSN with these parts changed."""

    def check(usage: Usage) -> None:
        parts = urlsplit(usage.shell.dsn)
        at = {"user": parts.username, "password": parts.password, "host": parts.hostname, "port": parts.port}
        at |= {"path": parts.path, "query": ""} | change
        dsn = f"postgresql://{at['user']}:{at['password']}@{at['host']}:{at['port']}{at['path']}?{at['query']}"
        for command in ("queues", "migrate"):
            line = usage.shell.refused(command, "--dsn", dsn.rstrip("?"), code=code)
            assert told in line
            assert CANARY not in line

    return check


# 47, 48: ids and payloads


def no_id(text: str) -> UsageCheck:
    def check(_: Usage) -> None:
        for command in ("job", "retry", "cancel", "discard", "undepend", "edit"):
            assert "Invalid value for 'ID'" in bare(command, "--", text)

    return check


def from_stdin(data: bytes, told: str) -> UsageCheck:
    def check(usage: Usage) -> None:
        assert told in usage.shell.refused("enqueue", "q", "-", stdin=data)
        assert usage.shell.sql("SELECT count(*) FROM pgworkd.jobs") == 0

    return check


def endless_stdin(usage: Usage) -> None:
    """More than fits into memory."""
    done = _in_sh(usage, "exec {pgworkd} enqueue q - < /dev/zero")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "pgworkd: standard input is larger than the 1,048,576 bytes allowed for a payload\n"


def no_stdin(usage: Usage) -> None:
    done = _in_sh(usage, "exec {pgworkd} enqueue q - <&-")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "pgworkd: standard input is empty: give a JSON object, for example {}\n"


def _in_sh(usage: Usage, script: str) -> subprocess.CompletedProcess[str]:
    environ = {"PGWORKD_DSN": usage.shell.dsn, "PATH": "/usr/bin:/bin", "PYTHONPATH": ":".join(filter(None, sys.path))}
    text = script.replace("{pgworkd}", f"{sys.executable} -m pgworkd.cli")
    return subprocess.run(["sh", "-c", text], env=environ, capture_output=True, text=True, timeout=20, check=False)


# 49, 50: output


def reader_that_leaves(usage: Usage) -> None:
    usage.shell.sql(
        "INSERT INTO pgworkd.jobs (queue, error) SELECT 'q', repeat('x', 4000) FROM generate_series(1, 1000)"
    )
    command = usage.start("jobs", "--limit", "1000", stdout=subprocess.PIPE, PGWORKD_DSN=usage.shell.dsn)
    assert command.process.stdout is not None
    assert command.process.stdout.readline().startswith("ID")
    command.process.stdout.close()
    assert command.ends() == 0
    assert command.lines == []


def stdout_closed(usage: Usage) -> None:
    done = _in_sh(usage, "exec {pgworkd} enqueue q >&-")
    assert (done.returncode, done.stderr) == (0, "")
    assert usage.shell.sql("SELECT count(*) FROM pgworkd.jobs") == 1


def stdout_full(usage: Usage) -> None:
    done = _in_sh(usage, "exec {pgworkd} queues > /dev/full")
    assert done.returncode == 1
    assert done.stderr == "pgworkd: standard output cannot be written: No space left on device\n"


def escapes(usage: Usage) -> None:
    shell = usage.shell
    job_id = shell.die(HOSTILE, kind=HOSTILE, error=HOSTILE, errors=f'[{{"message": "{_json(HOSTILE)}"}}]')
    shell.sql(WORKER, HOSTILE, "1 min")
    shell.sql("INSERT INTO pgworkd.schedules (name, queue, every_s) VALUES (%s, %s, 60)", HOSTILE, HOSTILE)
    shell.sql("SELECT pgworkd.create_batch(%s, %s)", HOSTILE, HOSTILE)
    shell("pause", HOSTILE)
    commands = ["jobs", "queues", "workers", "schedules", "doctor", "audit", "batches", "stats"]
    for args in [
        *((name,) for name in commands),
        ("jobs", "--json"),
        ("job", job_id),
        ("queues", "show", HOSTILE),
        ("retry", job_id),
    ]:
        result = shell(*args)
        assert not STEERS & set(result.stdout + result.stderr), args
    for args in (("resume", "\x1b[31m"), ("jobs", "--queue", "\x9b31m"), ("enqueue", "q", "\x1b")):
        assert not STEERS & set(shell.refused(*args)), args
    assert r"\x1b]0;pwned\x07\x1b[31mred\x9b\u202ename\r" in shell("jobs").stdout


def _json(text: str) -> str:
    return "".join(f"\\u{ord(c):04x}" for c in text)


# 46, 51: refused without any effect


def nothing_is_done(*args: str, told: str) -> UsageCheck:
    """The command is refused, and the only job, which is dead, is not changed."""

    def check(usage: Usage) -> None:
        job_id = usage.shell.die("mail")
        assert told in usage.shell.refused(*args)
        assert usage.shell.status(job_id) == "dead"
        assert usage.shell.sql("SELECT count(*) FROM pgworkd.audit") == 0

    return check


def wrong(*args: str, told: str) -> UsageCheck:
    """Refused regardless of the database."""

    def check(_: Usage) -> None:
        assert told in bare(*args)

    return check


def mistyped_queue_of_a_daemon(usage: Usage) -> None:
    run = usage.start("run", "--app", "notes:app", "--queue", "mial", PGWORKD_DSN=NOWHERE)
    assert run.ends() == 2
    assert run.lines == ["pgworkd: queues (flag): no handler serves queue 'mial': did you mean 'mail'?"]


# 52, 53: schemas


def other_schema(version: int, remedy: str) -> UsageCheck:
    def check(usage: Usage) -> None:
        usage.shell.sql("UPDATE pgworkd.schema_version SET version = %s", version)
        told = [usage.shell.refused(command) for command in ("jobs", "stats", "queues")]
        if version > schema.VERSION:  # an older one is waited for
            run = usage.start("run", "--app", "notes:app", PGWORKD_DSN=usage.shell.dsn)
            assert run.ends() == 2
            told += [run.lines[-1], usage.shell.refused("migrate")]
        for line in told:
            assert f"the schema is at version {version}, " in line
            assert line.endswith(f": {remedy}")
        assert remedy in usage.shell("doctor", code=1).stdout
        assert usage.shell.sql("SELECT version FROM pgworkd.schema_version") == version

    return check


def no_schema(usage: Usage) -> None:
    assert "run pgworkd migrate" in usage.shell.refused("jobs", "--dsn", usage.empty_dsn)


def two_migrations(usage: Usage) -> None:
    waits = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
    with database(usage.empty_dsn) as watcher, psycopg.connect(usage.empty_dsn) as first:
        first.execute("SELECT pg_advisory_xact_lock(%s, %s)", schema._LOCK)
        commands = [usage.start("migrate", "--dsn", usage.empty_dsn, stdout=subprocess.PIPE) for _ in range(2)]
        waits_until(lambda: watcher.execute(waits).fetchone() == (2,))
        first.commit()
        assert [command.ends() for command in commands] == [0, 0]
        assert watcher.execute("SELECT version FROM pgworkd.schema_version").fetchall() == [(schema.VERSION,)]
    assert [command.lines for command in commands] == [[], []]


UNKNOWN_QUEUE = "unknown queue 'mial': did you mean 'mail'?"
COMMANDS: list[tuple[str, ...]] = [
    *((name,) for name in ("jobs", "queues", "migrate", "run", "doctor", "audit", "schedules", "workers", "batches")),
    ("enqueue", "q"),
    ("job", NOBODY),
    ("stats", "--metric", "depth"),
    ("retry", "--all", "--yes"),
]
CASES = [
    *[Case(44, f"{args[0]} without a DSN", wrong(*args, told=NO_DSN)) for args in COMMANDS],
    Case(45, "a wrong password", unreachable({"password": CANARY}, 2, "password authentication failed")),
    Case(45, "an unknown user", unreachable({"user": "nobody"}, 2, "nobody")),
    Case(45, "an unknown database", unreachable({"path": "/none"}, 2, 'database "none" does not exist')),
    Case(45, "an unknown host", unreachable({"host": "nowhere.invalid"}, 1, "check the host name")),
    Case(45, "a closed port", unreachable({"port": "1"}, 1, "is Postgres up at that host and port?")),
    Case(
        45,
        "TLS that is not offered",
        unreachable({"query": "sslmode=require"}, 1, "the server offers no TLS. Turn it on there"),
    ),
    Case(46, "an unknown command", wrong("quues", told="No such command 'quues'. Did you mean 'queues'")),
    Case(
        46, "an unknown command of a group", wrong("queues", "shwo", told="No such command 'shwo'. Did you mean 'show'")
    ),
    Case(
        46, "an unknown flag", wrong("jobs", "--quue", "x", told="No such option: --quue (Possible options: --queue)")
    ),
    *[
        Case(46, f"{' '.join(args)}: an unknown queue", nothing_is_done(*args, told=UNKNOWN_QUEUE))
        for args in (
            ("jobs", "--queue", "mial"),
            ("pause", "mial"),
            ("resume", "mial"),
            ("queues", "show", "mial"),
            ("queues", "set", "mial", "--fair"),
        )
    ],
    Case(46, "a queue that the app does not know", mistyped_queue_of_a_daemon),
    *[Case(47, f"id {text or 'empty'}", no_id(text)) for text in ("abc", "-1", str(2**70), "", "1" * 5000)],
    Case(47, "id -1 as a flag", wrong("job", "-1", told="No such option: -1")),
    Case(48, "an empty stdin", from_stdin(b" \n", "standard input is empty: give a JSON object, for example {}")),
    Case(48, "a closed stdin", no_stdin),
    Case(48, "no UTF-8 in stdin", from_stdin(b'{"a":"\xff"}', "standard input is not UTF-8: byte 6 is 0xff")),
    Case(48, "no object in stdin", from_stdin(b"[1]", "payload is a JSON array: an object is needed")),
    Case(48, "half an object in stdin", from_stdin(b'{"a": ', "payload cannot be read")),
    Case(48, "an endless stdin", endless_stdin),
    Case(49, "a reader that leaves", reader_that_leaves),
    Case(49, "a closed stdout", stdout_closed),
    Case(49, "a full disk", stdout_full),
    Case(50, "escapes in names and errors", escapes),
    *[
        Case(51, f"{act} --all", nothing_is_done(act, "--all", told=f"{act} all {what} of all queues: add --yes"))
        for act, what in (("retry", "dead jobs"), ("cancel", "jobs"), ("discard", "dead jobs"))
    ],
    Case(52, "an older schema", other_schema(0, "run pgworkd migrate")),
    Case(52, "a newer schema", other_schema(99, "upgrade pgworkd on this host")),
    Case(52, "no schema", no_schema),
    Case(53, "migrations at once", two_migrations),
]
