"""The commands against a real database, as a careless or hostile user would type them."""

from __future__ import annotations

import json

import pytest
import typer.main
from anyio.to_thread import run_sync
from click.testing import CliRunner

from pgworkd.cli.app import app, called
from pgworkd.database import schema
from tests.kits.cli import COMMAND, NOBODY, UUID_LINE, Shell, clean, run_bare, shell
from tests.kits.schema import granted
from tests.kits.verbs import Db

__all__ = ["clean", "shell"]  # fixtures


# Wrong usage. The numbered ones are in test_bad_usage.py.


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (("jobs", "--que", "x"), "No such option: --que"),
        (("run", "--token", "x"), "No such option: --token. It is a setting: set PGWORKD_TOKEN (see"),
        (("serve", "--keep-days", "3"), "No such option: --keep-days. It is a setting: set PGWORKD_KEEP_DAYS (see"),
        (("cancel", "-q", "x", "--queue", "y", "-y"), "'--queue' / '-q': given more than once"),
        (("queues", "set", "x", "--rate", "1/s", "--rate", "2/s"), "'--rate': given more than once"),
        (("jobs", "--status", "deda"), "Invalid value for '--status'"),
        (("jobs", "--limit", "0"), "Invalid value for '--limit' / '-n': must be 1 or more, not '0'"),
        (("jobs", "--limit", "foo"), "Invalid value for '--limit' / '-n': must be a whole number, not 'foo'"),
        (("jobs", "--limit", "1.5"), "must be a whole number, not '1.5'"),
        (("job", "xyz"), "Invalid value for 'ID': must be a UUID, like"),
        (
            ("enqueue", "q", "--delay-s", "soon"),
            "--delay-s 'soon': give seconds, or a duration such as 90s, 10m, 1h or 7d",
        ),
        (("jobs", "--limit", "1001"), "Invalid value for '--limit'"),
        (("job",), "Missing argument 'ID'"),
        (("retry",), "no jobs selected: give ids, a filter such as --queue, or --all for all queues"),
        (("retry", "--dead"), "no jobs selected"),
        (("retry", NOBODY, "--all"), "not both"),
        (("retry", "--dead", "--status", "failed", "--all"), "--dead and --status failed: give one of them"),
        (("cancel",), "no jobs selected: give ids, a filter such as --queue"),
        (("cancel", "--status", "pending"), "no jobs selected"),
        (("cancel", "--batch", "7", "--all"), "Invalid value for '--batch'"),
        (("cancel", NOBODY, "--limit", "0"), "Invalid value for '--limit'"),
        (("cancel", NOBODY, "--queue", "q"), "not both"),
        (("discard",), "no jobs selected: give ids, a filter such as --queue"),
        (("edit",), "Missing argument 'ID'"),
        (("edit", NOBODY, "--priority", str(-(2**31) - 1)), "Invalid value for '--priority'"),
        (("edit", NOBODY, "--run-at", "soon"), "--run-at 'soon': give an instant like 20"),
        (("audit", "--limit", "1001"), "Invalid value for '--limit'"),
        (("enqueue",), "Missing argument 'QUEUE'"),
        (("enqueue", "q", "--priority", str(2**31)), "must be 2147483647 or less, not '2147483648'"),
        (("enqueue", "q", "--max-attempts", "0"), "Invalid value for '--max-attempts'"),
        (("enqueue", "q", "--run-at", "soon"), "--run-at 'soon': give an instant like 20"),
        (("enqueue", "q", "--run-at", "2030-01-01T00:00:00"), "has no time zone"),
        (("stats", "--metric", "height"), "Invalid value for '--metric': 'height' is not one of 'depth', "),
        (("jobs", "--dsn", "mysql://x"), "dsn (flag): must look like postgresql://"),
        (("run", "--dsn", "postgresql://h/d"), "no app given: set PGWORKD_APP, or pass --app"),
        (("run", "--lease-s", "4s"), "lease_s (flag): must be a number of seconds"),
    ],
)
def test_wrong_usage_prints_one_line_and_exits_with_2(args: tuple[str, ...], line: str) -> None:
    result = run_bare(*args)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"pgworkd: {line}") or line in result.stderr
    assert result.stderr.count("\n") == 1
    assert not result.stdout


