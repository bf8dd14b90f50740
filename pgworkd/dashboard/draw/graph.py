"""Jobs that wait for each other, from left to right: in layers by the longest way, each after all that it waits for."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple
from uuid import UUID

from pgworkd.admin.batches import ConnectedJob

NODE_WIDTH, NODE_HEIGHT, GAP_X, GAP_Y, EDGE, LANE_HEIGHT = 168, 36, 60, 10, 4, 6
LABEL_CHARS = 22
SWEEPS = 4
"""How often layers are sorted by their neighbours, so that fewer lines cross."""
LANES_MAX = 3000
"""Places for lines between nodes. If there are more, lines go behind nodes."""
Slot = UUID | tuple[UUID, UUID, int]
"""What has a place in a layer: a job; or a line from a job to another, which passes through that layer."""


class Node(NamedTuple):
    """A job of the graph, by its left upper corner; `after`: the jobs in the graph that it waits for."""

    id: UUID
    label: str
    status: str
    x: float
    y: float
    after: Sequence[UUID]


class Graph(NamedTuple):
    """Nodes, and the lines between them as the `d` of SVG paths."""

    nodes: Sequence[Node]
    edges: Sequence[str]
    width: int
    height: int


def graph(jobs: Sequence[ConnectedJob]) -> Graph:
    """The graph of these jobs; what they wait for outside of them is left out."""
    known = {job.id for job in jobs}
    after = {job.id: [other for other in job.after if other in known] for job in jobs}
    layers, lines = _laned(_layers(after), after)
    _sort(layers, lines)
    heights = [sum(_height(each) + GAP_Y for each in layer) - GAP_Y for layer in layers]
    height, places = max(heights, default=0), dict[Slot, tuple[float, float]]()
    for number, layer in enumerate(layers):
        y = EDGE + (height - heights[number]) / 2
        for each in layer:
            places[each] = EDGE + number * (NODE_WIDTH + GAP_X), y + _height(each) / 2
            y += _height(each) + GAP_Y
    nodes = [
        Node(job.id, _cut(job.kind), job.status, x, y - NODE_HEIGHT / 2, after[job.id])
        for job in jobs
        for x, y in [places[job.id]]
    ]
    nodes.sort(key=lambda each: (each.x, each.y))  # the order in which the keyboard goes through them
    width = len(layers) * (NODE_WIDTH + GAP_X) - GAP_X + 2 * EDGE
    return Graph(nodes, [_path([places[each] for each in line]) for line in lines], width, height + 2 * EDGE)


def _laned(layers: list[list[UUID]], after: dict[UUID, list[UUID]]) -> tuple[list[list[Slot]], list[list[Slot]]]:
    """Layers with a place for each line that passes through; and the lines, each as the places that it goes through."""
    number = {job_id: number for number, layer in enumerate(layers) for job_id in layer}
    found = [list[Slot](layer) for layer in layers]
    pairs = [(other, job_id) for job_id, others in after.items() for other in others]
    between = {pair: range(number[pair[0]] + 1, number[pair[1]]) for pair in pairs}
    if sum(map(len, between.values())) > LANES_MAX:
        between = dict.fromkeys(pairs, range(0))
    lines = list[list[Slot]]()
    for (other, job_id), through in between.items():
        lanes: list[Slot] = [(other, job_id, each) for each in through]
        lines.append([other, *lanes, job_id])
        for each, lane in zip(through, lanes, strict=True):
            found[each].append(lane)
    return found, lines


def _height(slot: Slot) -> int:
    return NODE_HEIGHT if isinstance(slot, UUID) else LANE_HEIGHT


def _layers(after: dict[UUID, list[UUID]]) -> list[list[UUID]]:
    """The jobs by the longest way to them; in a circle, which only rows written by hand can make, all at its end."""
    left = {job_id: set(others) for job_id, others in after.items()}
    layers = list[list[UUID]]()
    while left:
        layer = [job_id for job_id, others in left.items() if not others] or list(left)
        layers.append(layer)
        for job_id in layer:
            del left[job_id]
        for others in left.values():
            others.difference_update(layer)
    return layers


def _sort(layers: list[list[Slot]], lines: list[list[Slot]]) -> None:
    """Sorts each layer by the middle of its neighbours: of those to the left and of those to the right, in turns."""
    left, right = dict[Slot, list[Slot]](), dict[Slot, list[Slot]]()
    for line in lines:
        for one, other in pairwise(line):
            left.setdefault(other, []).append(one)
            right.setdefault(one, []).append(other)
    row = {slot: row for layer in layers for row, slot in enumerate(layer)}

    def middle(slot: Slot, neighbours: dict[Slot, list[Slot]]) -> float:
        rows = [row[other] for other in neighbours.get(slot, [slot])]
        return sum(rows) / len(rows)

    for sweep in range(SWEEPS):
        neighbours, ordered = (right, layers[::-1]) if sweep % 2 else (left, layers)
        for layer in ordered:
            middles = {slot: middle(slot, neighbours) for slot in layer}
            layer.sort(key=middles.__getitem__)
            row |= {slot: place for place, slot in enumerate(layer)}


def _path(points: Sequence[tuple[float, float]]) -> str:
    """Curves from the right side of a node, through the width of each layer between, to the left side of another."""
    parts = [f"M{points[0][0] + NODE_WIDTH:g} {points[0][1]:g}"]
    for (x, y), (to_x, to_y) in pairwise(points):
        bend = GAP_X / 2
        parts.append(f"C{x + NODE_WIDTH + bend:g} {y:g} {to_x - bend:g} {to_y:g} {to_x:g} {to_y:g}")
        parts.append(f"H{to_x + NODE_WIDTH:g}" if (to_x, to_y) != points[-1] else "")
    return "".join(parts)


def _cut(text: str) -> str:
    return text if len(text) <= LABEL_CHARS else text[: LABEL_CHARS - 1] + "…"
