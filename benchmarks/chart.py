"""The chart: an SVG without a library, readable on a light and on a dark background.

Above, the rates of one subject, each system a bar in the same unit. Below, the margin of each bar of the report:
1 is the bar itself, further right is better, whatever the unit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from .measure import Line, Rates, middle
from .report import number

WIDTH, LABELS, PLOT, LINE, BAR = 960, 400, 360, 24, 15
LABEL_CHARS = 56
MARGIN_SHOWN = 3.0
"""Longest drawn margin: three times the bar."""
_STYLE = """
  svg { font: 13px system-ui, sans-serif; background: #ffffff }
  text { fill: #1f2328 } .small { font-size: 11px; fill: #59636e } .head { font-size: 15px; font-weight: 600 }
  .ours { fill: #0969da } .other { fill: #9aa4af } .missed { fill: #d1642a } .mark { stroke: #1f2328 }
  @media (prefers-color-scheme: dark) {
    svg { background: #0d1117 } text { fill: #e6edf3 } .small { fill: #9198a1 }
    .ours { fill: #4493f8 } .other { fill: #656c76 } .missed { fill: #f0883e } .mark { stroke: #e6edf3 }
  }"""


@dataclass(frozen=True, slots=True)
class Stroke:
    """One bar: `length` is a share of the plot's width, 0 to 1."""

    label: str
    value: str
    length: float
    kind: str


def svg(title: str, subtitle: str, lines: Sequence[Line], rates: Sequence[Rates]) -> str:
    """The chart as SVG text."""
    parts: list[str] = [_text(20, 30, title, "head"), _text(20, 48, subtitle, "small")]
    top = 78
    for each in rates:
        strokes = _rates(each)
        parts += _panel(f"{each.title}, {each.unit}", strokes, top, None)
        top += _height(strokes)
    judged = _margins(lines)
    if judged:
        parts += _panel("how far each bar was reached (the line is the bar)", judged, top, 1 / MARGIN_SHOWN)
        top += _height(judged)
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top}" width="{WIDTH}" height="{top}" '
        f'role="img">\n<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n{body}\n</svg>\n'
    )


def _rates(each: Rates) -> list[Stroke]:
    medians = {name: middle(samples) for name, samples in each.values.items()}
    most = max(medians.values(), default=0.0) or 1.0
    return [
        Stroke(name, number(value), value / most, "ours" if name.startswith("pgworkd") else "other")
        for name, value in sorted(medians.items(), key=lambda item: -item[1])
    ]


def _margins(lines: Sequence[Line]) -> list[Stroke]:
    found = []
    for line in lines:
        if line.bar is not None:
            reached = math.isfinite(line.reached)  # else nothing was measured
            margin = min(line.bar.margin(line.reached), MARGIN_SHOWN) if reached else 0.0
            unit = "x" if line.reference else f" {line.unit}"
            value = f"{number(line.reached)}{unit} ({line.bar}) {line.verdict}"
            kind = "ours" if line.verdict == "holds" else "missed"
            against = f" / {line.against}" if line.against else ""
            what = _short(f"{line.row}: {line.what}", LABEL_CHARS - len(against))
            found.append(Stroke(what + against, value, margin / MARGIN_SHOWN, kind))
    return found


def _short(text: str, chars: int) -> str:
    return text if len(text) <= chars else text[: chars - 1] + "…"


def _height(strokes: Sequence[Stroke]) -> int:
    return len(strokes) * LINE + 60


def _panel(title: str, strokes: Sequence[Stroke], top: int, mark: float | None) -> list[str]:
    parts = [_text(20, top, title, "head")]
    for place, stroke in enumerate(strokes):
        y = top + 14 + place * LINE
        width = max(1.0, stroke.length * PLOT)
        parts.append(_text(LABELS, y + 12, _short(stroke.label, LABEL_CHARS), "", anchor="end"))
        parts.append(
            f'<rect class="{stroke.kind}" x="{LABELS + 10}" y="{y}" width="{width:.1f}" height="{BAR}" rx="2"/>'
        )
        after = width if mark is None else PLOT  # in a column of their own, where the line would cross them
        parts.append(_text(LABELS + 16 + after, y + 12, stroke.value, "small"))
    if mark is not None:
        x, end = LABELS + 10 + mark * PLOT, top + 14 + len(strokes) * LINE
        parts.append(f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="{top + 8}" y2="{end}" stroke-dasharray="3 3"/>')
    return parts


def _text(x: float, y: float, text: str, kind: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}">{escape(text)}</text>'
