"""`pgworkd queues`: effective settings and their origin, changes, pauses, and refusals of wrong values."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.kits.cli import WORKER, Shell, clean, shell

__all__ = ["clean", "shell"]  # fixtures


def row(shell: Shell, queue: str = "q") -> dict[str, Any]:
    """The settings of the queue's row."""
    found = shell.sql("SELECT to_jsonb(q) FROM pgworkd.queues q WHERE name = %s", queue) or {}
    unset = ("name", "limited", "updated_at")
    return {k: v for k, v in found.items() if v is not None and v is not False and k not in unset}


def serve(shell: Shell, concurrency: int, source: str = "code", queue: str = "q") -> None:
    """Registers a worker whose code has this concurrency."""
    worker = shell.sql(WORKER, "w", "1 min")
    shell.sql("SELECT pgworkd.set_pool(%s, %s, %s, true, %s, %s)", worker, queue, concurrency, concurrency, source)


def holds(shell: Shell, queue: str = "q") -> dict[str, Any]:
    """The settings of a queue, as JSON shows them."""
    (found,) = (each for each in json.loads(shell("queues", "--json").stdout) if each["queue"] == queue)
    return dict(found["settings"])


def test_the_list_shows_the_origin_of_each_value(shell: Shell) -> None:
    serve(shell, 4)
    serve(shell, 3, "default", "other")
    shell("enqueue", "idle")
    assert holds(shell)["concurrency"] == {"value": 4, "from": "code", "code": [4]}
    shell("queues", "set", "q", "--concurrency", "10", "--rate", "100/min")
    line = next(line for line in shell("queues").stdout.splitlines() if line.startswith("q "))
    assert line.endswith("concurrency 10 (row; default from code: 4), rate 100/min (row)")
    assert holds(shell)["concurrency"] == {"value": 10, "from": "row", "code": [4]}
    assert holds(shell)["rate"] == {"value": "100/min", "from": "row", "code": []}
    assert holds(shell)["max_running"] == {"value": None, "from": "default", "code": []}
    assert holds(shell, "other")["concurrency"] == {"value": 3, "from": "default", "code": [3]}
    assert holds(shell, "idle")["concurrency"] == {"value": None, "from": "default", "code": []}
    serve(shell, 6, "settings", "other")
    assert holds(shell, "other")["concurrency"] == {"value": [3, 6], "from": "code; daemons differ", "code": [3, 6]}


def test_show_lists_every_setting(shell: Shell) -> None:
    serve(shell, 4)
    shell("queues", "set", "q", "--max-running", "7")
    lines = dict(line.split(None, 1) for line in shell("queues", "show", "q").stdout.splitlines()[1:])
    assert (lines["concurrency"], lines["max_running"], lines["fair"]) == ("4 (code)", "7 (row)", "no (default)")
    assert json.loads(shell("queues", "show", "q", "--json").stdout) == holds(shell)
    assert "unknown queue 'qq'" in shell.refused("queues", "show", "qq")


def test_a_paused_queue_is_shown_as_paused_everywhere(shell: Shell) -> None:
    def shown() -> str:
        lines = dict(line.split(None, 1) for line in shell("queues", "show", "q").stdout.splitlines()[1:])
        return str(lines["paused"])

    serve(shell, 4)
    assert shown() == "no (default)"
    shell("queues", "pause", "q")
    assert shown() == "until resumed (row)"
    assert "paused until resumed (row)" in shell("queues", "set", "q", "--max-running", "7").stdout
    assert holds(shell)["paused"] == {"value": "until resumed", "from": "row", "code": []}
    shell("queues", "pause", "q", "--until", "2127-01-31T07:00:00Z")
    assert shown().startswith("until 2127-01-31T07:00:00")
    shell("queues", "resume", "q")
    assert shown() == "no (default)"
    shell.sql("UPDATE pgworkd.queues SET paused_until = now() - interval '1 s'")
    assert shown() == "no (default)", "a pause that is over is none"


def test_every_setting_can_be_set_and_reset(shell: Shell) -> None:
    shell("enqueue", "q")
    given = {
        "--concurrency": "3", "--max-running": "9", "--limit-per-key": "2", "--rate": "5/30s", "--rate-burst": "4",
        "--rate-per-key": "1/s", "--rate-per-key-burst": "2", "--keep-s": "0",
        "--backoff-s": "0.5", "--backoff-factor": "1.5", "--backoff-cap-s": "90",
    }  # fmt: skip
    flags = [text for pair in given.items() for text in pair]
    told = shell("queues", "set", "q", *flags, "--fair").stdout
    assert told.startswith("queue q: concurrency 3 (row), max_running 9 (row), ")
    assert row(shell) == {
        "concurrency": 3, "max_running": 9, "limit_per_key": 2, "rate": 5, "rate_period_s": 30, "rate_burst": 4,
        "rate_per_key": 1, "rate_per_key_period_s": 1, "rate_per_key_burst": 2, "fair": True,
        "keep_s": 0, "backoff_s": 0.5, "backoff_factor": 1.5, "backoff_cap_s": 90,
    }  # fmt: skip
    shell("queues", "set", "q", "--unset", "rate", "--unset", "keep-s", "--no-fair", "--concurrency", "4")
    left = row(shell)
    assert not {"rate", "rate_period_s", "rate_burst", "keep_s", "fair"} & left.keys()
    assert (left["concurrency"], left["max_running"]) == (4, 9)
    made = json.loads(shell("queues", "set", "q", "--unset", "all", "--json").stdout)
    assert made["concurrency"] == {"value": None, "from": "default", "code": []}
    assert shell.sql("SELECT count(*) FROM pgworkd.queues") == 0


