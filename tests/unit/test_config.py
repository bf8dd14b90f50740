"""Settings: which source wins, one clear line for every error, and no secret in any output."""

import os
import stat
from pathlib import Path

import pytest
from pydantic import ValidationError

from pgworkd.errors import UsageError
from pgworkd.settings.config import Settings, load
from pgworkd.settings.file import parse_queues
from pgworkd.settings.shown import describe
from tests.kits.cli import CANARY, clean

__all__ = ["clean"]  # a fixture


def write(text: str, name: str = "pgworkd.toml") -> Path:
    path = Path(name)
    path.write_text(text, encoding="utf-8")
    path.chmod(0o600)
    return path


def refused(**overrides: object) -> str:
    with pytest.raises(UsageError) as caught:
        load(**overrides)
    line = str(caught.value)
    assert "\n" not in line
    assert "ydantic" not in line
    assert caught.value.__context__ is None, "an error of pydantic holds the values"
    return line


def test_defaults():
    settings = load()
    assert (settings.lease_s, settings.heartbeat_s, settings.poll_s, settings.shutdown_s) == (30, 10, 2, 30)
    assert (settings.connect_timeout_s, settings.command_timeout_s, settings.transactions_max) == (10, 10, 20)
    assert (settings.keep_days, settings.keep_dead_days, settings.slow_min_s, settings.slow_factor) == (
        7,
        30,
        1,
        5,
    )
    assert (settings.dsn, settings.app, settings.queues) == (None, None, {})
    assert (settings.log_level, settings.log_format) == ("info", "auto")
    assert (settings.worker_name, settings.processes) == (os.uname().nodename, 1)
    assert settings.notes == ()
    assert {origin for _, _, origin in describe(settings)} == {"default"}


def test_flags_over_environment_over_file_over_defaults(monkeypatch):
    write('poll_s = 2\nkeep_days = 2\nlog_level = "debug"\nqueues = ["file"]\n')
    monkeypatch.setenv("PGWORKD_POLL_S", "3")
    monkeypatch.setenv("PGWORKD_KEEP_DAYS", "3")
    monkeypatch.setenv("PGWORKD_QUEUES", "env=3")
    settings = load(poll_s=4, keep_days=None, queues=[])
    assert (settings.poll_s, settings.keep_days, settings.log_level) == (4, 3, "debug")
    assert settings.queues == {"env": 3}
    shown = {name: (value, origin) for name, value, origin in describe(settings)}
    assert shown["poll_s"] == ("4.0", "flag")
    assert shown["keep_days"] == ("3", "environment PGWORKD_KEEP_DAYS")
    assert shown["queues"] == ("env=3", "environment PGWORKD_QUEUES")
    assert shown["log_level"] == ("debug", "pgworkd.toml")
    assert shown["lease_s"] == ("30.0", "default")
    assert list(shown) == list(Settings.model_fields)


@pytest.mark.parametrize("scheme", ["postgres", "postgresql", "postgresql+asyncpg"])
def test_the_address_of_an_application_is_taken_where_nothing_else_names_a_database(monkeypatch, scheme):
    """DATABASE_URL comes last: a flag, our own variable, the file and a gateway to work through name another."""
    url = f"{scheme}://app:{CANARY}@db.example/shop"
    monkeypatch.setenv("DATABASE_URL", url)
    assert load().dsn_required() == url
    assert load().database == f"{scheme}://app:***@db.example/shop (environment DATABASE_URL)"
    assert ("dsn", f"{scheme}://app:***@db.example/shop", "environment DATABASE_URL") in describe(load())
    monkeypatch.setenv("PGHOST", "elsewhere")  # completes a DSN, and is none
    assert load().dsn_required() == url
    assert load(dsn="postgresql://h/flag").database == "postgresql://h/flag (flag)"
    assert load(remote="https://jobs.example.com").dsn is None
    write("dsn = 'postgresql://h/file'")
    assert load().database == "postgresql://h/file (pgworkd.toml)"
    monkeypatch.setenv("PGWORKD_DSN", "postgresql://h/own")
    assert load().database == "postgresql://h/own (environment PGWORKD_DSN)"


def test_an_address_of_an_application_that_is_none_of_postgres_is_no_ones_fault(monkeypatch):
    for url in ("mysql://u@h/d", "sqlite:///x.db", "", "x"):
        monkeypatch.setenv("DATABASE_URL", url)
        assert load().dsn is None
    for url in ("postgres://h/d?schema=public", "'postgres://h/d'", "postgres://u:a@b@h/d"):
        monkeypatch.setenv("DATABASE_URL", url)
        assert refused().startswith("dsn (environment DATABASE_URL): ")


