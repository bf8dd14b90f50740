"""Output of commands: tables on a terminal, plain columns in a pipe, JSON for programs; always escaped."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

import typer

from pgworkd.errors import PgworkdError
from pgworkd.process.redaction import escaped, redact

_MODULE = re.compile(r"^(?:[^\W\d]\w*\.)+(?=[^\W\d]\w*(?::|$))")
CELL_CHARS_MAX = 200
"""The longest text in a table that goes into a pipe; --json prints all of it."""


def out(text: str) -> None:
    """Prints to standard output. If its reader has closed the pipe, the command ends with exit code 0.

    PgworkdError if it cannot be written, as on a full disk.
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


def note(text: str, level: str = "info") -> None:
    """Prints one line to standard error; `level`: for the journal, if that is where it goes."""
    line = " ".join(redact(text).splitlines())
    mark = ""
    if "JOURNAL_STREAM" in os.environ:
        from pgworkd import log

        mark = log.mark(level)
    try:
        sys.stderr.write(f"{mark}pgworkd: {escaped(line)}\n")
        sys.stderr.flush()
    except (OSError, AttributeError):
        pass  # standard error is closed


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
    """True if standard output is a terminal."""
    return sys.stdout is not None and sys.stdout.isatty()


def shortened(text: str, chars: int) -> str:
    """`text`, or its first characters and an ellipsis where it is longer than `chars`."""
    return text if len(text) <= chars else text[: max(0, chars - 1)] + "\u2026"


def brief_error(text: str | None) -> str | None:
    """An error for a table: its type without the module, so that the message has room."""
    return None if text is None else _MODULE.sub("", text, count=1)


def table(columns: Sequence[str], rows: Iterable[Sequence[object]], *, whole: bool = False, legible: str = "") -> None:
    """Prints rows under their headings, one line each: fitted to a terminal, as wide as needed in a pipe.

    Long texts are shortened, in a pipe to CELL_CHARS_MAX; `whole` prints all of them, on a terminal in several lines.
    `legible`: the column whose text matters most on a narrow terminal.
    """
    rows = list(rows)
    if is_terminal():
        from pgworkd.cli.table import terminal_table

        text, left_out = terminal_table(columns, rows, cell, whole=whole, legible=legible) if rows else ("no rows", [])
        out(text)
        if left_out:
            note(f"the terminal is too narrow for {', '.join(left_out)}: widen it, or use --json")
        return
    cells = [[cell(value) if whole else shortened(cell(value), CELL_CHARS_MAX) for value in row] for row in rows]
    lines = [[name.upper() for name in columns], *cells]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    out("\n".join("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in lines))


def print_rows(rows: Sequence[Any], columns: Sequence[str], narrow: str = "", *, json: bool) -> None:
    """Prints rows of `Admin`: whole as JSON, else these columns of them; on a terminal in the order of `narrow`.

    A narrow terminal omits the rightmost first.
    """
    if json:
        as_json([row._asdict() for row in rows])
        return
    names = narrow.split() if narrow and is_terminal() else columns
    table(names, [[getattr(row, name) for name in names] for row in rows])


def as_json(value: Any) -> None:
    """Prints JSON; instants in ISO 8601, UTC."""
    out(json.dumps(value, indent=2, default=_plain).replace("\x7f", "\\u007f"))  # the one control that JSON leaves


def parsed(text: str | None) -> Any:
    """JSON text as values; the text itself if Python cannot read what Postgres stores (a number of 5,000 digits)."""
    try:
        return None if text is None else json.loads(text)
    except (ValueError, RecursionError):
        return text


def _plain(value: object) -> str:
    return value.astimezone(UTC).isoformat() if isinstance(value, datetime) else str(value)
