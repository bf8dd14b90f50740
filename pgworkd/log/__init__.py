"""Logging: a listener that logs events with structlog; in colour on a terminal, else as JSON.

What handlers log, with structlog or `logging`, becomes a line like ours, with the job's facts and the worker's name.
An app that configures structlog by itself keeps that: `add_job` becomes its first processor, and our own lines are
written beside it. One that configures `logging` can use `JobFilter`.

The content of a line comes from rows, handlers and libraries: passwords are redacted, and it can neither contain
terminal control sequences (CWE-150) nor forge another line (CWE-117).
"""

from __future__ import annotations

import functools
import json
import logging
import os
import socket
from collections.abc import Callable, Mapping, MutableMapping
from contextvars import ContextVar
from typing import Any, Literal, Protocol

import structlog
from structlog.processors import JSONRenderer

from pgworkd.core import events
from pgworkd.core.events import Listener
from pgworkd.core.traces import current_ids
from pgworkd.log.console import renderer
from pgworkd.process import output
from pgworkd.process.redaction import escaped, redact

_LEVELS: dict[str, int] = {
    events.JOB_STARTED: logging.DEBUG,
    events.JOB_COMPLETED: logging.INFO,
    events.JOB_RELEASED: logging.INFO,
    events.JOB_HANDED_OVER: logging.DEBUG,
    events.JOB_CANCELLED: logging.INFO,
    events.JOB_FAILED: logging.WARNING,
    events.JOB_STALE: logging.WARNING,
    events.JOB_LOST: logging.WARNING,
    events.JOB_LEASE_PASSED: logging.WARNING,
    events.JOB_SLOW: logging.WARNING,
    events.JOB_OVERDUE: logging.WARNING,
    events.JOB_DEAD: logging.ERROR,
    events.JOB_RAISED: logging.ERROR,
    events.OUTCOME_REJECTED: logging.ERROR,
    events.OUTCOMES_DELAYED: logging.WARNING,
    events.STATEMENT_FAILED: logging.WARNING,
    events.DATABASE_UNAVAILABLE: logging.WARNING,
    events.DATABASE_REFUSED: logging.ERROR,
    events.SHUTDOWN_INCOMPLETE: logging.ERROR,
    events.LEASE_FENCED: logging.ERROR,
    events.LEASE_LOST: logging.ERROR,
    events.KIND_UNKNOWN: logging.WARNING,
    events.QUEUE_DIFFERS: logging.WARNING,
    events.RETENTION_CUT: logging.WARNING,
    events.ROWS_REJECTED: logging.WARNING,
    events.SCHEMA_AWAITED: logging.WARNING,
    events.SCHEMA_NEWER: logging.ERROR,
    events.DATABASE_COPIED: logging.ERROR,
    events.SCHEDULE_FAILED: logging.ERROR,
    events.SCHEDULE_DIFFERS: logging.WARNING,
    events.ALERT_DIFFERS: logging.WARNING,
    events.ORPHANS_RELEASED: logging.WARNING,
    events.MAINTENANCE_FAILED: logging.ERROR,
    events.ENDPOINT_REFUSED: logging.ERROR,
    events.PUSH_ANSWERED: logging.DEBUG,
    events.RESULT_DROPPED: logging.WARNING,
    events.ENDPOINT_PAUSED: logging.WARNING,
    events.ENDPOINT_DISABLED: logging.ERROR,
    events.HOOK_FAILED: logging.ERROR,
    events.CLAIMS_REFUSED: logging.WARNING,
    events.LOOP_BLOCKED: logging.WARNING,
    events.LOOP_STUCK: logging.ERROR,
    events.PROCESS_STALLED: logging.WARNING,
    events.DAEMON_ABORTED: logging.ERROR,
    events.SUPERVISOR_GONE: logging.WARNING,
    events.EXIT_FORCED: logging.WARNING,
    events.LOG_DROPPED: logging.WARNING,
}
_TRACES = ("exception", "stack")
"""The only multi-line values; indented, so that no line looks like the beginning of another event."""


Form = Literal["auto", "json", "console"]


class LoggedAttempt(Protocol):
    """An attempt, as named in log lines."""

    def facts(self) -> dict[str, object]:
        """job_id, queue, kind, attempt; trace_id and span_id where it is traced."""


class Running(Protocol):
    """Runs one attempt after another; `attempt` is the current one."""

    attempt: LoggedAttempt | None