def test_without_a_command_the_help_is_printed() -> None:
    assert "enqueue" in run_bare().stdout
    assert run_bare("--help").exit_code == run_bare("jobs", "-h").exit_code == 0
    assert run_bare("--version").stdout == "pgworkd 0.1.0\n"


def test_migrate_prints_both_versions_and_is_idempotent(shell: Shell, empty_dsn: str) -> None:
    told = f"before, {schema.VERSION} now\n"
    assert shell("migrate", "--dsn", empty_dsn).stdout == f"schema version: none {told}"
    assert shell("migrate", "--dsn", empty_dsn).stdout == f"schema version: {schema.VERSION} {told}"
    assert run_bare("migrate", "--print").stdout == schema.script()


def test_migrate_check_tells_by_its_exit_code_and_changes_nothing(shell: Shell, empty_dsn: str) -> None:
    def check(dsn: str, code: int) -> str:
        return str(shell("migrate", "--check", "--dsn", dsn, code=code).stdout)

    assert check(empty_dsn, 1) == "this database has no pgworkd schema: run pgworkd migrate\n"
    current = f"the schema is up to date: version {schema.VERSION}\n"
    assert check(shell.dsn, 0) == current  # psql has installed it: the version alone tells
    for version, said in (
        (schema.VERSION - 1, f"this program needs {schema.VERSION}: run pgworkd migrate\n"),
        (schema.VERSION + 1, f"newer than this program ({schema.VERSION}): upgrade pgworkd on this host\n"),
    ):
        shell.sql("UPDATE pgworkd.schema_version SET version = %s", version)
        assert check(shell.dsn, 1) == f"the schema is at version {version}, {said}"
        assert shell.sql("SELECT version FROM pgworkd.schema_version") == version
    shell.sql("UPDATE pgworkd.schema_version SET version = %s", schema.VERSION)
    shell("migrate")
    assert check(shell.dsn, 0) == current
    shell.sql("UPDATE pgworkd.schema_version SET script = 'x'")
    assert check(shell.dsn, 1).endswith("or for another version of Postgres: run pgworkd migrate\n")
    assert shell.refused("migrate", "--check", "--force").startswith("--print, --force and --check exclude each other")


@pytest.mark.parametrize("role", ["reader", "enqueuer", "worker", "gateway"])
async def test_migrate_check_needs_no_right_to_write(dsn: str, db: Db, shell: Shell, role: str) -> None:
    async with granted(dsn, db) as roles:
        shell.dsn = roles.dsn(role)
        assert "up to date" in (await run_sync(lambda: shell("migrate", "--check"))).stdout


# Jobs


def test_enqueue_prints_the_id_of_the_inserted_job(shell: Shell) -> None:
    result = shell("enqueue", "mail", '{"n": 0.12345678901234567890}', "--kind", "welcome", "--priority", "-5")
    assert UUID_LINE.fullmatch(result.stdout)
    row = shell.db.execute("SELECT queue, kind, payload->>'n', priority, status::text FROM pgworkd.jobs").fetchone()
    assert row == ("mail", "welcome", "0.12345678901234567890", -5, "pending")
    shell("enqueue", "later", "--delay-s", "60")
    assert shell.sql("SELECT run_at BETWEEN now() + '55 s' AND now() + '61 s' FROM pgworkd.jobs WHERE queue = 'later'")
    shell("enqueue", "then", "--run-at", "2030-01-31T07:00:00+01:00", "--max-attempts", "7")
    then = "SELECT run_at = '2030-01-31 06:00+00' AND max_attempts = 7 FROM pgworkd.jobs WHERE queue = 'then'"
    assert shell.sql(then)


def test_a_taken_dedupe_key_reports_the_job_that_has_it(shell: Shell) -> None:
    first = shell("enqueue", "q", "--dedupe-key", "k").stdout
    second = shell("enqueue", "q", "--dedupe-key", "k")
    assert second.stdout == first
    assert "nothing inserted: this job of queue 'q' has the dedupe key 'k'; it is unchanged" in second.stderr
    assert shell("enqueue", "other", "--dedupe-key", "k").stdout != first


