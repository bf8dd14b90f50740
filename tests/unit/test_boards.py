"""What the boards and the alert rules ask for is in the table of metrics: names, labels, kinds and units."""

from __future__ import annotations

import json
import re
from itertools import chain
from typing import Any

import asyncpg
import pytest

from pgworkd.metrics.families import FAMILIES
from tests.kits.boards import POSTGRES, PROMETHEUS, VALUES, panels, rules

FAMILY = {family.name: family for family in FAMILIES}
HISTOGRAM = re.compile(r"(.*)_(bucket|sum|count)")
FROM_PROMETHEUS = {"job", "instance", "le"}
NO_STATES = {"queue", "oldest_due_s", "sample_age_s"}
"""The other columns of queue_depths."""
SELECTED = re.compile(r"\b([a-z_]+)\s*(?:\{((?:[^{}]|\{[^{}]*\})*)\})?")


def queries(panel: dict[str, Any]) -> list[str]:
    """The expressions of a panel."""
    return [target["expr"] for target in panel["targets"]]


PANELS = panels(PROMETHEUS)
WIDTH = 24
"""Of a board, in Grafana's columns."""
EXPRESSIONS = [expr for panel in PANELS for expr in queries(panel)] + [rule.expr for rule in rules()]


def metrics(expr: str) -> list[tuple[str, str]]:
    """The metrics that an expression names, with what stands in their braces."""
    return [(name, inside) for name, inside in SELECTED.findall(expr) if name.startswith(("pgworkd_", "process_"))]


def family(name: str) -> str:
    """The name in the table of one in an expression."""
    found = HISTOGRAM.fullmatch(name)
    return found[1] if found and found[1] in FAMILY and FAMILY[found[1]].kind == "histogram" else name


@pytest.mark.parametrize("expr", EXPRESSIONS)
def test_every_name_and_label_is_in_the_table(expr: str) -> None:
    named = metrics(expr)
    assert named
    known: set[str] = set()
    for name, inside in named:
        found = FAMILY[family(name)]
        assert (found.kind == "histogram") == (family(name) != name), name
        matched = set(re.findall(r"(\w+)=~?[`\"]", inside))
        assert matched <= {*found.labels, *FROM_PROMETHEUS}, f"{name}: {matched}"
        known |= {*found.labels, *FROM_PROMETHEUS}
    grouped = chain.from_iterable(each.split(", ") for each in re.findall(r"\b(?:by|on) \(([^)]*)\)", expr))
    assert set(grouped) <= known


@pytest.mark.parametrize("expr", EXPRESSIONS)
def test_values_of_labels_are_in_the_table(expr: str) -> None:
    for name, inside in metrics(expr):
        for label, value in re.findall(r'(\w+)="([^"]*)"', inside):
            assert value in VALUES[name, label], f"{name}: {label}={value}"


async def test_the_states_of_a_queue_are_those_of_the_database(db: asyncpg.Connection[Any]) -> None:
    columns = await db.fetch("SELECT attname FROM pg_attribute WHERE attrelid = 'pgworkd.queue_depths'::regclass")
    assert set(VALUES["pgworkd_queue_jobs", "state"]) == {each for (each,) in columns} - NO_STATES


def test_every_metric_is_on_the_board() -> None:
    shown = {family(name) for panel in PANELS for expr in queries(panel) for name, _ in metrics(expr)}
    assert shown == FAMILY.keys()


def unit(expr: str) -> str:
    """What the values of an expression are measured in."""
    if re.match(r"count\(|.*increase\(", expr):
        return "short"
    if "histogram_quantile" in expr or "_sum{" in expr:
        return "s"
    if " / " in expr:
        return "percentunit"
    if "rate(" in expr:
        return "ops"
    (name, _), *_ = metrics(expr)
    return {"seconds": "s", "bytes": "bytes"}.get(name.rpartition("_")[2], "short")


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_units_are_those_of_the_metrics(panel: dict[str, Any]) -> None:
    assert {unit(expr) for expr in queries(panel)} == {panel["fieldConfig"]["defaults"]["unit"]}


@pytest.mark.parametrize("expr", EXPRESSIONS)
def test_counters_are_never_shown_as_they_are(expr: str) -> None:
    """They fall at each restart."""
    counters = [name for name, _ in metrics(expr) if FAMILY[family(name)].kind != "gauge"]
    assert not counters or "rate(" in expr or "increase(" in expr


def test_queues_and_kinds_are_matched_by_variables_in_which_nothing_can_end_the_string() -> None:
    for panel in PANELS:
        for expr in queries(panel):
            for name, inside in metrics(expr):
                assert "job=~`${job:regex}`" in inside
                assert ("queue=~`${queue:regex}`" in inside) == ("queue" in FAMILY[family(name)].labels)
    text = json.dumps(POSTGRES)
    assert set(re.findall(r"\$\{(?:queue|kind)[^}]*\}", text)) == {"${queue:sqlstring}", "${kind:sqlstring}"}


BOARDS = {"prometheus": PROMETHEUS, "grafana-postgresql-datasource": POSTGRES}
"""By Grafana's type of its data source."""


@pytest.mark.parametrize("source", BOARDS)
def test_a_board_is_what_grafana_imports(source: str) -> None:
    made = BOARDS[source]
    assert made["schemaVersion"] >= 39
    assert "id" not in made, "Grafana gives one"
    ids = [panel["id"] for panel in made["panels"]]
    assert len(set(ids)) == len(ids)
    variables = [each["name"] for each in made["templating"]["list"]]
    assert variables[0] == "datasource"
    assert {"queue", "kind"} <= set(variables)
    used = set(re.findall(r"\$\{(\w+)", json.dumps(made)))
    assert used <= set(variables)
    for panel in made["panels"]:
        assert panel["title"]
        if panel["type"] != "row":
            assert panel["datasource"] == {"type": source, "uid": "${datasource}"}
            assert [target["refId"] for target in panel["targets"]] == list("ABCDEF")[: len(panel["targets"])]


@pytest.mark.parametrize("source", BOARDS)
def test_panels_fill_the_width_and_none_lies_on_another(source: str) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in BOARDS[source]["panels"]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= WIDTH
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert not cells & taken, panel["title"]
        taken |= cells