RUNNING: ContextVar[Running | None] = ContextVar("pgworkd_running", default=None)
"""Set in the tasks that run handlers, and in the threads and tasks that those start."""
configured: tuple[str, Form, str] | None = None
"""The arguments of the last `configure`, for the processes that we start."""
_own: Any = None
"""Our own logger, as `configure` has made it."""
_processors: list[Any] | None = None
"""The processors that `configure` has given structlog; other ones are the app's."""


def configure(level: str = "info", form: Form = "auto", worker: str = "") -> None:
    """Configures the log of this process: one line per event of at least `level`, on standard error.

    `worker`: a name to add to every line; on a terminal only if it is not this host's. Records of `logging` are written
    as well, unless the app has configured a handler for them; what is logged by structlog, too, unless the app has
    configured that.
    """
    global configured, _own, _processors  # noqa: PLW0603 - as structlog's own, there is one per process
    stream, write = output.stderr(), output.line_writer()
    console = form == "console" or (form == "auto" and stream.isatty())
    is_named = worker != "" and not (console and worker == socket.gethostname())
    render = renderer(colors=stream.isatty()) if console else JSONRenderer(serializer=_json)
    processors = [
        structlog.contextvars.merge_contextvars,
        add_job,
        *([functools.partial(_add_worker, worker)] if is_named else []),
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="%H:%M:%S" if console else "iso", utc=not console),
        structlog.processors.format_exc_info,
        _redact,
        *([_escape] if console else []),
        _for_the_journal(render) if _is_the_journal() else render,
    ]
    shared: dict[str, Any] = {
        "wrapper_class": structlog.make_filtering_bound_logger(_level(level)),
        "cache_logger_on_first_use": True,
    }
    factory: Any = structlog.WriteLoggerFactory(file=stream) if write is None else lambda *_: _Lines(write)
    _own = structlog.wrap_logger(factory(), processors=processors, **shared)
    if not _is_applications():
        structlog.configure(processors=processors, logger_factory=factory, **shared)
        _processors = processors
    include_job()
    # The driver logs each failed attempt of its own maintenance with a traceback, which floods the log in an outage.
    logging.getLogger("asyncpg").setLevel(logging.ERROR)
    if logging.root.level in (
        logging.WARNING,
        *([_level(configured[0])] if configured else []),
    ):  # not changed by the app
        logging.root.setLevel(_level(level))
    logging.lastResort = _Foreign(_level(level))
    output.on_recovery = _report_dropped
    configured = (level, form, worker)


def logger() -> Any:
    """Our own logger; before `configure`, structlog's."""
    return structlog.get_logger("pgworkd") if _own is None else _own


def _is_applications() -> bool:
    return structlog.is_configured() and structlog.get_config()["processors"] is not _processors


def include_job() -> None:
    """Makes `add_job` the first processor of an app that has configured structlog, if it is not among them."""
    processors = structlog.get_config()["processors"]
    if not _is_applications() or add_job in processors:
        return
    if isinstance(processors, list):
        processors.insert(0, add_job)  # in place: loggers that are in use share the list
    else:
        structlog.configure(processors=[add_job, *processors])


class _Lines:
    """A logger as structlog takes one, whose methods all write a line."""

    def __init__(self, write: Callable[[str], object]) -> None:
        self.msg = self.debug = self.info = self.warning = self.error = self.critical = write


