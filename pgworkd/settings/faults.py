"""What is wrong with a setting, in one line: its name, the source of its value, and what to write instead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from pgworkd.core.dsn import QUOTED
from pgworkd.settings.file import quoted


def contradictions(lease_s: float, heartbeat_s: float, command_timeout_s: float) -> dict[str, str]:
    """The settings that contradict each other: what is wrong with each, and what to write instead."""
    problems = {}
    if heartbeat_s > lease_s / 3:
        problems["heartbeat_s"] = (
            f"{heartbeat_s:g} is more than a third of lease_s = {lease_s:g}: set it to "
            f"{int(lease_s / 3 * 100) / 100:g} or less, or lease_s to {heartbeat_s * 3:g} or more"
        )
    if command_timeout_s >= lease_s / 2:
        problems["command_timeout_s"] = (
            f"{command_timeout_s:g} is not below half of lease_s = {lease_s:g}: set it below {lease_s / 2:g}, "
            f"or lease_s above {command_timeout_s * 2:g}"
        )
    return problems


def is_duration(name: str) -> bool:
    """True for a setting that is a length of time in seconds."""
    return name.endswith("_s") and not name.endswith("_per_s")


def lines(detail: ErrorDetails, origins: Mapping[str, str], fields: Mapping[str, FieldInfo]) -> list[str]:
    """An error of pydantic rewritten: the setting, the source of its value, and what to do."""
    problems: dict[str, str]
    if detail["type"] == "relation":
        problems = detail["ctx"]["problems"]
    else:
        name = str(detail["loc"][0])
        is_ours = detail["type"] == "value_error"
        problems = {name: str(detail["ctx"]["error"]) if is_ours else _expected(name, fields[name], detail["input"])}
        if _is_quoted(detail["input"]):
            problems = {name: QUOTED}
        elif detail["type"] == "path_not_directory":
            problems = {name: "must be a directory that is there"}
    return [f"{name} ({origins.get(name, 'default')}): {problem}" for name, problem in problems.items()]


def _is_quoted(value: object) -> bool:
    return isinstance(value, str) and len(value) > 1 and value[0] == value[-1] and value[0] in "'\""


def _expected(name: str, field: FieldInfo, value: object) -> str:
    if get_origin(field.annotation) is Literal:
        return f"must be one of {', '.join(get_args(field.annotation))}, not {quoted(value)}"
    if field.annotation not in (int, int | None, float, float | None):
        return "must be text"
    low, high = (getattr(bound, key) for key in ("ge", "le") for bound in field.metadata if hasattr(bound, key))
    whole = "whole " if field.annotation in (int, int | None) else ""
    if is_duration(name):
        return f"must be a number of seconds from {low:g} to {high:g} (or 30s, 10m, 1h), not {quoted(value)}"
    unit = " of days" if name.endswith("_days") else ""
    return f"must be a {whole}number{unit} from {low:g} to {high:g}, not {quoted(value)}"