def test_on_duplicate_decides_what_happens_when_a_dedupe_key_is_taken(shell: Shell) -> None:
    first = shell("enqueue", "q", '{"n": 1}', "--dedupe-key", "k", "--dedupe-for-s", "3600", "--priority", "4")
    assert not first.stderr
    assert shell.sql("SELECT dedupe_until BETWEEN now() + '59 min' AND now() + '61 min' FROM pgworkd.jobs")

    again = ("enqueue", "q", '{"n": 2}', "--dedupe-key", "k", "--on-duplicate")
    assert "jobs_dedupe" in shell.refused(*again, "raise", code=1)
    later = shell(*again, "reschedule", "--delay-s", "60")
    assert (later.stdout, "it is rescheduled" in later.stderr) == (first.stdout, True)
    look = "SELECT concat(payload->>'n', ' ', priority, ' ', run_at > now() + '50 s') FROM pgworkd.jobs"
    assert shell.sql(look) == "1 4 t"
    replaced = shell(*again, "replace")
    assert (replaced.stdout, "it is replaced" in replaced.stderr) == (first.stdout, True)
    assert shell.sql(look) == "2 0 f"

    shell.sql("UPDATE pgworkd.jobs SET status = 'running', worker_id = 7 RETURNING id")
    untouched = shell(*again, "replace")
    assert (untouched.stdout, "it is unchanged" in untouched.stderr) == (first.stdout, True)
    assert "--on-duplicate needs a --dedupe-key" in shell.refused("enqueue", "q", "--on-duplicate", "skip")


def test_enqueue_takes_limit_and_serialize_keys(shell: Shell) -> None:
    shell("enqueue", "q", "--serialize-key", "s", "--limit-key", "l", "--on-retry", "yield")
    assert shell.sql("SELECT concat(serialize_key, limit_key, yields) FROM pgworkd.jobs") == "slt"
    assert "needs a serialize_key" in shell.refused("enqueue", "q", "--on-retry", "yield")


@pytest.mark.parametrize(
    ("payload", "told"),
    [
        ("[1]", 'payload is a JSON array: an object is needed, so wrap it, for example {"value": [1, 2]}'),
        ("null", "an object is needed"),
        ("{", "payload cannot be read"),
        ("", "payload cannot be read"),
        ('{"a": NaN}', "payload.a is nan"),
        ('{"a": ["\\u0000"]}', "payload.a[0] holds a NUL character"),
        ('{"a": "\\ud800"}', "payload"),
        ('{"a": ' + "9" * 5000 + "}", "payload cannot be read"),
        ("{" + '"a": {' * 100 + "}" * 101, "nested deeper than 64 levels"),
        ('{"a": "' + "x" * 2**20 + '"}', "takes more than the 1,048,576 bytes"),
    ],
)
def test_an_invalid_payload_is_refused_before_the_database_is_asked(shell: Shell, payload: str, told: str) -> None:
    assert told in shell.refused("enqueue", "q", payload)
    assert shell.sql("SELECT count(*) FROM pgworkd.jobs") == 0


def test_enqueue_reads_a_payload_from_standard_input(shell: Shell) -> None:
    shell("enqueue", "q", "-", stdin='\ufeff{"name": "Ää"}\n'.encode())
    assert shell.sql("SELECT payload->>'name' FROM pgworkd.jobs") == "Ää"


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (("",), "queue must be text of 1 to"),
        (("q" * 201,), "queue must be text of 1 to"),
        (("a\udcff",), "queue holds a lone surrogate"),
        (("q", "--kind", ""), "kind must be text of 1 to"),
        (("q", "--dedupe-key", "k" * 513), "dedupe_key must be text of 1 to"),
        (("q", "--serialize-key", ""), "serialize_key must be text of 1 to"),
        (("q", "--limit-key", "k" * 513), "limit_key must be text of 1 to"),
        (("q", "--dedupe-for-s", "60"), "dedupe_for needs a dedupe_key"),
        (("q", "--dedupe-key", "k", "--dedupe-for-s", "0"), "dedupe_for is 0: pass more"),
        (("q", "--dedupe-key", "k", "--dedupe-for-s", "-1"), "dedupe_for is -1.0: give 0 to"),
        (("q", "--delay-s", "-1"), "delay is -1.0: give 0 to 31622400 seconds"),
        (("q", "--delay-s", "-1"), "delay is -1"),
        (("q", "--run-at", "1969-12-31T00:00Z"), "run_at must be a datetime from 1970 to 2199"),
        (("q", "--run-at", "2200-01-01T00:00Z"), "run_at must be a datetime from 1970 to 2199"),
        (("q", "--run-at", "2100-01-01T00:00Z", "--delay-s", "1"), "both given"),
    ],
)
def test_values_out_of_bounds_are_refused_by_name(shell: Shell, args: tuple[str, ...], told: str) -> None:
    assert told in shell.refused("enqueue", *args)


