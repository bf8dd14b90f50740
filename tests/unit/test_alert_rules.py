"""The alert rules, by Debian's promtool: each fires in its case, and none in a healthy hour."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from tests.kits.boards import ALERTS, Rule, rules
from tests.kits.prometheus import healthy, needs_promtool, promtool, selector

pytestmark = needs_promtool
RULES = {rule.name: rule for rule in rules()}
NAMES = set(
    "QueueStalled QueueLate EndpointDown NoWorker BacklogGrows DeadJobs AttemptsFail JobsLost ClaimsFail LeaseFenced "
    "DatabaseAway NotListening SignalsMissing WorkerGone ScheduleLate SnapshotHeld".split()
)
FLEET = {"job": "fleet", "instance": "w1"}


class Case(NamedTuple):
    """Series in promtool's notation that take the place of the healthy ones; one value each minute."""

    alert: str
    what: str
    changed: dict[str, str]
    fires_at: int | None
    """In minutes; None: not at all."""
    quiet_at: int = 0
    """The last minute at which it does not fire yet (with `fires_at`)."""


def one(name: str, **labels: str) -> str:
    return selector(name, labels | FLEET)


def ended(queue: str, values: str, but: str = "dead", kind: str | None = None) -> dict[str, str]:
    """All attempts of a queue, or of one kind of it, end like this, and none of them with the outcome `but`."""
    return {
        key: values
        for each in healthy()
        if each.name == "pgworkd_jobs_finished_total"
        and each.labels["queue"] == queue
        and each.labels["kind"] == (kind or each.labels["kind"])
        and each.labels["outcome"] not in ("dead", but)
        for key in [one(each.name, **each.labels)]
    }