def add_job(_logger: Any, _method: str, line: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """A processor for structlog: adds job_id, queue, kind and attempt to lines logged while a handler runs.

    Where it is traced, also trace_id and span_id: of the handler's own span, if it has opened one, else the attempt's.
    """
    if (running := RUNNING.get()) is not None and (attempt := running.attempt) is not None:
        facts = attempt.facts()
        if "trace_id" in facts and (ids := current_ids()) is not None:
            facts.update(ids)
        for name, value in facts.items():
            line.setdefault(name, value)
    return line


def _add_worker(worker: str, _logger: Any, _method: str, line: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    line.setdefault("worker", worker)
    return line


class JobFilter(logging.Filter):
    """A filter for `logging`: adds the facts of `add_job` to each record; "" for those that there are none of."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Adds the facts; accepts every record."""
        none = dict.fromkeys(("job_id", "queue", "kind", "attempt", "trace_id", "span_id"), "")
        vars(record).update(none | dict(add_job(None, "", {})))
        return True


def listener(level: str = "info") -> Listener:
    """An event listener that logs events of at least `level`."""
    own, least = logger(), _level(level)

    def log(name: str, facts: Mapping[str, Any]) -> None:
        at = _LEVELS.get(name, logging.INFO)
        if at >= least:
            own.log(at, name, **facts)

    return log


def listen_for_host(events_: events.Events) -> None:
    """Logs these events to the logger "pgworkd" of `logging`, at its present level, unless the host has a listener.

    Each record has the attributes `event` and `facts`, beside the text of both.
    """
    logger = logging.getLogger("pgworkd")
    if not events_.has_listener(events.JOB_DEAD):
        quiet = frozenset(name for name, at in _LEVELS.items() if not logger.isEnabledFor(at))
        events_.listen(functools.partial(_log_for_host, logger), except_for=quiet)


def _log_for_host(logger: logging.Logger, name: str, facts: Mapping[str, Any]) -> None:
    at = _LEVELS.get(name, logging.INFO)
    if logger.isEnabledFor(at):
        plain = {fact: _plain(value) for fact, value in facts.items()}
        trace = plain.pop("exception", None)
        text = " ".join([name, *(f"{fact}={escaped(str(value))}" for fact, value in plain.items())])
        text += f"\n{_escaped('exception', trace)}" if trace else ""
        logger.log(at, "%s", text, extra={"event": name, "facts": plain})


def tell(name: str, **facts: Any) -> None:
    """Logs an event of this process, which may have no daemon; in the form that `configure` has set, if it was."""
    if configured is None:
        said = " ".join([name, *(f"{fact}={value}" for fact, value in facts.items())])
        output.say(f"pgworkd: {escaped(redact(said))}\n")
    else:
        logger().log(_LEVELS.get(name, logging.INFO), name, **facts)


def _report_dropped(stream: str, count: int) -> None:
    tell(events.LOG_DROPPED, stream=stream, count=count)


_PRIORITIES = {"debug": 7, "info": 6, "warning": 4, "error": 3, "critical": 2}
"""Priorities of syslog, as the journal reads them in front of each line (sd-daemon(3))."""


def mark(level: str) -> str:
    """The priority before a line of this level where standard error leads to systemd's journal; else nothing."""
    return f"<{_PRIORITIES.get(level, 6)}>" if _is_the_journal() else ""


def _is_the_journal() -> bool:
    """Whether standard error is the journal, by JOURNAL_STREAM, see systemd.exec(5), which children inherit."""
    try:
        found = os.fstat(output.stderr().fileno())
    except (OSError, ValueError, AttributeError):
        return False
    return os.environ.get("JOURNAL_STREAM") == f"{found.st_dev}:{found.st_ino}"


def _for_the_journal(renderer: Any) -> Any:
    marks = {level: mark(level) for level in _PRIORITIES}

    def render(logger: Any, method: str, line: MutableMapping[str, Any]) -> str:
        before = marks.get(str(line.get("level")), marks["info"])
        return "\n".join(before + each for each in renderer(logger, method, line).split("\n"))

    return render


def below_level(level: str) -> frozenset[str]:
    """The events below `level`, for `Events.listen(except_for=...)`."""
    return frozenset(name for name, at in _LEVELS.items() if at < _level(level))


def _level(name: str) -> int:
    return logging.getLevelNamesMapping()[name.upper()]


class _Foreign(logging.Handler):
    """Logs records of libraries as lines like ours, where the app has not configured `logging`."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            at = min(record.levelno // 10 * 10, logging.CRITICAL)  # structlog knows no levels in between
            facts = {"logger": record.name, "exc_info": record.exc_info or None}
            logger().log(at, "logged", message=record.getMessage(), **facts)
        except Exception:  # noqa: BLE001 - as every handler does
            self.handleError(record)


def _redact(_logger: Any, _method: str, line: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    return {name: _plain(value) for name, value in line.items()}


def _plain(value: Any) -> Any:
    """A value that both renderers can write, with passwords redacted."""
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
    """Escapes text for the console, whose renderer does not; other values go through repr(). JSON always escapes."""
    return {escaped(name): _escaped(name, value) for name, value in line.items()}


def _escaped(name: str, value: Any) -> Any:
    if not isinstance(value, str):
        return value
    if name in _TRACES:
        return "\n".join(f"  {escaped(each)}" for each in value.splitlines())
    return escaped(value)


def _json(line: Any, **options: Any) -> str:
    return json.dumps(line, **options).replace("\x7f", "\\u007f")  # the one control character that JSON does not escape
