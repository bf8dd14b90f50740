"""What commands print: tables for people, plain columns for pipes, JSON for programs; always escaped."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

import typer

from .errors import PgworkdError
from .safe_text import escaped, redact

LAST_COLUMN_CHARS_MIN, LAST_COLUMN_CHARS_MAX = 16, 60


def out(text: str) -> None:
    """Prints to standard output. When nobody reads it any more, the command ends quietly: its reader has enough.

    PgworkdError where it cannot be written, as on a full disk.
    """
    if sys.stdout is None:
        return
    try:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
    except OSError as error:
        # What is still buffered would raise again when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            raise typer.Exit(0) from None
        raise PgworkdError(f"standard output cannot be written: {error.strerror}") from None


def note(text: str) -> None:
    """Prints one line to standard error."""
    line = " ".join(redact(text).splitlines())
    try:
        sys.stderr.write(f"pgworkd: {escaped(line)}\n")
        sys.stderr.flush()
    except (OSError, AttributeError):
        pass  # nobody to tell


def cell(value: object) -> str:
    """A value as text in a table."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, datetime):
        return value.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%SZ")
    if isinstance(value, float):
        return f"{value:.1f}"
    if isinstance(value, (list, tuple)):
        return escaped(", ".join(map(str, value)))
    return escaped(str(value))


def is_terminal() -> bool:
    """True if people read standard output."""
    return sys.stdout is not None and sys.stdout.isatty()


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Prints rows under their headings: as wide as they are into a pipe, fitted to a terminal."""
    rows = list(rows)
    if is_terminal():
        out(_terminal_table(columns, rows) if rows else "nothing")
        return
    lines = [[name.upper() for name in columns], *([cell(value) for value in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    out("\n".join("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in lines))


def _terminal_table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """The last column takes what the others leave; where that is too little, the terminal wraps the lines."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    # Text, not str: a name in square brackets is no markup.
    cells = [[Text(cell(value)) for value in row] for row in rows]
    by_column = zip(*cells, strict=True)
    widths = [max(len(n), *(t.cell_len for t in texts)) for n, texts in zip(columns, by_column, strict=True)]
    console = Console()
    rest = console.width - sum(widths[:-1]) - 2 * len(widths[:-1])
    widths[-1] = min(widths[-1], rest if rest >= LAST_COLUMN_CHARS_MIN else LAST_COLUMN_CHARS_MAX)
    shown = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for index, (name, width) in enumerate(zip(columns, widths, strict=True)):
        numeric = all(isinstance(row[index], (int, float)) or row[index] is None for row in rows)
        shown.add_column(name, justify="right" if numeric else "left", width=width, overflow="fold")
    for texts in cells:
        shown.add_row(*texts)
    console.width = max(console.width, sum(widths) + 2 * len(widths))
    with console.capture() as captured:
        console.print(shown)
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


def as_json(value: Any) -> None:
    """Prints JSON; instants in ISO 8601, UTC."""
    out(json.dumps(value, indent=2, default=_plain).replace("\x7f", "\\u007f"))  # the one control that JSON leaves


def parsed(text: str | None) -> Any:
    """JSON text as values; the text itself where Python cannot read what Postgres stores (a number of 5,000 digits)."""
    try:
        return None if text is None else json.loads(text)
    except (ValueError, RecursionError):
        return text


def _plain(value: object) -> str:
    return value.astimezone(UTC).isoformat() if isinstance(value, datetime) else str(value)