MAIL = {"queue": "mail"}
DEAD = one("pgworkd_jobs_finished_total", queue="mail", kind="send", outcome="dead")
FAILED = one("pgworkd_jobs_finished_total", queue="mail", kind="send", outcome="failed")
DUE = one("pgworkd_queue_jobs", queue="mail", state="due")
OLDEST, WORKERS = one("pgworkd_queue_oldest_due_seconds", **MAIL), one("pgworkd_queue_workers", **MAIL)
PAUSED, RUNNING = one("pgworkd_queue_paused", **MAIL, by="operator"), one("pgworkd_jobs_running", **MAIL)
BY_ENDPOINT = one("pgworkd_queue_paused", **MAIL, by="endpoint")
RESCUED, FENCES = one("pgworkd_jobs_rescued_total", **MAIL), one("pgworkd_lease_fences_total")
UP, LISTENING = one("pgworkd_database_up"), one("pgworkd_listening")
REFUSED = one("pgworkd_claims_refused_seconds")
CASES = [
    Case("QueueStalled", "every slot busy, nothing ends", {RUNNING: "8x90", **ended("mail", "100+0x90")}, 15, 9),
    Case(
        "QueueStalled",
        "it worked for half an hour and then hangs",
        {RUNNING: "8x90", **ended("mail", "0+60x30 1800x60")},
        43,
        39,
    ),
    Case("QueueStalled", "no attempt has ever ended", {RUNNING: "8x90", **ended("mail", "_x90")}, 15, 9),
    Case("QueueStalled", "idle", {RUNNING: "0x90", **ended("mail", "100+0x90")}, None),
    Case("QueueStalled", "one attempt in 9 min ends", {RUNNING: "8x90", **ended("mail", "0x8 1x8 2x8 3x60")}, 44, 34),
    Case("QueueStalled", "a first attempt after an idle hour", {RUNNING: "0x60 1x8 0x20"}, None),
    Case("QueueStalled", "a restart", {RUNNING: "8x90", **ended("mail", "0+60x30 0+60x60")}, None),
    Case("QueueStalled", "the first of a kind has ended", {RUNNING: "8x12 0x60", **ended("mail", "_x8 1x70")}, None),
    Case(
        "QueueStalled",
        "jobs of an unknown kind are handed back all the while",
        {RUNNING: "8x90", **ended("mail", "100+0x90", but="released")},
        15,
        9,
    ),
    Case("QueueLate", "a job waits", {OLDEST: "0+10x90"}, 12, 6),
    Case("QueueLate", "but the queue is paused", {OLDEST: "0+10x90", PAUSED: "1x90"}, None),
    Case("QueueLate", "as its endpoint is down", {OLDEST: "0+10x90", BY_ENDPOINT: "1x90"}, 12, 6),
    Case("QueueLate", "a peak of a minute", {OLDEST: "0x20 90 0x60"}, None),
    Case(
        "EndpointDown",
        "it is gone for good",
        {one("pgworkd_endpoint_disabled", endpoint="billing"): "0x20 1x70"},
        23,
        20,
    ),
    Case(
        "EndpointDown",
        "it is tried now and then, in vain",
        {one("pgworkd_endpoint_paused", endpoint="billing"): "0x20 0 1 1 1 0 1 1 1 0 1 1 1 0 1 1 1 0 1 1 1 0 1x50"},
        40,
        23,
    ),
    Case("EndpointDown", "for a minute", {one("pgworkd_endpoint_paused", endpoint="billing"): "0x20 1 0x70"}, None),
    Case("NoWorker", "all stop", {WORKERS: "2x10 0x80"}, 17, 14),
    Case("NoWorker", "none was ever there", {WORKERS: "_x90"}, 6, 4),
    Case("NoWorker", "nothing is due", {WORKERS: "0x90", DUE: "0x90"}, None),
    Case("NoWorker", "paused", {WORKERS: "0x90", PAUSED: "1x90"}, None),
    Case("NoWorker", "as its endpoint is down", {WORKERS: "0x90", BY_ENDPOINT: "1x90"}, None),
    Case("NoWorker", "nobody counts", {one("pgworkd_sample_age_seconds"): "3x10 3+60x80"}, 33, 29),
    Case("BacklogGrows", "100 more each minute", {DUE: "0+100x90"}, 30, 15),
    Case("BacklogGrows", "many, but ever fewer", {DUE: "90000-100x90"}, None),
    Case("BacklogGrows", "few", {DUE: "0+5x90"}, None),
    Case("DeadJobs", "one dies", {DEAD: "0x20 1x70"}, 23, 19),
    Case("DeadJobs", "one dies, the first ever", {DEAD: "_x20 1x70"}, 23, 19),
    Case("DeadJobs", "one died an hour ago", {DEAD: "1x90"}, None, 20),
    Case("DeadJobs", "of a process that is killed soon after", {DEAD: "_x20 9 9 _x70"}, 23, 19),
    Case("AttemptsFail", "all", {**ended("mail", "100+0x90", "failed", "send"), FAILED: "0x20 0+9x70"}, 45, 20),
    Case("AttemptsFail", "half of them", {FAILED: "0+59x90"}, None),
    Case("AttemptsFail", "a few", {**ended("mail", "100+0x90", "failed", "send"), FAILED: "0+1x90"}, None),
    Case("JobsLost", "one is taken back", {RESCUED: "0x20 1x70"}, 23, 19),
    Case("JobsLost", "the first ever", {RESCUED: "_x20 1x70"}, 23, 19),
    Case("JobsLost", "one ends too late", {one("pgworkd_jobs_lost_total", **MAIL): "0x20 1x70"}, 23, 19),
    Case("JobsLost", "prometheus was away", {RESCUED: "5x20 _x25 5x45"}, None, 20),
    Case("ClaimsFail", "a table is locked", {REFUSED: "0x20 0+60x70"}, 26, 23),
    Case("ClaimsFail", "for a minute", {REFUSED: "0x20 60 0x70"}, None),
    Case("ClaimsFail", "as the database is away", {REFUSED: "0+60x90", UP: "0x90"}, None),
    Case("LeaseFenced", "once", {FENCES: "0x20 1x70"}, 23, 19),
    Case("DatabaseAway", "for a worker", {UP: "1x20 0x70"}, 23, 20),
    Case("DatabaseAway", "for the exporter", {one("pgworkd_scrape_up"): "1x20 0x70"}, 23, 20),
    Case("DatabaseAway", "for an instant", {UP: "1x20 0 1x70"}, None),
    Case("NotListening", "the database answers", {LISTENING: "1x20 0x70"}, 28, 24),
    Case("NotListening", "as the database is away", {LISTENING: "1x20 0x70", UP: "1x20 0x70"}, None),
    Case("NotListening", "cut again and again", {LISTENING: "1x20 0 1 0 1 0 1 0 1 0 1 0 1 0 1 0 1 0 1 0 1x40"}, 32, 24),
    Case("SignalsMissing", "no exporter", {one("pgworkd_scrape_up"): "1x20 _x70"}, 42, 35),
    Case("SignalsMissing", "no worker was ever there", {one("pgworkd_database_up"): "_x90"}, 17, 14),
    Case("ScheduleLate", "6 min", {one("pgworkd_schedule_late_seconds", schedule="nightly"): "0x20 360x70"}, 25, 21),
    Case("ScheduleLate", "4 min", {one("pgworkd_schedule_late_seconds", schedule="nightly"): "0x20 240x70"}, None),
    Case("SnapshotHeld", "for hours", {one("pgworkd_oldest_snapshot_seconds"): "0+120x90"}, 38, 31),
    Case("SnapshotHeld", "by a slot", {one("pgworkd_oldest_snapshot_transactions", by="slot"): "0+1e6x90"}, 18, 14),
    Case("WorkerGone", "one process of four", {one("pgworkd_processes", state="answering"): "4x20 3x70"}, 27, 24),
    Case("WorkerGone", "it does not answer", {one("up"): "1x20 0x70"}, 27, 24),
    Case("WorkerGone", "its lease ran out", {one("pgworkd_workers", state="lost"): "0x20 1x70"}, 27, 24),
    Case("WorkerGone", "it was away for two minutes", {one("up"): "1x20 0x2 1x70"}, None),
]