def test_settings_constructed_directly_ignore_files_and_environment(monkeypatch):
    monkeypatch.setenv("PGWORKD_POLL_S", "3")
    write("keep_days = 2")
    settings = Settings(lease_s=60)
    assert (settings.poll_s, settings.keep_days, settings.lease_s) == (2, 7, 60)
    assert settings.origin("lease_s") == "flag"


def test_settings_are_immutable():
    with pytest.raises(ValidationError):
        load().lease_s = 60


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('lease_s = "4s"', "lease_s (pgworkd.toml): must be a number of seconds from 5 to 3600 (or 30s, 10m, 1h), not"),
        ('poll_s = "500 years"', "must be a number of seconds from 0.05 to 10 (or 30s, 10m, 1h), not '500 years'"),
        ("poll_s = true", "poll_s (pgworkd.toml): must be a number of seconds from 0.05 to 10"),
        ("lease_s = 4.9", "from 5 to 3600 (or 30s, 10m, 1h), not '4.9'"),
        ("lease_s = 3601", "from 5 to 3600"),
        ("shutdown_s = inf", "from 0 to 86400 (or 30s, 10m, 1h), not 'inf'"),
        ("shutdown_s = -1", "from 0 to 86400"),
        ("lease_s = [30]", "must be a number of seconds"),
        ("lease_s = 2026-01-01", "must be a number of seconds"),
        ("keep_days = 0", "must be a whole number of days from 1 to 3650, not '0'"),
        ("transactions_max = 1.5", "must be a whole number from 1 to 500, not '1.5'"),
        ('transactions_max = "many"', "must be a whole number from 1 to 500"),
        ("transactions_max = 0", "from 1 to 500"),
        ("transactions_max = 501", "from 1 to 500"),
        ("processes = 0", "processes (pgworkd.toml): must be a whole number from 1 to 64, not '0'"),
        ("processes = 65", "processes (pgworkd.toml): must be a whole number from 1 to 64, not '65'"),
        ('processes = "auto"', "must be a whole number from 1 to 64, not 'auto'"),
        ("connect_timeout_s = 61", "from 1 to 60"),
        ("slow_factor = 0.5", "must be a number from 1 to 1000"),
        (
            "lease_s = 5",
            "heartbeat_s (default): 10 is more than a third of lease_s = 5: set it to 1.66 or less",
        ),
        (
            "lease_s = 20\nheartbeat_s = 5",
            "command_timeout_s (default): 10 is not below half of lease_s = 20",
        ),
        (
            'log_level = "loud"',
            "log_level (pgworkd.toml): must be one of debug, info, warning, error, not 'loud'",
        ),
        ("log_format = 5", "must be one of auto, json, console"),
        ('app = "notes.jobs"', "app (pgworkd.toml): must be module:attribute, for example notes.jobs:app"),
        ('app = "notes jobs:app"', "must be module:attribute"),
        ('app = "../jobs.py:app"', "must be module:attribute"),
        ("app = 5", "app (pgworkd.toml): must be text"),
        ('worker_name = ""', "must be 1 to 200 printable characters"),
        ('worker_name = "a\\u001b[31m"', "must be 1 to 200 printable characters"),
        ("dsn = 5", "dsn (pgworkd.toml): must be text"),
        ('dsn = ""', "must look like postgresql://"),
        (
            'lese_s = 3\nkeep_dais = "x"',
            "unknown setting 'lese_s', did you mean lease_s?; pgworkd.toml: unknown setting",
        ),
        ("lease-s = 30", "unknown setting 'lease-s', did you mean lease_s?"),
        ("_cli_parse_args = true", "unknown setting '_cli_parse_args'"),
        ("=", "pgworkd.toml is not valid TOML: Invalid statement (at line 1, column 1)"),
        ("poll_s = 1\npoll_s = 2", "is not valid TOML"),
        ("poll_s = " + "9" * 5000, "is not valid TOML"),
        ("queues = " + "[" * 5000, "is not valid TOML"),
        ("queues = 5", 'queues (pgworkd.toml): must be a list like ["mail", "ocr=4"]'),
        ("queues = [1]", "must be a list like"),
        ('queues = ["a", "a=2"]', "queue 'a' is named twice"),
        ('queues = ["a=10001"]', "concurrency of queue 'a'"),
        ('queues = ["a=-1"]', "concurrency of queue 'a'"),
        ('queues = ["a=4x"]', "concurrency of queue 'a'"),
        ('queues = ["a="]', "concurrency of queue 'a'"),
        ('queues = ["=4"]', "queue names must be 1 to 200 printable characters"),
        (f'queues = ["{"q" * 201}"]', "queue names must be 1 to 200"),
        ("[queues]\na = true", "concurrency of queue 'a'"),
    ],
)
def test_each_error_is_one_line_with_field_source_and_remedy(text, line):
    write(text)
    assert line in refused()


