"""What Grafana does with a board: it fills in macros and variables. And a picture of a board, for docs/watching.md.

`python -m tests.kits.grafana DIR` draws docs/board.svg from the database that `pgworkd demo --data DIR` has left.
"""

from __future__ import annotations

import asyncio
import re
import sys
from collections import defaultdict
from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

import asyncpg

from pgworkd.embedded import EmbeddedPostgres
from tests.kits.boards import POSTGRES

TITLE = POSTGRES["title"]
PICTURE = Path(__file__).parents[2] / "docs" / "board.svg"
COLUMN, LINE, GAP = 52, 26, 8
"""Pixels of a column and a line of Grafana's grid, and between two panels."""
UNTIL = "Maintenance"
"""The row before which the picture ends."""
ROWS_MAX, CELL_CHARS, LEGENDS_MAX = 7, 24, 8
_COLOURS = ("#0969da", "#d1642a", "#1a7f37", "#8250df", "#bf8700", "#cf222e", "#0a7b83", "#6e7781")
_STYLE = """
  svg { font: 12px system-ui, sans-serif; background: #f6f8fa } text { fill: #1f2328 }
  .panel { fill: #ffffff; stroke: #d0d7de } .grid { stroke: #d0d7de } .small { font-size: 10px; fill: #59636e }
  .head { font-size: 14px; font-weight: 600 } .title { font-weight: 600 }
  .value { font-size: 24px; font-weight: 600; fill: #ffffff } .good { fill: #1a7f37 } .bad { fill: #cf222e }
  .none { fill: #6e7781 } .line { fill: none; stroke-width: 1.5 }
  @media (prefers-color-scheme: dark) {
    svg { background: #0d1117 } text { fill: #e6edf3 } .small { fill: #9198a1 }
    .panel { fill: #151b23; stroke: #3d444d } .grid { stroke: #3d444d }
  }"""


def literal(text: str) -> str:
    """A string of SQL."""
    return "'" + text.replace("'", "''") + "'"


def filled(
    sql: str,
    queues: Sequence[str],
    kind: str | None = None,
    *,
    begin: str = "now() - interval '3 hours'",
    end: str = "now()",
    interval_ms: int = 60_000,
) -> str:
    """A query of the board for Postgres as Grafana sends it. `begin`, `end`: SQL; `kind`: None for All."""
    sql = re.sub(r"\$__timeFilter\(([\w.]+)\)", rf"\1 BETWEEN {begin} AND {end}", sql)
    sql = sql.replace("$__timeFrom()", f"({begin})").replace("$__timeTo()", f"({end})")
    sql = sql.replace("$__interval_ms", str(interval_ms))
    sql = sql.replace("${queue:sqlstring}", ",".join(map(literal, queues)))
    sql = sql.replace("${kind:sqlstring}", literal(kind) if kind else "NULL")
    assert "$" not in re.sub(r"'[^']*'", "", sql), sql
    return sql


async def picture(dsn: str) -> str:
    """The upper part of the board for Postgres as SVG, for the time in which the database has statistics."""
    db = await asyncpg.connect(dsn)
    try:
        span = await db.fetchrow("SELECT min(at) - interval '15 s', max(at) FROM pgworkd.samples")
        assert span is not None
        begin, end = span
        # Work stopped with the demo: the board shows the moment of its last sample.
        await db.execute("SELECT set_config('pgworkd.clock', $1, false)", str(end + timedelta(seconds=2)))
        queues = [queue for (queue,) in await db.fetch("SELECT DISTINCT queue FROM pgworkd.queue_samples ORDER BY 1")]
        parts, bottom = [], 0
        panels = POSTGRES["panels"]
        titles = [panel["title"] for panel in panels]
        for panel in panels[: titles.index(UNTIL)]:
            at = panel["gridPos"]
            bottom = max(bottom, at["y"] + at["h"])
            box = (at["x"] * COLUMN + GAP, at["y"] * LINE + GAP + 30, at["w"] * COLUMN - GAP, at["h"] * LINE - GAP)
            rows = []
            for target in panel.get("targets", ()):
                sql = filled(
                    target["rawSql"],
                    queues,
                    begin=f"'{begin}'::timestamptz",
                    end=f"'{end}'::timestamptz",
                    interval_ms=5000,
                )
                rows = [dict(row) for row in await db.fetch(sql)]
            parts.append(_drawn(panel, box, rows, (begin, end)))
    finally:
        await db.close()
    width, height = 24 * COLUMN + GAP, bottom * LINE + 40
    heading = _text(GAP, 24, f"{TITLE}: {(end - begin).seconds // 60} minutes of pgworkd demo", "head")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img">\n<title>{TITLE}</title>\n<style>{_STYLE}</style>\n{heading}\n' + "\n".join(parts) + "\n</svg>\n"
    )


Box = tuple[int, int, int, int]


