"""Dashboards for Grafana 10 and later, as JSON: rows of panels, and variables for the source of the data and more."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

SCHEMA_VERSION = 39
"""Of the JSON: Grafana 10.3. Later versions read it and convert it."""
WIDTH = 24
"""Of a board, in Grafana's columns."""
STAT_HEIGHT, GRAPH_HEIGHT, TABLE_HEIGHT = 4, 8, 9


class Query(NamedTuple):
    """One query of a panel, in the language of the board's source. `legend`: names of labels in braces."""

    text: str
    legend: str = ""


class Panel(NamedTuple):
    """One panel. `unit`: Grafana's name of one."""

    title: str
    description: str
    unit: str
    queries: tuple[Query, ...]
    kind: Literal["timeseries", "stat", "table"] = "timeseries"
    alarm_at: float | None = None
    """From this value on it is red. 0: red at 0, for what is up or down."""


class Row(NamedTuple):
    """A row of panels under one heading."""

    title: str
    panels: tuple[Panel, ...]


class Board(NamedTuple):
    """A dashboard. `source`: Grafana's type of its data source; `variables`: what to narrow it down by, in its JSON."""

    uid: str
    title: str
    description: str
    source: str
    variables: tuple[dict[str, Any], ...]
    rows: tuple[Row, ...]


def dashboard(board: Board) -> dict[str, Any]:
    """The board as Grafana imports it; the same for the same board, so that it can be kept in version control."""
    panels: list[dict[str, Any]] = []
    top = 0
    for row in board.rows:
        panels.append(_heading(len(panels) + 1, row.title, top))
        top += 1
        for group in _lines(row.panels):
            width, height = WIDTH // len(group), _height(group[0])
            for place, panel in enumerate(group):
                at = {"x": place * width, "y": top, "w": width, "h": height}
                panels.append(_panel(board, panel, len(panels) + 1, at))
            top += height
    return {
        "uid": board.uid,
        "title": board.title,
        "description": board.description,
        "tags": ["pgworkd"],
        "schemaVersion": SCHEMA_VERSION,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-3h", "to": "now"},
        "timezone": "browser",
        "annotations": {"list": []},
        "links": [],
        "templating": {"list": [_source(board), *(_variable(board, each) for each in board.variables)]},
        "panels": panels,
    }


def _lines(panels: tuple[Panel, ...]) -> list[list[Panel]]:
    """Panels side by side: up to eight numbers, three graphs or one table."""
    lines: list[list[Panel]] = []
    for panel in panels:
        most = {"stat": 8, "timeseries": 3, "table": 1}[panel.kind]
        if lines and lines[-1][0].kind == panel.kind and len(lines[-1]) < most:
            lines[-1].append(panel)
        else:
            lines.append([panel])
    return lines


def _height(panel: Panel) -> int:
    return {"stat": STAT_HEIGHT, "timeseries": GRAPH_HEIGHT, "table": TABLE_HEIGHT}[panel.kind]


def _heading(number: int, title: str, top: int) -> dict[str, Any]:
    at = {"x": 0, "y": top, "w": WIDTH, "h": 1}
    return {"id": number, "type": "row", "title": title, "collapsed": False, "gridPos": at, "panels": []}


def _panel(board: Board, panel: Panel, number: int, at: dict[str, int]) -> dict[str, Any]:
    steps: list[dict[str, Any]] = [{"color": "green", "value": None}]
    if panel.alarm_at is not None:
        steps = [*steps, {"color": "red", "value": panel.alarm_at}] if panel.alarm_at else _UP_OR_DOWN
    defaults: dict[str, Any] = {"unit": panel.unit, "thresholds": {"mode": "absolute", "steps": steps}}
    if panel.kind == "timeseries":
        defaults |= {"min": 0, "custom": {"lineWidth": 1, "fillOpacity": 10, "showPoints": "auto", "spanNulls": False}}
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": _of(board),
        "gridPos": at,
        "targets": [_target(board, panel, query, chr(ord("A") + i)) for i, query in enumerate(panel.queries)],
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": _OPTIONS[panel.kind],
    }


_UP_OR_DOWN: list[dict[str, Any]] = [{"color": "red", "value": None}, {"color": "green", "value": 1}]
_OPTIONS: dict[str, dict[str, Any]] = {
    "timeseries": {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
        "tooltip": {"mode": "multi", "sort": "desc"},
    },
    "stat": {
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        "colorMode": "background",
        "graphMode": "none",
        "textMode": "auto",
        "justifyMode": "auto",
        "orientation": "auto",
    },
    "table": {"showHeader": True, "cellHeight": "sm"},
}


def _of(board: Board) -> dict[str, str]:
    return {"type": board.source, "uid": "${datasource}"}


def _target(board: Board, panel: Panel, query: Query, ref: str) -> dict[str, Any]:
    target: dict[str, Any] = {"refId": ref, "datasource": _of(board)}
    if board.source == "prometheus":
        at_once = panel.kind != "timeseries"
        target |= {"expr": query.text, "legendFormat": query.legend, "editorMode": "code"}
        target |= {
            "range": not at_once,
            "instant": at_once,
            "format": "table" if panel.kind == "table" else "time_series",
        }
        return target
    form = "time_series" if panel.kind == "timeseries" else "table"
    return target | {"rawSql": query.text, "rawQuery": True, "editorMode": "code", "format": form}


def _source(board: Board) -> dict[str, Any]:
    return {
        "name": "datasource",
        "label": "Data source",
        "type": "datasource",
        "query": board.source,
        "current": {},
        "hide": 0,
        "refresh": 1,
    }


def _variable(board: Board, variable: dict[str, Any]) -> dict[str, Any]:
    """A list of values asked for again when the range of time changes, with All at first."""
    return {
        "type": "query",
        "datasource": _of(board),
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "current": {"selected": True, "text": "All", "value": "$__all"},
        "hide": 0,
        **variable,
    }