@pytest.mark.slow("each setting with its wrong values")
@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--concurrency", "0"), "--concurrency '0': give a whole number from 1 to 10000"),
        (("--concurrency", "-1"), "--concurrency '-1': give a whole number from 1 to 10000"),
        (("--concurrency", "1000000000"), "--concurrency '1000000000': give a whole number from 1 to 10000"),
        (("--concurrency", "1.5"), "--concurrency '1.5': give a whole number"),
        (("--max-running", "0"), "--max-running '0': give a whole number from 1 to 1000000"),
        (("--max-running", "many"), "--max-running 'many': give a whole number"),
        (("--limit-per-key", "1000000000"), "--limit-per-key '1000000000': give"),
        (("--rate", "10"), "--rate '10' has no period: write starts per period, as 10/s, 100/min or 5/30s"),
        (("--rate", "0/s"), "--rate '0': give a whole number from 1"),
        (("--rate-per-key", "x"), "--rate-per-key 'x' is not a rate"),
        (("--rate-burst", "0"), "--rate-burst '0': give"),
        (("--rate-burst", "5"), "rate_burst needs a rate, and the queue has none: give rate as well"),
        (("--backoff-s", "nan"), "--backoff-s 'nan': give a number from 0 to 31622400"),
        (("--keep-s", "-1"), "--keep-s '-1': give a whole number from 0"),
        (("--backoff-s", "inf"), "--backoff-s 'inf': give a number from 0 to 31622400"),
        (("--backoff-factor", "0.9"), "--backoff-factor '0.9': give a number from 1 to 1000"),
        (("--backoff-cap-s", "1e9"), "--backoff-cap-s '1e9': give"),
        (("--unset", "speed"), "--unset 'speed': give one of concurrency, max_running"),
        (("--unset", "rate", "--rate", "1/s"), "rate is both set and unset: give one of them"),
        ((), "nothing to change: give a setting, such as --concurrency 4, or --unset NAME"),
    ],
)
def test_wrong_values_are_refused_with_a_remedy(shell: Shell, args: tuple[str, ...], says: str) -> None:
    shell("enqueue", "q")
    assert says in shell.refused("queues", "set", "q", *args)
    assert shell.sql("SELECT count(*) FROM pgworkd.queues") == 0


def test_an_unknown_queue_is_refused_with_a_hint_unless_it_is_created(shell: Shell) -> None:
    shell("enqueue", "mail")
    assert "unknown queue 'mial': did you mean 'mail'?" in shell.refused("queues", "set", "mial", "--fair")
    assert "unknown queue 'new'; use --create for" in shell.refused("queues", "set", "new", "--fair")
    assert "unknown queue 'new'; use --create for" in shell.refused("pause", "new")
    assert shell("queues", "set", "new", "--fair", "--create").stdout.endswith(", fair yes (row)\n")
    shell("queues", "pause", "newer", "--create")
    assert shell.sql("SELECT array_agg(name::text ORDER BY name) FROM pgworkd.queues") == ["new", "newer"]
    assert "the queue's name must be text of 1 to" in shell.refused("queues", "set", "x" * 201, "--fair", "--create")


def test_pauses_with_and_without_a_deadline(shell: Shell) -> None:
    shell("enqueue", "q")
    assert shell("queues", "pause", "q").stdout == "queue q is paused until resumed\n"
    assert shell("queues", "pause", "q", "--for", "90").stdout == "queue q is paused for 90 s\n"
    assert shell.sql("SELECT paused_until - now() BETWEEN '80 s' AND '91 s' FROM pgworkd.queues")
    told = shell("queues", "pause", "q", "--until", "2100-01-31T07:00:00+01:00").stdout
    assert told == "queue q is paused until 2100-01-31T07:00:00+01:00\n"
    assert shell.sql("SELECT paused_until = '2100-01-31 06:00+00' FROM pgworkd.queues")
    assert json.loads(shell("queues", "--json").stdout)[0]["paused_until"] == "2100-01-31T06:00:00+00:00"
    assert "give one of them" in shell.refused("queues", "pause", "q", "--until", "2100-01-31T07:00Z", "--for", "1")
    assert "has no time zone" in shell.refused("queues", "pause", "q", "--until", "2100-01-31T07:00")
    assert "--until 'soon': give an instant" in shell.refused("queues", "pause", "q", "--until", "soon")
    assert "already have ended by the database's clock: give a later end" in shell.refused(
        "queues", "pause", "q", "--until", "2020-01-31T07:00Z"
    )
    assert "give 0 to 31622400 seconds" in shell.refused("queues", "pause", "q", "--for", "999d")
    assert shell("queues", "pause", "q", "--until", "10m").stdout == "queue q is paused for 600 s\n"
    assert shell("queues", "resume", "q").stdout == "queue q is resumed\n"
    assert shell("queues", "resume", "q").stdout == "queue q was not paused\n"
    assert shell.sql("SELECT count(*) FROM pgworkd.queues") == 0, "nothing was left in the row"


def test_a_resume_keeps_the_other_settings(shell: Shell) -> None:
    shell("queues", "set", "q", "--concurrency", "2", "--create")
    shell("pause", "q")
    shell("resume", "q")
    assert row(shell) == {"concurrency": 2}


def test_list_options_before_a_subcommand_are_refused(shell: Shell) -> None:
    assert "put --exact, --json and --dsn after: pgworkd queues resume" in shell.refused(
        "queues", "--json", "resume", "q"
    )