def test_jobs_lists_the_newest_first_and_filters(shell: Shell) -> None:
    ids = [shell("enqueue", queue).stdout.strip() for queue in ("a", "b", "a", "c")]
    shell("cancel", ids[0])
    dead = shell.die("a", kind="k")
    rows = json.loads(shell("jobs", "--json").stdout)
    assert [row["id"] for row in rows] == [dead, *reversed(ids)]
    assert [row["status"] for row in rows] == ["dead", "pending", "pending", "pending", "cancelled"]

    def listed(*args: str) -> list[str]:
        return [row["id"] for row in json.loads(shell("jobs", "--json", *args).stdout)]

    assert listed("--queue", "a") == [dead, ids[2], ids[0]]
    assert listed("--queue", "a", "--limit", "1") == [dead]
    assert listed("--status", "cancelled") == [ids[0]]
    assert listed("--kind", "k") == listed("--status", "dead") == [dead]
    assert listed("--queue", "b", "--status", "dead") == []
    lines = shell("jobs", "--queue", "b").stdout.splitlines()
    assert lines[0].split()[:4] == ["ID", "QUEUE", "KIND", "STATUS"]
    assert lines[1].split()[:4] == [ids[1], "b", "b", "pending"]


def test_job_shows_all_fields_and_the_error_history(shell: Shell) -> None:
    error = {"attempt": 3, "at": "2026-01-01", "type": "ValueError", "message": "no\x1b[31m", "worker": "w"}
    errors = json.dumps([error | {"traceback": "File a\n  line\x1b b"}])
    job_id = shell.die("q", payload='{"deep": {"n": [1, 2]}}', error="no\x1b[31m", errors=errors)
    shown = shell("job", job_id).stdout
    assert "\x1b" not in shown
    assert "    File a\n      line\\x1b b" in shown
    assert "attempt 3 at 2026-01-01 worker w\n  ValueError: no\\x1b[31m\n" in shown
    whole = json.loads(shell("job", job_id, "--json").stdout)
    assert whole["payload"] == {"deep": {"n": [1, 2]}}
    assert whole["limit_key"] is None
    assert whole["errors"][0]["message"] == "no\x1b[31m"
    assert "no job has the id" in shell.refused("job", NOBODY, code=1)


def test_timestamps_beyond_python_datetimes_are_shown(shell: Shell) -> None:
    shell.sql(
        "INSERT INTO pgworkd.finished_jobs (id, finished_at, run_at, created_at, status, priority, attempts, failures,"
        " queue, payload, errors, failed_at, started_at) SELECT pgworkd.new_id(), now(), now(), now(), 'completed', 0,"
        " 1, 0, 'q', '{}', '[]', 'infinity', '4000-01-01 BC'"
    )
    job_id = json.loads(shell("jobs", "--json").stdout)[0]["id"]
    whole = json.loads(shell("job", job_id, "--json").stdout)
    assert (whole["failed_at"], whole["claimed_at"]) == (None, None)
    assert whole["created_at"].startswith("20")


def test_a_command_that_is_built_alone_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("registered_commands", "registered_groups"):
        monkeypatch.setattr(app, name, getattr(app, name))
    every = (app.registered_commands, app.registered_groups)
    for name in ("", "--version", "stast", *COMMAND.commands):  # type: ignore[attr-defined]
        app.registered_commands, app.registered_groups = every
        alone = typer.main.get_command(called([name, "--help"]))
        assert list(alone.commands) == ([name] if name in COMMAND.commands else list(COMMAND.commands))  # type: ignore[attr-defined]
        helps = [CliRunner().invoke(command, [name, "--help"]) for command in (alone, COMMAND)]
        assert [each.output for each in helps] == [helps[0].output] * 2