def test_following_an_errors_advice_fixes_it():
    assert load(lease_s=5, heartbeat_s=1.66, command_timeout_s=2.4).lease_s == 5
    assert load(lease_s=60, heartbeat_s=20, command_timeout_s=29).heartbeat_s == 20


def test_an_error_names_the_source_of_the_value(monkeypatch):
    assert refused(lease_s="x").startswith("lease_s (flag): ")
    assert refused(lese_s=3) == "flag: unknown setting 'lese_s', did you mean lease_s?"
    assert refused(transactions_max=10**5000).endswith("not 'a number of that size'")
    monkeypatch.setenv("PGWORKD_LEASE_S", "x")
    assert refused().startswith("lease_s (environment PGWORKD_LEASE_S): ")


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("PGWORKD_LEASE", "PGWORKD_LEASE_S"),
        ("PGWORKD_QUEUE", "PGWORKD_QUEUES"),
        ("PGWORKD_PROCESS", "PGWORKD_PROCESSES"),
        ("PGWORKD_SUPERVISED", None),
        ("pgworkd_dns", None),
    ],
)
def test_a_misspelled_variable_is_an_error(monkeypatch, name, meant):
    monkeypatch.setenv(name, "5")
    if meant is None:
        assert load().dsn is None
    else:
        assert refused() == f"environment: unknown variable {name}, did you mean {meant}?"


@pytest.mark.parametrize("meant", sorted(Settings.model_fields))
def test_a_secret_may_have_any_name(monkeypatch, meant):
    """Names that are, or look like, the end of a setting's name: a secret `dir` is PGWORKD_SECRET_DIR."""
    for end in {meant, *meant.split("_"), *(meant[:cut] for cut in range(1, len(meant))), "db", "ds", "hr"}:
        monkeypatch.setenv(f"PGWORKD_SECRET_{end.upper()}", "whsec_5WbX5kEWLlfzsGNjH64I8lOOqUB6e8FH")
    assert load().model_dump() == Settings().model_dump()


def test_unrelated_environment_variables_are_ignored(monkeypatch):
    for name in ("PGWORKD_SERVICE_HOST", "PGWORKD_PORT", "PGWORKD_PORT_5432_TCP_ADDR", "PGWORKD_TEST_DSN"):
        monkeypatch.setenv(name, "tcp://10.0.0.1:80")
    assert load().model_dump() == Settings().model_dump()


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda path: path.write_bytes(b"app = '\xff'"), "is not UTF-8 text"),
        (lambda path: path.write_text("#" * 1_048_577), "is larger than 1,048,576 bytes"),
        (lambda path: path.symlink_to(path), "cannot be read (Too many levels of symbolic links)"),
    ],
    ids=["latin-1", "large", "loop"],
)
def test_an_unusable_file_is_one_clear_error(monkeypatch, make, problem):
    monkeypatch.setenv("PGWORKD_CONFIG", "mine.toml")
    make(Path("mine.toml"))
    assert refused().startswith(f"mine.toml {problem}")


@pytest.mark.parametrize("text", ["", "\ufeffpoll_s = 2.0", "# nothing\n"])
def test_nearly_empty_files_are_accepted(monkeypatch, text):
    write(text, "mine.toml")
    monkeypatch.setenv("PGWORKD_CONFIG", "mine.toml")
    assert load().model_dump() == Settings().model_dump()


def test_a_password_in_a_world_readable_file_is_warned_about():
    path = write(f'dsn = "postgresql://u:{CANARY}@h/db"')
    assert load().notes == ()
    path.chmod(path.stat().st_mode | stat.S_IROTH)
    (note,) = load().notes
    assert note.startswith("pgworkd.toml contains a secret")
    assert CANARY not in note
    write('dsn = "postgresql://u@h/db"').chmod(0o644)
    assert load().notes == ()


@pytest.mark.parametrize(
    ("given", "parsed"),
    [
        (["mail", "ocr=4"], {"mail": None, "ocr": 4}),
        (("a=b=10000",), {"a=b": 10_000}),
        ("mail, ocr=4,\n", {"mail": None, "ocr": 4}),
        (' ["mail", "ocr=4"]', {"mail": None, "ocr": 4}),
        ({"mail": None, "ocr": 4}, {"mail": None, "ocr": 4}),
        (["ключ = 3", "with space"], {"ключ": 3, "with space": None}),
        (["q" * 200], {"q" * 200: None}),
        ("", {}),
    ],
)
def test_queues_are_parsed(given, parsed):
    assert parse_queues(given) == parsed


@pytest.mark.parametrize(
    "given", ['["mail"', "[" * 100_000, ["a\0"], ["a\x1b[31m=2"], [["a"]], "a=٣", {1: 2}, {"a": 1.0}]
)
def test_invalid_queues_are_rejected(given):
    with pytest.raises(ValueError, match=r"must be|named twice"):
        parse_queues(given)