def series(changed: dict[str, str]) -> list[dict[str, str]]:
    """A healthy fleet, except for what is changed; `one died an hour ago` starts with what was there before."""
    values = {one(each.name, **each.labels): f"{each.start:g}+{each.step:g}x90" for each in healthy()}
    values |= {one("up"): "1x90"} | changed
    return [{"series": key, "values": each} for key, each in values.items()]


def check(folder: Path, found: Sequence[Rule], tests: list[dict[str, Any]]) -> str:
    """What promtool says of these tests; empty if all hold."""
    names = {rule.name for rule in found}
    (group,) = yaml.safe_load(ALERTS)["groups"]
    kept = {"name": "pgworkd", "rules": [rule for rule in group["rules"] if rule["alert"] in names]}
    (folder / "rules.yml").write_text(json.dumps({"groups": [kept]}), encoding="utf-8")  # JSON is YAML
    file = {"rule_files": ["rules.yml"], "evaluation_interval": "1m", "tests": tests}
    (folder / "tests.yml").write_text(json.dumps(file), encoding="utf-8")
    result = promtool("test", "rules", folder / "tests.yml")
    return "" if result.returncode == 0 else result.stdout + result.stderr


def quiet(changed: dict[str, str], minutes: Sequence[int], names: Sequence[str]) -> dict[str, Any]:
    """A test: none of these fires at these minutes."""
    wanted = [{"eval_time": f"{at}m", "alertname": name, "exp_alerts": []} for at in minutes for name in names]
    return {"interval": "1m", "input_series": series(changed), "alert_rule_test": wanted}


def test_the_rules_are_those_agreed() -> None:
    assert RULES.keys() == NAMES
    assert all(rule.for_s > 0 for rule in RULES.values())


def test_promtool_accepts_them(tmp_path: Path) -> None:
    (tmp_path / "rules.yml").write_text(ALERTS, encoding="utf-8")
    result = promtool("check", "rules", tmp_path / "rules.yml")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "16 rules found" in result.stdout


def test_none_fires_in_a_healthy_hour(tmp_path: Path) -> None:
    assert not check(tmp_path, rules(), [quiet({}, range(0, 91, 3), sorted(NAMES))])


@pytest.mark.slow("promtool, twice for each case")
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.alert}: {case.what}")
def test_an_alert_fires_in_its_case_only(case: Case, tmp_path: Path) -> None:
    """What it says is known only to promtool: without an expected alert it prints what fires."""
    if case.fires_at is None:
        assert not check(tmp_path, [RULES[case.alert]], [quiet(case.changed, range(case.quiet_at, 91), [case.alert])])
        return
    before = range(case.quiet_at + 1)
    assert not check(tmp_path, [RULES[case.alert]], [quiet(case.changed, before, [case.alert])])
    said = check(tmp_path, [RULES[case.alert]], [quiet(case.changed, [case.fires_at], [case.alert])])
    assert f"alertname: {case.alert}, time: {case.fires_at}m" in re.sub(r"\s+", " ", said), said
    fired = said.partition("got:")[2]
    assert f'severity="{RULES[case.alert].severity}"' in fired
    assert fired.count('alertname="') == 1, "of the queue, kind or process that it is about, and no other"


def test_what_looks_healthy_while_a_queue_is_stalled(tmp_path: Path) -> None:
    """Slots are busy, leases renewed, workers alive: no other alert is about occupancy."""
    changed = {RUNNING: "8x90", **ended("mail", "100+0x90"), DUE: "0x90", OLDEST: "0x90"}
    others = sorted(NAMES - {"QueueStalled"})
    assert not check(tmp_path, rules(), [quiet(changed, range(0, 91, 5), others)])
