"""Logging: a listener that turns events into structlog lines; JSON off a terminal, colours on one.

What a line says comes from rows, handlers and libraries: it holds no password of ours, cannot steer a terminal
(CWE-150) and cannot pass for another line (CWE-117).
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping, MutableMapping
from typing import Any, Literal

import structlog

from . import events
from .events import Listener
from .safe_text import escaped, redact

_LEVELS: dict[str, int] = {
    events.JOB_STARTED: logging.DEBUG,
    events.JOB_COMPLETED: logging.INFO,
    events.JOB_RELEASED: logging.INFO,
    events.JOB_CANCELLED: logging.INFO,
    events.JOB_FAILED: logging.WARNING,
    events.JOB_STALE: logging.WARNING,
    events.JOB_LOST: logging.WARNING,
    events.JOB_SLOW: logging.WARNING,
    events.JOB_OVERDUE: logging.WARNING,
    events.JOB_DEAD: logging.ERROR,
    events.JOB_RAISED: logging.ERROR,
    events.SETTLE_REFUSED: logging.ERROR,
    events.DATABASE_AWAY: logging.WARNING,
    events.DAEMON_UNCLEAN: logging.ERROR,
    events.LEASE_FENCED: logging.ERROR,
    events.LEASE_LOST: logging.ERROR,
    events.QUEUE_DIFFERS: logging.WARNING,
    events.RETENTION_CUT: logging.WARNING,
    events.SCHEMA_AWAITED: logging.WARNING,
    events.SCHEMA_NEWER: logging.ERROR,
    events.SCHEDULE_FAILED: logging.ERROR,
    events.STRAYS_RELEASED: logging.WARNING,
    events.CHORE_FAILED: logging.ERROR,
    events.HOOK_FAILED: logging.ERROR,
}
_TRACES = ("exception", "stack")
"""The only values that take lines of their own; indented, none looks like the beginning of another event."""


def configure(level: str = "info", form: Literal["auto", "json", "console"] = "auto") -> None:
    """Sets structlog up for this process: lines go to standard error, one per event, from `level` on."""
    console = form == "console" or (form == "auto" and sys.stderr.isatty())
    renderer: Any = (
        structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback)
        if console
        else structlog.processors.JSONRenderer(serializer=_json)
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            _redact,
            *([_escape] if console else []),
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(_level(level)),
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=True,
    )
    # The driver reports each failed try of its own upkeep with a traceback: in an outage that is all one reads.
    logging.getLogger("asyncpg").setLevel(logging.ERROR)
    logging.lastResort = _Foreign(logging.WARNING)


def listener(level: str = "info") -> Listener:
    """An event listener that logs what passes `level`."""
    logger = structlog.get_logger("pgworkd")
    least = _level(level)

    def log(name: str, facts: Mapping[str, Any]) -> None:
        at = _LEVELS.get(name, logging.INFO)
        if at >= least:
            logger.log(at, name, **facts)

    return log


def silent(level: str) -> frozenset[str]:
    """The events that do not pass `level`: nobody needs to tell such a listener of them."""
    return frozenset(name for name, at in _LEVELS.items() if at < _level(level))


def _level(name: str) -> int:
    return logging.getLevelNamesMapping()[name.upper()]


class _Foreign(logging.Handler):
    """What libraries log where the app has not set up `logging`: a line like ours, instead of raw text."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            at = min(record.levelno // 10 * 10, logging.CRITICAL)  # structlog knows no levels in between
            facts = {"logger": record.name, "exc_info": record.exc_info or None}
            structlog.get_logger("pgworkd").log(at, "logged", message=record.getMessage(), **facts)
        except Exception:  # noqa: BLE001 - as every handler does
            self.handleError(record)


def _redact(_logger: Any, _method: str, line: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    return {name: _plain(value) for name, value in line.items()}


def _plain(value: Any) -> Any:
    """What both renderers write as it is, without passwords."""
    if isinstance(value, str):
        return redact(value)
    if value is None or isinstance(value, (int, float)):
        return value
    if isinstance(value, Mapping):
        return {redact(str(key)): _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    return redact(repr(value))


def _escape(_logger: Any, _method: str, line: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """For the console, whose renderer writes text as it is, and all else by repr(), which escapes. JSON always does."""
    return {escaped(name): _escaped(name, value) for name, value in line.items()}


def _escaped(name: str, value: Any) -> Any:
    if not isinstance(value, str):
        return value
    if name in _TRACES:
        return "\n".join(f"  {escaped(each)}" for each in value.splitlines())
    return escaped(value)


def _json(line: Any, **options: Any) -> str:
    return json.dumps(line, **options).replace("\x7f", "\\u007f")  # the one control that JSON leaves
