"""A table that fits a terminal: texts are shortened, and columns omitted if that is not enough."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

TEXT_CHARS_MIN = 12
"""Texts are not cut shorter than this while there is a column that can be omitted."""
TEXT_CHARS_FAIR = 32
"""Empty columns are omitted before texts are cut shorter than this."""
LEGIBLE_CHARS = 40
"""The column that matters most is not cut shorter than this while there is one that can be omitted."""
GAP = 2


class _Column(NamedTuple):
    name: str
    cells: list[str]
    width: int
    least: int
    """The minimum width of the column."""
    numeric: bool
    empty: bool
    """True if the column is None, 0 or False in every row."""


def terminal_table(
    columns: Sequence[str],
    rows: Sequence[Sequence[object]],
    cell: Callable[[object], str],
    *,
    whole: bool = False,
    legible: str = "",
) -> tuple[str, list[str]]:
    """The table as text, and the names of the columns that were omitted although they are not empty.

    `whole`: texts are wrapped instead of cut. `legible`: the column that others are omitted for, as its text matters
    most. The first and the last column are never omitted.
    """
    console = Console()
    found = [_column(name, [row[index] for row in rows], cell) for index, name in enumerate(columns)]
    found = [each._replace(least=min(each.width, LEGIBLE_CHARS)) if each.name == legible else each for each in found]
    kept = _kept(found, console.width)
    widths = _widths(kept, console.width)
    shown = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="bold")
    overflow = "fold" if whole else "ellipsis"
    for column, width in zip(kept, widths, strict=True):
        justify = "right" if column.numeric else "left"
        shown.add_column(column.name, justify=justify, width=width, overflow=overflow, no_wrap=not whole)  # type: ignore[arg-type]
    for texts in zip(*(column.cells for column in kept), strict=True):
        shown.add_row(*map(Text, texts))  # not str: a name in square brackets is no markup
    console.width = max(console.width, sum(widths) + GAP * len(widths))
    with console.capture() as captured:
        console.print(shown)
    lines = [line.rstrip() for line in captured.get().splitlines()]
    return "\n".join(lines), [column.name for column in found if column not in kept and not column.empty]


def _column(name: str, values: Sequence[object], cell: Callable[[object], str]) -> _Column:
    texts = [cell(value) for value in values]
    width = max(cell_len(name), *map(cell_len, texts))
    is_text = any(isinstance(value, (str, list, tuple)) for value in values)
    least = min(width, max(cell_len(name), TEXT_CHARS_MIN)) if is_text else width
    numeric = all(isinstance(value, (int, float)) or value is None for value in values)
    return _Column(name, texts, width, least, numeric, not any(values))


def _kept(columns: list[_Column], most: int) -> list[_Column]:
    """The columns that fit into `most` characters: empty ones are omitted first, from the right."""
    kept = list(columns)
    for fair, droppable in ((TEXT_CHARS_FAIR, True), (0, False)):
        for column in reversed(columns[1:-1]):
            if sum(max(c.least, min(c.width, fair)) + GAP for c in kept) - GAP <= most:
                break
            if column in kept and (column.empty or not droppable):
                kept.remove(column)
    return kept


def _widths(columns: Sequence[_Column], most: int) -> list[int]:
    """The width of each column: the widest texts are cut first."""
    widths = [min(column.width, max(most, 1)) for column in columns]
    least = [column.least for column in columns]
    for floor in (least, [*least[:-1], 1]):  # as a last resort the last column is cut below its minimum
        while sum(widths) + GAP * (len(widths) - 1) > most:
            spare = [(width, index) for index, width in enumerate(widths) if width > floor[index]]
            if not spare:
                break
            widths[max(spare)[1]] -= 1
    return widths
