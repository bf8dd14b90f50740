"""Charts over time: stacked bars, lines, and sparklines, as shapes in a box of 360 by 170."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

LEFT, RIGHT, TOP, BOTTOM = 40, 354, 10, 150
SPARK_WIDTH, SPARK_HEIGHT = 72, 18


class Steps(NamedTuple):
    """The steps of time of a chart: when the first begins, how long each is, how many there are."""

    since: datetime
    step_s: int
    number: int

    @classmethod
    def until(cls, now: datetime, step_s: int, count: int) -> Steps:
        """The last `count` steps, aligned to UTC; `now` is in the last one."""
        end_s = (now.timestamp() // step_s + 1) * step_s
        return cls(datetime.fromtimestamp(end_s - step_s * count, UTC), step_s, count)

    @property
    def end(self) -> datetime:
        """When the last step ends."""
        return self.since + timedelta(seconds=self.step_s * self.number)

    def at(self, place: int) -> datetime:
        """When a step begins."""
        return self.since + timedelta(seconds=self.step_s * place)

    def place(self, at: datetime) -> int:
        """The step in which an instant is; below 0, or `number` and more, for one in none of them."""
        return int((at - self.since).total_seconds() // self.step_s)


class Tick(NamedTuple):
    """A mark of an axis, with its label."""

    at: float
    label: str


class Shape(NamedTuple):
    """A line, or the bars of one series, as the `d` of an SVG path; `kind` is its class in the style sheet."""

    kind: str
    path: str


class Hover(NamedTuple):
    """What a step says when a pointer is on it, in a column of the whole height."""

    x: float
    width: float
    says: str


class Chart(NamedTuple):
    """A chart. `rows`: the numbers as text, the first of each row the time, under the names in `columns`."""

    title: str
    legend: Sequence[tuple[str, str]]
    """The classes of what is drawn, each with its name."""
    bars: Sequence[Shape]
    lines: Sequence[Shape]
    hovers: Sequence[Hover]
    x_ticks: Sequence[Tick]
    y_ticks: Sequence[Tick]
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


class Spark(NamedTuple):
    """A small chart without axes; `says`: what it shows, in words."""

    bars: Sequence[Shape]
    says: str


def count(number: float) -> str:
    """A number of jobs in a few characters: 950, 1.25k, 35k, 4M."""
    for unit, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= unit:
            return f"{number / unit:.3g}{name}"
    return f"{number:.3g}"


def rate(number: int, length_s: float) -> str:
    """Jobs in some seconds as a rate: by the second, or by the hour if that is less than one in ten seconds."""
    per_s, unit = (number / length_s, "s") if number >= length_s / 10 else (number * 3600 / length_s, "h")
    return f"{per_s:,.0f}/{unit}" if per_s >= 100 else f"{per_s:.3g}/{unit}"


def duration(seconds: float | None) -> str:
    """A length of time with two digits that count: 4 ms, 0.25 s, 3.1 s, 12 min, 3 h, 2 d."""
    if seconds is None:
        return "–"
    if seconds < 0.0995:
        return f"{seconds * 1000:.2g} ms"
    for below, unit_s, name in ((120, 1, "s"), (7200, 60, "min"), (172_800, 3600, "h")):
        if seconds < below:
            return f"{seconds / unit_s:.2g} {name}" if seconds < 10 * unit_s else f"{seconds / unit_s:.0f} {name}"
    return f"{seconds / 86_400:.0f} d"


def ceiling(most: float) -> float:
    """The lowest round number that is not below `most`, and at least 1: the top of an axis."""
    unit = 10.0 ** math.floor(math.log10(max(most, 1.0)))
    return next(step * unit for step in (1, 1.2, 1.6, 2, 2.4, 3, 4, 5, 6, 8, 10) if step * unit >= most)


def stacked(
    title: str,
    steps: Steps,
    series: Sequence[tuple[str, str, Sequence[int]]],
    note: Callable[[int], str] = lambda _: "",
) -> Chart:
    """Bars, one for each step, of series (class, name, numbers), the first at the bottom; with rates, if they add up.

    `note`: what is said of a step besides its numbers. Steps without any are not in the rows.
    """
    top = ceiling(max((sum(numbers) for numbers in zip(*(each for _, _, each in series), strict=True)), default=1))
    hovers, rows = list[Hover](), list[list[str]]()
    width = (RIGHT - LEFT) / steps.number
    for place in range(steps.number):
        total = sum(numbers[place] for _, _, numbers in series)
        if not total:
            continue
        said = [f"{numbers[place]:,}" for _, _, numbers in series]
        more = [rate(total, steps.step_s) if place < steps.number - 1 else "so far"] if len(series) > 1 else []
        words = [f"{text} {name}" for text, (_, name, _) in zip(said, series, strict=True)]
        spoken = ", ".join(filter(None, [*words, *more, note(place)]))
        hovers.append(Hover(LEFT + width * place, width, f"{moment(steps.at(place))}: {spoken}"))
        rows.append([moment(steps.at(place)), *said, ", ".join(filter(None, [*more, note(place)]))])
    bars = _bars([(kind, numbers) for kind, _, numbers in series], (LEFT, BOTTOM), width, (BOTTOM - TOP) / top)
    halves = (0.0, 0.5, 1.0) if top >= 10 else (0.0, 1.0)  # there is no half job
    ticks = [Tick(BOTTOM - (BOTTOM - TOP) * half, count(top * half)) for half in halves]
    legend = [(kind, f"{name} {sum(numbers):,}" if len(series) > 1 else name) for kind, name, numbers in series]
    columns = ["From", *(name for _, name, _ in series), "Rate" if len(series) > 1 else ""]
    return Chart(title, legend, bars, [], hovers, _times(steps), ticks, columns, rows)


def durations(title: str, steps: Steps, series: Sequence[tuple[str, str, Sequence[float | None]]]) -> Chart:
    """Lines of series (class, name, seconds) on a scale by tens; where a number is missing a line is broken."""
    known = [value for _, _, values in series for value in values if value is not None]
    low = math.floor(math.log10(max(min(known, default=0.01), 0.001)))
    high = max(math.ceil(math.log10(max(*known, 0.001, 0.001))), low + 1)
    width = (RIGHT - LEFT) / steps.number

    def y(seconds: float) -> float:
        share = (math.log10(max(seconds, 10.0**low)) - low) / (high - low)
        return BOTTOM - (BOTTOM - TOP) * share

    lines = [
        Shape(kind, _path([(LEFT + width * (i + 0.5), y(v)) if v is not None else None for i, v in enumerate(values)]))
        for kind, _, values in series
    ]
    hovers, rows = list[Hover](), list[list[str]]()
    for place in range(steps.number):
        said = [duration(values[place]) for _, _, values in series if values[place] is not None]
        if len(said) < len(series):
            continue
        words = ", ".join(f"{name} {text}" for text, (_, name, _) in zip(said, series, strict=True))
        hovers.append(Hover(LEFT + width * place, width, f"{moment(steps.at(place))}: {words}"))
        rows.append([moment(steps.at(place)), *said])
    every = math.ceil((high - low) / 4)
    ticks = [Tick(y(10.0**power), duration(10.0**power)) for power in range(low, high + 1, every)]
    columns = ["From", *(name for _, name, _ in series)]
    legend = [(kind, name) for kind, name, _ in series]
    return Chart(title, legend, [], lines, hovers, _times(steps), ticks, columns, rows)


def spark(completed: Sequence[int], failed: Sequence[int], length: str) -> Spark:
    """Small bars of what ended in each step; `length`: of all steps together, in words."""
    most = max([1, *map(sum, zip(completed, failed, strict=True))])
    series, width = [("completed", completed), ("failed", failed)], SPARK_WIDTH / max(len(completed), 1)
    bars = _bars(series, (0, SPARK_HEIGHT), width, (SPARK_HEIGHT - 2) / most)
    return Spark(bars, f"in {length}: {sum(completed):,} completed, {sum(failed):,} failed")


def _bars(
    series: Sequence[tuple[str, Sequence[int]]], origin: tuple[float, float], width: float, unit: float
) -> list[Shape]:
    """Stacked bars of series (class, numbers), in columns of that width from the origin on; `unit`: the height of 1."""
    paths, below = {kind: "" for kind, _ in series}, [origin[1]] * len(series[0][1])
    for kind, numbers in series:
        for place, number in enumerate(numbers):
            if number:
                below[place] = max(below[place] - max(unit * number, 1.2), 0.0)  # one job of a million is seen
                x, height = origin[0] + width * (place + 0.1), max(unit * number, 1.2)
                paths[kind] += f"M{x:.1f} {below[place]:.1f}h{width * 0.8:.1f}v{height:.1f}h-{width * 0.8:.1f}z"
    return [Shape(kind, path) for kind, path in paths.items() if path]


def _path(points: Sequence[tuple[float, float] | None]) -> str:
    """The `d` of a path through points, broken where one is missing; a point alone is a short line."""
    parts, pen_is_down = [], False
    for point in points:
        if point is not None:
            parts.append(f"{'L' if pen_is_down else 'M'}{point[0]:.1f} {point[1]:.1f}" + "h.5" * (not pen_is_down))
        pen_is_down = point is not None
    return "".join(parts)


def _times(steps: Steps) -> list[Tick]:
    """Four marks of the axis of time; hours of one day by the clock, days by their date."""
    form = "%H:%M" if steps.step_s * steps.number <= 86_400 else "%d %b"
    found = []
    for part in range(4):
        place = round(steps.number * part / 4)
        at = LEFT + (RIGHT - LEFT) * place / steps.number
        found.append(Tick(at, steps.at(place).strftime(form)))
    return found


def moment(at: datetime) -> str:
    """An instant as text, in UTC, to the minute."""
    return at.astimezone(UTC).strftime("%Y-%m-%d %H:%MZ")