def _drawn(panel: dict[str, Any], box: Box, rows: list[dict[str, Any]], span: tuple[datetime, datetime]) -> str:
    x, y, width, height = box
    if panel["type"] == "row":
        return _text(x, y + 14, panel["title"], "head")
    frame = f'<rect class="panel" x="{x}" y="{y}" width="{width}" height="{height}" rx="3"/>'
    body = {"stat": _stat, "table": _table, "timeseries": _graph}[panel["type"]](panel, box, rows, span)
    return "\n".join([frame, body, _text(x + 8, y + 16, panel["title"], "title")])


def _text(x: float, y: float, text: str, kind: str = "") -> str:
    return f'<text class="{kind}" x="{x:.0f}" y="{y:.0f}">{escape(text)}</text>'


def _value(value: Any, unit: str) -> str:
    if value is None:
        return "-"
    if isinstance(value, datetime):
        return f"{value:%H:%M:%S}"
    if not isinstance(value, int | float) or isinstance(value, bool):
        return str(value)
    if unit == "s":
        return f"{value * 1000:.3g} ms" if 0 < value < 1 else f"{value:.3g} s"
    shown = f"{value:.3g}" if isinstance(value, float) else f"{value:,}"
    return f"{shown}/s" if unit == "ops" else shown


def _stat(panel: dict[str, Any], box: Box, rows: list[dict[str, Any]], _: object) -> str:
    x, y, width, height = box
    value, defaults = rows[0]["value"], panel["fieldConfig"]["defaults"]
    alarm = defaults["thresholds"]["steps"][-1]["value"]
    kind = "none" if value is None else "bad" if value >= alarm else "good"
    middle = f'x="{x + width / 2:.0f}" y="{y + height - 24}" text-anchor="middle"'
    shown = f'<text class="value" {middle}>{escape(_value(value, defaults["unit"]))}</text>'
    top = y + 24
    return f'<rect class="{kind}" x="{x}" y="{top}" width="{width}" height="{height - 24}" rx="3"/>\n{shown}'


def _table(_: dict[str, Any], box: Box, rows: list[dict[str, Any]], __: object) -> str:
    x, y, width, _height = box
    if not rows:
        return _text(x + 8, y + 38, "no rows", "small")
    step = (width - 16) / len(rows[0])
    chars = min(CELL_CHARS, int(step / 6))
    parts = [_text(x + 8 + i * step, y + 38, name, "small") for i, name in enumerate(rows[0])]
    for number, row in enumerate(rows[:ROWS_MAX]):
        for i, value in enumerate(row.values()):
            parts.append(_text(x + 8 + i * step, y + 58 + number * 20, _value(value, "short")[:chars]))
    return "\n".join(parts)


def _graph(panel: dict[str, Any], box: Box, rows: list[dict[str, Any]], span: tuple[datetime, datetime]) -> str:
    x, y, width, height = box
    lines: dict[str, list[tuple[datetime, float]]] = defaultdict(list)
    for row in rows:
        for name, value in row.items():
            if name not in ("time", "metric") and value is not None:
                label = row.get("metric", name) if name in ("value", "metric") else f"{row.get('metric', '')} {name}"
                lines[label.strip()].append((row["time"], float(value)))
    most = max((value for points in lines.values() for _, value in points), default=0) or 1.0
    left, top, right, bottom = x + 50, y + 28, x + width - 12, y + height - 46
    seconds = (span[1] - span[0]).total_seconds()
    parts = []
    for share in (0.0, 0.5, 1.0):
        level = bottom - share * (bottom - top)
        parts.append(f'<line class="grid" x1="{left}" x2="{right}" y1="{level:.0f}" y2="{level:.0f}"/>')
        parts.append(_text(x + 6, level + 4, _value(most * share, panel["fieldConfig"]["defaults"]["unit"]), "small"))
    for number, (label, points) in enumerate(sorted(lines.items())):
        colour = _COLOURS[number % len(_COLOURS)]
        places = " ".join(
            f"{left + min(max((at - span[0]).total_seconds() / seconds, 0), 1) * (right - left):.1f},"
            f"{bottom - value / most * (bottom - top):.1f}"
            for at, value in points
        )
        parts.append(f'<polyline class="line" stroke="{colour}" points="{places}"/>')
        if number < LEGENDS_MAX:
            place_x, place_y = left + number % 4 * (right - left) / 4, bottom + 18 + number // 4 * 14
            parts.append(f'<rect fill="{colour}" x="{place_x:.0f}" y="{place_y - 8:.0f}" width="8" height="8"/>')
            parts.append(_text(place_x + 11, place_y, label[:16], "small"))
    return "\n".join(parts)


if __name__ == "__main__":
    server = EmbeddedPostgres(Path(sys.argv[1]))
    server.start()
    try:
        PICTURE.write_text(asyncio.run(picture(server.dsn())), encoding="utf-8")
    finally:
        server.stop()
