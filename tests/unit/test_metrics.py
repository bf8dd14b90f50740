"""Metrics: pages are well formed, totals are those of the processes together and never fall."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest

from pgworkd.engine.counters import OTHER
from pgworkd.engine.life.daemon import Daemon
from pgworkd.metrics import samples as samples_module
from pgworkd.metrics.collector import DaemonCollector
from pgworkd.metrics.daemon import DaemonSource
from pgworkd.metrics.endpoint import MetricsPages, readiness
from pgworkd.metrics.families import FAMILIES
from pgworkd.metrics.fleet import FleetSource
from pgworkd.metrics.page import MetricsPage, accepts_openmetrics
from pgworkd.metrics.samples import BY_NAME, Check, Samples, bounded, counted, dumped, loaded, merged
from tests.kits.apps import app_of_one
from tests.kits.commands import NOWHERE
from tests.kits.daemon import quick_options
from tests.kits.metrics import (
    COUNTS,
    NO_PROMETHEUS,
    PROMETHEUS_ACCEPT,
    PROMTOOL,
    FakeSource,
    Response,
    complaints,
    fell,
    filled,
)

TEXT, OPENMETRICS = {"content-type": "text/plain"}, {"content-type": "application/openmetrics-text"}
ODD = 'a"b\\c\nd%s%%é\U0001f600{},= '


def read(samples: Samples, *, openmetrics: bool = False) -> dict[object, float]:
    page = MetricsPage().write(samples, openmetrics=openmetrics).decode()
    return dict(Response(200, OPENMETRICS if openmetrics else TEXT, page).page)


def test_both_formats_are_read_as_the_same_values() -> None:
    samples = filled(2, 3)
    assert read(samples) == read(samples, openmetrics=True)
    assert {name.removesuffix("_bucket").removesuffix("_count").removesuffix("_sum") for name, _ in read(samples)} >= {
        family.name for family in FAMILIES if family.source == "process"
    }


def test_a_daemon_has_a_value_of_each_family_from_its_start() -> None:
    samples = DaemonSource(Daemon(app_of_one(), quick_options(NOWHERE))).samples()
    assert samples.keys() == {family.name for family in FAMILIES if family.source == "process"}


def test_the_page_has_what_a_collector_of_prometheus_client_has() -> None:
    registry = CollectorRegistry()
    source = FakeSource(filled(2, 2))
    registry.register(DaemonCollector(source=source))
    ours = {name: rows for name, rows in source.samples().items() if BY_NAME[name].is_ours}
    assert read(ours) == Response(200, TEXT, generate_latest(registry).decode()).page


def test_counts_become_cumulative() -> None:
    counts = [0] * COUNTS
    counts[0], counts[3], counts[-1] = 2, 5, 1
    page = read({"pgworkd_claim_seconds": {(): (counts, 7.25)}})
    assert page["pgworkd_claim_seconds_bucket", (("le", "0.001"),)] == 2
    assert page["pgworkd_claim_seconds_bucket", (("le", "0.01"),)] == 7
    assert page["pgworkd_claim_seconds_bucket", (("le", "10000.0"),)] == 7
    assert page["pgworkd_claim_seconds_bucket", (("le", "+Inf"),)] == page["pgworkd_claim_seconds_count", ()] == 8
    assert page["pgworkd_claim_seconds_sum", ()] == 7.25


@pytest.mark.parametrize("openmetrics", [False, True])
def test_any_name_of_a_queue_or_kind_comes_through(openmetrics: bool) -> None:
    counts = [1] * COUNTS
    samples: Samples = {
        "pgworkd_jobs_started_total": {(ODD, "k"): 1},
        "pgworkd_job_run_seconds": {("q", ODD): (counts, 1.0)},
    }
    page = read(samples, openmetrics=openmetrics)
    assert page["pgworkd_jobs_started_total", (("kind", "k"), ("queue", ODD))] == 1
    assert page["pgworkd_job_run_seconds_count", (("kind", ODD), ("queue", "q"))] == COUNTS


@pytest.mark.skipif(PROMTOOL is None, reason=NO_PROMETHEUS)
def test_promtool_has_no_complaint() -> None:
    everything = filled(2, 2) | {
        family.name: {("x",) * len(family.labels): 1} for family in FAMILIES if family.source == "database"
    }
    assert complaints(MetricsPage().write(everything).decode()) == ""


@pytest.mark.parametrize(
    ("accept", "openmetrics"),
    [
        ([PROMETHEUS_ACCEPT], True),
        (["application/openmetrics-text"], True),
        (["application/openmetrics-text; version=1.0.0, text/plain"], False),
        (["application/openmetrics-text;version=1.0.0;q=0", "text/plain;q=0.1"], False),
        (["application/openmetrics-text;version=2.0.0"], False),
        (["application/openmetrics-text;q=x"], False),
        (["*/*"], False),
        (["text/html, */*;q=0.8"], False),
        ([";;,,=;q="], False),
        ([], False),
    ],
)
def test_the_format_is_chosen_by_accept(accept: list[str], openmetrics: bool) -> None:
    assert accepts_openmetrics(accept) is openmetrics


# Several processes

numbers = st.integers(0, 1000)
histograms = st.tuples(st.lists(numbers, min_size=COUNTS, max_size=COUNTS), numbers)
names = st.sampled_from(["a", "b", "c"])


@st.composite
def snapshots(draw: st.DrawFn) -> Samples:
    found: Samples = {}
    for family in FAMILIES:
        if family.source == "process":
            keys = st.tuples(*(names for _ in family.labels))
            values = histograms if family.kind == "histogram" else numbers
            found[family.name] = draw(st.dictionaries(keys, values, max_size=2))  # type: ignore[arg-type]
    return found


@pytest.mark.slow("generated snapshots of many processes")
@given(st.lists(snapshots(), max_size=4))
def test_a_merge_is_what_one_process_would_have_counted(parts: list[Samples]) -> None:
    total = merged(parts)
    for family in FAMILIES:
        keys = {key for part in parts for key in part.get(family.name, {})}
        assert total.get(family.name, {}).keys() == keys
        for key in keys:
            values = [part[family.name][key] for part in parts if key in part[family.name]]
            found = total[family.name][key]
            if isinstance(found, tuple):
                columns = zip(*(value[0] for value in values if isinstance(value, tuple)), strict=True)
                assert found[0] == [sum(column) for column in columns]
                assert found[1] == sum(value[1] for value in values if isinstance(value, tuple))
            else:
                assert found == {"sum": sum, "min": min, "max": max}[family.merge](values)  # type: ignore[operator]


@pytest.mark.slow("generated snapshots of many processes")
@given(st.lists(snapshots(), min_size=1, max_size=4))
def test_a_merge_of_merges_is_the_same_and_changes_nothing(parts: list[Samples]) -> None:
    before = [dumped("x", part, []) for part in parts]
    assert merged([merged(parts[:1]), merged(parts[1:])]) == merged(parts)
    assert [dumped("x", part, []) for part in parts] == before


@given(snapshots())
def test_a_snapshot_survives_its_journey(samples: Samples) -> None:
    checks = [Check("database", ok=False, says="é")]
    assert loaded(dumped("id", samples, checks)) == ("id", samples, checks)


@pytest.mark.parametrize("data", [b"", b"{}", b"[1]", b'{"id": 1, "samples": [], "checks": []}', b"\xff"])
def test_anything_else_is_no_snapshot(data: bytes) -> None:
    with pytest.raises((ValueError, KeyError, TypeError, AttributeError)):
        loaded(data)


def test_a_family_of_another_version_is_left_out() -> None:
    assert merged([{"pgworkd_new_total": {(): 1}}]) == {}


class Fleet:
    """Processes w1, w2, ...: each answers, is silent or starts anew, in turn."""

    def __init__(self) -> None:
        self.source = FleetSource(dict)
        self.counts: dict[str, int] = {}
        self.lives: dict[str, int] = {}

    def shows(self, silent: set[str]) -> dict[str, float]:
        answers = {
            name: (f"{name}.{self.lives[name]}", snapshot(count), [Check("lease", ok=True, says="held")])
            for name, count in self.counts.items()
            if name not in silent
        }
        samples, _ = self.source.show(self.counts.keys(), answers, dict.fromkeys(sorted(silent), "frozen"))
        return {name: rows[()] for name, rows in samples.items() if () in rows}  # type: ignore[misc]


def snapshot(count: int) -> Samples:
    return {
        "pgworkd_lease_fences_total": {(): count},
        "pgworkd_lease_remaining_seconds": {(): 10 - count % 10},
        "pgworkd_claim_seconds": {(): ([count] + [0] * (COUNTS - 1), float(count))},
    }


@given(
    st.lists(
        st.tuples(st.sampled_from(["w1", "w2", "w3"]), st.integers(0, 5), st.sampled_from(["", "die", "silent"])),
        max_size=30,
    )
)
def test_totals_never_fall_whoever_dies_or_is_silent(steps: list[tuple[str, int, str]]) -> None:
    fleet, seen, before = Fleet(), 0, 0.0
    fleet.counts, fleet.lives = {f"w{i}": 0 for i in (1, 2, 3)}, {f"w{i}": 0 for i in (1, 2, 3)}
    for name, more, fate in steps:
        if fate == "die":
            fleet.counts[name], fleet.lives[name] = 0, fleet.lives[name] + 1
        fleet.counts[name] += more
        seen += more
        now = fleet.shows({name} if fate == "silent" else set())["pgworkd_lease_fences_total"]
        assert before <= now <= seen
        before = now
    assert fleet.shows(set())["pgworkd_lease_fences_total"] <= seen
    if not any(fate == "silent" for _, _, fate in steps):
        assert fleet.shows(set()).get("pgworkd_lease_fences_total", 0) == seen


def test_a_silent_process_is_left_out_of_gauges_and_named() -> None:
    source = FleetSource(dict)
    well = [Check("lease", ok=True, says="held"), Check("loop", ok=True, says="runs")]
    late = [Check("lease", ok=True, says="held"), Check("loop", ok=False, says="blocked")]
    both = {"a": ("1", snapshot(3), well), "b": ("2", snapshot(5), late)}
    samples, checks = source.show({"a", "b"}, both, {})
    assert samples["pgworkd_lease_remaining_seconds"] == {(): 5}
    assert [check.name for check in checks if not check.ok] == ["b: loop"]
    samples, checks = source.show({"a", "b"}, {"a": both["a"]}, {"b": "does not answer"})
    assert samples["pgworkd_lease_remaining_seconds"] == {(): 7}
    assert samples["pgworkd_lease_fences_total"] == {(): 8}
    assert samples["pgworkd_processes"] == {("wanted",): 2, ("answering",): 1}
    assert {check.name: check.says for check in checks if not check.ok} == {
        "processes": "1 of 2 answer",
        "b: answers": "does not answer",
    }


def test_nobody_s_answer_is_not_ready() -> None:
    _, checks = FleetSource(dict).show({"a"}, {}, {"a": "starts"})
    assert readiness(checks).status == 503
    assert readiness([]).status == 503


def test_kinds_without_end_do_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples_module, "KEPT_MAX", 10)
    kept = bounded({"pgworkd_jobs_started_total": {("q", f"k{i}"): 1 for i in range(100)}})
    rows = kept["pgworkd_jobs_started_total"]
    assert len(rows) == 6
    assert rows["q", OTHER] == 95


def test_what_stays_counted() -> None:
    assert {BY_NAME[name].kind for name in counted(filled(1, 1))} == {"counter", "histogram"}


def test_readiness_tells_each_check() -> None:
    answer = readiness([Check("database", ok=True, says="answers"), Check("loop", ok=False, says="blocked")])
    assert answer.status == 503
    assert json.loads(answer.body) == {
        "ready": False,
        "checks": {"database": {"ok": True, "says": "answers"}, "loop": {"ok": False, "says": "blocked"}},
    }


def test_other_paths_are_none() -> None:
    endpoint = MetricsPages(FakeSource({}))
    assert endpoint.respond("/", []) is None
    assert endpoint.respond("/snapshot", []) is None
    assert endpoint.report("/metrics", []) is None


def test_a_fall_is_seen() -> None:
    key = ("a_total", ())
    assert fell({key: 2.0}, {key: 1.0}) == [key]
    assert fell({key: 2.0}, {}) == [key]
    assert not fell({key: 2.0}, {key: 2.0})
