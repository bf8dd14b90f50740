"""Debian's Prometheus, a fleet that it scrapes, and each query of the board put to it as Grafana would."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.kits.boards import ALERTS, PROMETHEUS, rules
from tests.kits.prometheus import ODD, Prometheus, healthy, needs_prometheus, page, prometheus, served

pytestmark = [needs_prometheus, pytest.mark.slow("a Prometheus that scrapes for half a minute")]
QUEUES = ("mail", ODD, "back`quote")
SCRAPED_S = 12
EVERYTHING = "(?s:.*)"
"""What Grafana puts in for All. (In `.*` the dot is no newline, which a queue's name may hold.)"""
MINUTES_PER_S = 0.5
"""How fast the fleet's time goes."""
TARGETS = [(panel["title"], target["expr"]) for panel in PROMETHEUS["panels"] for target in panel.get("targets", ())]


@pytest.fixture(scope="module")
def scraping(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """A Prometheus that has scraped a fleet with a queue of an odd name for some seconds, and has the rules loaded."""
    series, began = healthy(*QUEUES), time.monotonic()
    with (
        served(lambda: page(series, (time.monotonic() - began) * MINUTES_PER_S)) as port,
        prometheus(tmp_path_factory.mktemp("prometheus"), {"fleet": port}, ALERTS) as server,
    ):
        deadline = time.monotonic() + 60
        while len(_values(server)) < SCRAPED_S:
            assert time.monotonic() < deadline, server.get("/api/v1/targets")
            time.sleep(0.5)
        yield server


def _values(server: Prometheus) -> list[Any]:
    found = server.range("pgworkd_build_info")
    return list(found[0]["values"]) if found else []


def filled(expr: str, queue: str = EVERYTHING, kind: str = EVERYTHING) -> str:
    """The query as Grafana sends it: `:regex` escapes what is special in a regular expression, All is not escaped."""
    values = {"job": "fleet", "queue": queue, "kind": kind}
    escaped = {
        name: each if each == EVERYTHING else re.sub(r"[\\^$*+?.()|\[\]{}/]", r"\\\g<0>", each)
        for name, each in values.items()
    }
    expr = re.sub(r"\$\{(\w+):regex\}", lambda found: escaped[found[1]], expr)
    expr = expr.replace("$__rate_interval", "4s")
    assert "$" not in expr
    return expr


@pytest.mark.parametrize(("title", "expr"), TARGETS)
def test_each_query_returns_data(scraping: Prometheus, title: str, expr: str) -> None:
    found = scraping.range(filled(expr))
    values = [value for each in found for _, value in each["values"]]
    assert values, title
    assert not {"NaN", "+Inf", "-Inf"} & {each["values"][-1][1] for each in found}


@pytest.mark.parametrize(("title", "expr"), [each for each in TARGETS if "${queue" in each[1]])
def test_a_queue_with_an_odd_name_can_be_chosen(scraping: Prometheus, title: str, expr: str) -> None:
    found = scraping.range(filled(expr, ODD, "send"))
    assert found, title
    assert {each["metric"].get("queue", ODD) for each in found} == {ODD}


def test_all_shows_every_queue(scraping: Prometheus) -> None:
    expr = next(expr for title, expr in TARGETS if title == "Started by queue")
    assert {each["metric"]["queue"] for each in scraping.range(filled(expr))} == set(QUEUES)


def test_what_is_drawn_is_what_happens(scraping: Prometheus) -> None:
    """The fleet starts 60 jobs a minute per queue and kind, in half the time."""
    (expr,) = (expr for title, expr in TARGETS if title == "Started by queue")
    (series,) = scraping.range(filled(expr, "mail"))
    per_s = [float(value) for _, value in series["values"]]
    assert per_s[len(per_s) // 2] == pytest.approx(2 * 60 * MINUTES_PER_S, rel=0.3)


def test_variables_have_values(scraping: Prometheus) -> None:
    for variable in PROMETHEUS["templating"]["list"][1:]:
        found = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["query"]["query"])
        assert found
        values = scraping.get(f"/api/v1/label/{found[2]}/values", **{"match[]": filled(found[1])})
        assert set(values) == {"job": {"fleet"}, "queue": set(QUEUES), "kind": {"send", "build"}}[found[2]]


def test_prometheus_loads_the_rules_and_none_fires(scraping: Prometheus) -> None:
    (group,) = scraping.get("/api/v1/rules")["groups"]
    assert [rule["name"] for rule in group["rules"]] == [rule.name for rule in rules()]
    assert {rule["health"] for rule in group["rules"]} == {"ok"}
    assert {rule["state"] for rule in group["rules"]} == {"inactive"}
