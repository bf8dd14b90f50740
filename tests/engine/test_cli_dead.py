"""`pgworkd dead` and `pgworkd mute`: dead jobs by group of errors, bounded, and which of them make no alerts."""

from __future__ import annotations

import json
from datetime import datetime

import pytest

from pgworkd.cli.dead import _COLUMNS
from tests.kits.cli import ME, Shell, clean, shell

__all__ = ["clean", "shell"]  # fixtures


def died(shell: Shell, error: str, jobs: int = 1, queue: str = "mail", ago: str = "1 min") -> str:
    """Jobs that died of this error; the id of one of them."""
    ids = [
        shell.die(queue, kind="bill", error=f"E: {error}", errors=json.dumps([{"type": "E", "message": error}]))
        for _ in range(jobs)
    ]
    shell.sql("UPDATE pgworkd.jobs SET failed_at = now() - %s::interval WHERE id = ANY (%s::uuid[])", ago, ids)
    shell.sql("SELECT pgworkd.note_deaths(%s::uuid[])", ids)
    shell.sql("SELECT pgworkd.count_deaths(1000)")
    return ids[0]


def listed(shell: Shell, *args: str) -> list[dict[str, object]]:
    found: list[dict[str, object]] = json.loads(shell("dead", *args, "--json").stdout)
    return found


def test_dead_jobs_are_listed_by_group_new_ones_first(shell: Shell) -> None:
    died(shell, "no such user 7", 3, ago="3 days")
    died(shell, "no such user 8", 3, ago="2 days")
    sample = died(shell, "refused by 10.0.0.1", 2)
    lines = shell("dead").stdout.splitlines()
    assert lines[0].lower().split() == list(_COLUMNS)
    assert lines[1].split()[1:6] == ["mail", "bill", "2", "25.0%", "yes"]
    assert lines[1].endswith(f"no     {sample}  E: refused by <address>")
    assert lines[2].split()[1:6] == ["mail", "bill", "6", "75.0%", "no"]
    new, old = listed(shell)
    assert (new["dead"], new["share"], new["new"], new["sample"]) == (2, 0.25, True, sample)
    first, last = (datetime.fromisoformat(str(old[name])) for name in ("first_at", "last_at"))
    assert (last - first).days in (0, 1)
    assert [row["error"] for row in listed(shell, "--since", "24h")] == ["E: refused by <address>"]
    assert listed(shell, "--since", "1s") == []


def test_the_place_of_a_group_is_shown(shell: Shell) -> None:
    entry = {"type": "E", "message": "it broke", "traceback": '  File "/srv/shop/jobs.py", line 7, in charge'}
    job_id = shell.die("q", kind="k", error="E: it broke", errors=json.dumps([entry]))
    assert [row["place"] for row in listed(shell)] == [""], "not counted yet"
    shell.sql("SELECT pgworkd.note_deaths(%s::uuid[])", [job_id])
    shell.sql("SELECT pgworkd.count_deaths(1000)")
    assert [row["place"] for row in listed(shell)] == ["jobs.py, charge"]
    assert shell("dead").stdout.splitlines()[1].endswith("  E: it broke (raised in jobs.py, charge)")


def test_a_number_that_is_part_of_the_type_is_shown(shell: Shell) -> None:
    for status in (400, 422):
        error = f"HTTP {status}: no such user 7"
        entry = json.dumps([{"type": f"HTTP {status}", "message": "no such user 7"}])
        shell.die("q", kind="k", error=error, errors=entry)
    assert sorted(str(row["error"]) for row in listed(shell)) == [
        "HTTP 400: no such user <n>",
        "HTTP 422: no such user <n>",
    ]


def test_dead_of_one_queue(shell: Shell) -> None:
    died(shell, "it broke")
    died(shell, "it broke", queue="bills")
    assert [row["queue"] for row in listed(shell, "-q", "bills")] == ["bills"]
    assert "did you mean 'bills'" in shell.refused("dead", "-q", "bils")
    shell("retry", "--queue", "bills")
    assert listed(shell, "-q", "bills") == []


def test_dead_of_five_thousand_groups_is_bounded(shell: Shell) -> None:
    shell.sql(
        """INSERT INTO pgworkd.jobs (queue, status, failures, failed_at, error)
           SELECT 'q', 'dead', 1, now(), 'cause ' || translate(n::text, '0123456789', 'abcdefghij')
           FROM generate_series(1, 5000) n"""
    )
    said = shell("dead")
    assert len(said.stdout.splitlines()) == 21
    assert said.stderr == "pgworkd: 4,980 more groups of 4,980 dead jobs: see --limit\n"
    assert len(listed(shell, "--limit", "1000")) == 1000
    assert shell.sql("SELECT count(*) FROM pgworkd.deaths") == 0, "they are grouped on the fly"
    assert listed(shell)[0]["group"] is None


def test_muting_a_group(shell: Shell) -> None:
    died(shell, "it broke")
    (row,) = listed(shell)
    group = str(row["group"])
    assert shell("mute", group, "--until", "2h").stdout == f"group {group} is muted for 7200 s\n"
    (row,) = listed(shell)
    assert row["muted"]
    left_s = shell.sql("SELECT extract(epoch FROM muted_until - now())::int FROM pgworkd.error_groups")
    assert 7100 < left_s <= 7200
    assert datetime.fromisoformat(str(row["muted_until"])).strftime("%H:%M:%SZ") in shell("dead").stdout
    shell("mute", group, "--until", "2150-01-31T07:00:00+01:00")
    assert listed(shell)[0]["muted_until"] == "2150-01-31T06:00:00+00:00"
    assert shell("mute", group, "--off").stdout == f"group {group} is not muted\n"
    assert not listed(shell)[0]["muted"]
    entries = json.loads(shell("audit", "--json").stdout)
    assert [(entry["who"], entry["what"]) for entry in entries] == [(ME, "mute")] * 3


def test_a_group_muted_for_good_by_sql(shell: Shell) -> None:
    died(shell, "it broke")
    shell.sql("UPDATE pgworkd.error_groups SET muted_until = 'infinity'")
    assert "for good" in shell("dead").stdout


@pytest.mark.parametrize(
    ("args", "why"),
    [
        (["1"], "give --until 2h (or an instant), or --off"),
        (["1", "--off", "--until", "2h"], "give --until 2h (or an instant), or --off"),
        (["1", "--until", "soon"], "or a length of time like 2h"),
        (["1", "--until", "2026-01-31T07:00:00"], "has no time zone"),
        (["1", "--until", "2020-01-31T07:00:00Z"], "already have ended"),
        (["1", "--until", "9999d"], "366 days"),
        (["0", "--off"], "the group must be an int from 1"),
    ],
)
def test_a_wrong_mute_is_refused(shell: Shell, args: list[str], why: str) -> None:
    assert why in shell.refused("mute", *args)


def test_an_unknown_group_is_refused(shell: Shell) -> None:
    assert "no group of errors has the number 7: pgworkd dead shows them" in shell.refused("mute", "7", "--off", code=1)
