"""Logging: a listener that turns events into structlog lines; JSON off a terminal, colours on one."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, MutableMapping
from typing import Any, Literal

import structlog

from . import events
from .events import Listener

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
    events.SETTLE_REFUSED: logging.ERROR,
    events.DATABASE_AWAY: logging.WARNING,
    events.LEASE_FENCED: logging.ERROR,
    events.LEASE_LOST: logging.ERROR,
    events.QUEUE_DIFFERS: logging.WARNING,
    events.SCHEDULE_FAILED: logging.ERROR,
    events.STRAYS_RELEASED: logging.WARNING,
    events.CHORE_FAILED: logging.ERROR,
    events.HOOK_FAILED: logging.ERROR,
}
_ESCAPES = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160))}


def configure(level: str = "info", form: Literal["auto", "json", "console"] = "auto") -> None:
    """Sets structlog up for this process: lines go to standard error, one per event, from `level` on."""
    console = form == "console" or (form == "auto" and sys.stderr.isatty())
    renderer: Any = (
        structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty()) if console else structlog.processors.JSONRenderer()
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            _escape if console else _as_is,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(_level(level)),
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=True,
    )
    # The driver reports each failed try of its own upkeep with a traceback: in an outage that is all one reads.
    logging.getLogger("asyncpg").setLevel(logging.ERROR)


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


def _escape(_logger: Any, _method: str, line: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Control characters in names and errors must not reach the terminal (CWE-150); JSON escapes them itself."""
    for key, value in line.items():
        if isinstance(value, str):
            line[key] = value.translate(_ESCAPES)
    return line


def _as_is(_logger: Any, _method: str, line: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    return line
