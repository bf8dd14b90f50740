"""What is wrong with a setting, in one line: its name, the source of its value, and what to write instead."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from pgworkd.settings.file import quoted

_WITH_UNIT = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)\s*(ms|s|sec|m|min|h|d)")
_UNIT_S = {"ms": 0.001, "s": 1, "sec": 1, "m": 60, "min": 60, "h": 3600, "d": 86_400}


def lines(detail: ErrorDetails, origins: Mapping[str, str], fields: Mapping[str, FieldInfo]) -> list[str]:
    """An error of pydantic rewritten: the setting, the source of its value, and what to do."""
    problems: dict[str, str]
    if detail["type"] == "relation":
        problems = detail["ctx"]["problems"]
    else:
        name = str(detail["loc"][0])
        is_ours = detail["type"] == "value_error"
        problems = {name: str(detail["ctx"]["error"]) if is_ours else _expected(name, fields[name], detail["input"])}
        if detail["type"] == "path_not_directory":
            problems = {name: "must be a directory that is there"}
    return [f"{name} ({origins.get(name, 'default')}): {problem}" for name, problem in problems.items()]


def _expected(name: str, field: FieldInfo, value: object) -> str:
    if get_origin(field.annotation) is Literal:
        return f"must be one of {', '.join(get_args(field.annotation))}, not {quoted(value)}"
    if field.annotation not in (int, float, float | None):
        return "must be text"
    low, high = (getattr(bound, key) for key in ("ge", "le") for bound in field.metadata if hasattr(bound, key))
    whole = "whole " if field.annotation is int else ""
    unit = " of seconds" if name.endswith("_s") else " of days" if name.endswith("_days") else ""
    remedy = f"must be a {whole}number{unit} from {low:g} to {high:g}, not {quoted(value)}"
    if unit == " of seconds" and (match := _WITH_UNIT.fullmatch(str(value))):
        remedy += f": write {float(match[1]) * _UNIT_S[match[2]]:g}, without a unit"
    return remedy
