"""Names in the addresses of pages. A browser takes the parts `.` and `..` of a path for steps, however sent."""

from __future__ import annotations

import re
from typing import Annotated
from urllib.parse import quote

from fastapi import Path
from pydantic import BeforeValidator

from pgworkd.gateway.api.request.names import plain

_STEP = re.compile(r"~*\.\.?")
_MARKED = re.compile(r"~+\.\.?")


def part(name: str) -> str:
    """A name as a part of a path: what a browser would take for a step has a mark before it."""
    return quote("~" * bool(_STEP.fullmatch(name)) + name, safe="")


def _named(given: str) -> str:
    name = plain(given)
    return name[1:] if _MARKED.fullmatch(name) else name


PageName = Annotated[str, BeforeValidator(_named), Path(min_length=1, max_length=200)]
"""A name in the path of a page, as `part` writes it."""
