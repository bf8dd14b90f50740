"""The module of an application that configures structlog when it is imported, in a process of handlers."""

from __future__ import annotations

import sys
from collections.abc import MutableMapping
from typing import Any

import structlog


def add_service(_logger: Any, _method: str, line: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    return {**line, "service": "shop"}


def set_up(file: Any = None) -> None:
    """Processors of its own, for what is left by `structlog.get_logger`."""
    structlog.configure(
        processors=[add_service, structlog.processors.JSONRenderer()],
        logger_factory=structlog.WriteLoggerFactory(file=file),
        cache_logger_on_first_use=True,
    )


def set_up_as_its_docs_say() -> None:
    """Through `logging`."""
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            structlog.stdlib.add_logger_name,
            structlog.stdlib.add_log_level,
            structlog.stdlib.PositionalArgumentsFormatter(),
            structlog.processors.TimeStamper(fmt="iso"),
            structlog.processors.StackInfoRenderer(),
            structlog.processors.format_exc_info,
            add_service,
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.stdlib.BoundLogger,
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=True,
    )


def handle() -> None:
    for logger in (used, structlog.get_logger("shop")):
        logger.info("charged")


async def handle_in_loop() -> None:
    handle()


used = structlog.get_logger("shop")
if "pytest" not in sys.modules:  # in a process of handlers; elsewhere the tests configure it, and undo that
    set_up()
    used.info("in use before the daemon's log could know of it")
