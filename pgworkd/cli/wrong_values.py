"""Errors about options and values on the command line, in this program's words.

typer validates with pydantic and shows its errors as they are, such as "Input should be a valid integer, unable to
parse string as an integer".
"""

from __future__ import annotations

from typing import Any

from pgworkd.settings.config import Settings
from pgworkd.settings.file import quoted

_KINDS = {
    "int": "must be a whole number",
    "float": "must be a number",
    "finite": "must be a finite number",
    "uuid": "must be a UUID, like 01a20d6d-c6da-7314-85dc-d6708cbcaadf",
    "bool": "must be true or false",
    "path": "must be a path",
    "string": "must be text",
}
"""By the first word of pydantic's type of the error: int_parsing, int_from_float, uuid_type and so on."""


def reworded(error: Any) -> str:
    """The message of typer's error about the command line; unchanged if nothing better is known."""
    text = str(error.format_message())
    setting = str(getattr(error, "option_name", "")).lstrip("-").replace("-", "_")
    if text.startswith("No such option") and setting in Settings.model_fields:
        return f"No such option: --{setting.replace('_', '-')}. It is a setting: set PGWORKD_{setting.upper()}"
    faults = getattr(error.__cause__, "errors", None)
    if faults is None:
        return text
    detail = faults(include_url=False)[0]
    theirs, ours = str(getattr(error, "message", "")), _in_words(detail)
    return text.replace(theirs, ours) if theirs and ours else text


def _in_words(detail: Any) -> str | None:
    """An error of pydantic in words: what is accepted and what was given; None for an unknown type of error."""
    kind, bounds = str(detail["type"]), detail.get("ctx", {})
    if kind == "value_error":  # a check of typer's own: a complete sentence
        return str(bounds.get("error", "")) or None
    if kind == "greater_than_equal":
        accepted = f"must be {bounds['ge']} or more"
    elif kind == "less_than_equal":
        accepted = f"must be {bounds['le']} or less"
    elif kind in ("enum", "literal_error"):
        accepted = f"must be one of {bounds['expected']}"
    elif kind.partition("_")[0] in _KINDS:
        accepted = _KINDS[kind.partition("_")[0]]
    else:
        return None
    return f"{accepted}, not {quoted(detail['input'])}"
