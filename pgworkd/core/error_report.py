"""Describes an exception for the job's error history, as bounded text that Postgres can store.

Nothing here raises, whatever the exception does in its `__str__`, and nothing takes long: a traceback of a thousand
frames, a group of a thousand exceptions or a message of 50 MB becomes a few KiB.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import dropwhile, islice, takewhile
from pathlib import Path
from types import FrameType

from pydantic_core import ValidationError

from pgworkd.core.payload import clean_text
from pgworkd.process.redaction import escaped, redact

TYPE_CHARS_MAX = 200
MESSAGE_BYTES_MAX = 4 * 1024
TRACEBACK_BYTES_MAX = 16 * 1024
FRAMES_MAX = 100
"""Innermost frames read per exception."""
CHAIN_MAX = 4
"""Exceptions shown from a chain of causes."""
FAULTS_MAX = 10
"""Validation errors shown."""
_LOOP = ("asyncio.events", "asyncio.base_events", "asyncio.runners", "uvloop")
_CALLERS = ("pgworkd.process.forks",)
"""Where a handler is called that does not run in the loop."""
_ENGINE = tuple(str(Path(__file__).parents[1] / name) + os.sep for name in ("engine", "process"))
"""Folders of the code whose frames every traceback of a handler would begin with."""
PARTS_MAX = 8
"""Exceptions shown in all, from the chain and its groups; they share the bytes of the traceback."""


@dataclass(frozen=True, slots=True)
class ErrorFacts:
    """`type`: qualified name (200 chars), `message`: str(exc) (4 KiB), `traceback`: its inner part (16 KiB).

    All three are free of NUL and lone surrogates, so Postgres accepts them as text or in jsonb, and of the passwords of
    database addresses (`redaction.redact`).
    """

    type: str
    message: str
    traceback: str

    def redacted(self) -> ErrorFacts:
        """The facts without the passwords known to this process; for reports from another process."""
        return ErrorFacts(self.type, redact(self.message), redact(self.traceback))

    @property
    def summary(self) -> str:
        """`type: message` in one line of at most 4 KiB, without control sequences, for `jobs.error`."""
        message = " ".join(self.message.split())
        return clean_text(escaped(f"{self.type}: {message}" if message else self.type), MESSAGE_BYTES_MAX)


def describe_error(exc: BaseException) -> ErrorFacts:
    """The facts of `exc`; the message of a group also names its first members. Never raises."""
    message = _text(exc)
    try:
        if leaves := "; ".join(_headline(leaf) for leaf in _leaves(exc)):
            message = f"{message}: {leaves}"
        shown = _traceback(exc)
    except Exception as error:  # noqa: BLE001 - a property of the user's exception class may raise
        shown = f"(no traceback: {type(error).__name__} while reading the exception)"
    return ErrorFacts(_type_name(exc), clean_text(message, MESSAGE_BYTES_MAX), shown)


def describe_stack(frame: FrameType, *, in_loop: bool = True) -> str:
    """What a thread does now: its frames, outermost first, in at most 16 KiB, without passwords.

    They begin with the application's: the event loop, and our code that calls a handler, are left out. `in_loop`: the
    handler is called by the loop, and not by a thread or process of its own, in which it may run another loop.
    """
    above = _LOOP if in_loop else _CALLERS
    steps = takewhile(lambda step: _module(step[0]) not in above, traceback.walk_stack(frame))
    return describe_steps(list(islice(steps, FRAMES_MAX))[::-1])


def describe_steps(steps: list[tuple[FrameType, int]]) -> str:
    """Frames with the lines at which they are, outermost first, as `describe_stack` shows those of a thread."""
    theirs = list(dropwhile(lambda step: _module(step[0]).partition(".")[0] in ("pgworkd", "anyio"), steps))
    return _tail("".join(traceback.StackSummary.extract(theirs or steps).format()), TRACEBACK_BYTES_MAX)


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _type_name(exc: BaseException) -> str:
    cls = type(exc)
    module = str(getattr(cls, "__module__", "?"))
    name = cls.__qualname__ if module == "builtins" else f"{module}.{cls.__qualname__}"
    return clean_text(name, 4 * TYPE_CHARS_MAX)[:TYPE_CHARS_MAX]


def _text(exc: BaseException) -> str:
    try:
        return _kept(_faults(exc) if isinstance(exc, ValidationError) else str(exc), MESSAGE_BYTES_MAX)
    except BaseException as error:  # noqa: BLE001 - user code, but synchronous: no cancellation passes here
        return f"(its str() raised {type(error).__name__})"


def _faults(exc: ValidationError) -> str:
    """The errors of pydantic without the values: payloads may hold data that must not be logged."""
    faults = [
        f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" if fault["loc"] else fault["msg"]
        for fault in exc.errors(include_url=False, include_context=False, include_input=False)[:FAULTS_MAX]
    ]
    count = exc.error_count()
    more = "; ..." if count > FAULTS_MAX else ""
    return f"{count} validation error{'s'[: count != 1]} for {exc.title}: {'; '.join(faults)}{more}"


def _kept(text: str, bytes_max: int) -> str:
    """The first bytes of a text, redacted before the cut, which must not leave half of a password."""
    return clean_text(redact(text[: 2 * bytes_max]), bytes_max)


def _headline(exc: BaseException) -> str:
    message = _text(exc)
    return f"{_type_name(exc)}: {message}" if message else _type_name(exc)


def _leaves(exc: BaseException) -> list[BaseException]:
    """The first three exceptions inside a group that are not groups themselves."""
    leaves: list[BaseException] = []
    stack = list(reversed(exc.exceptions)) if isinstance(exc, BaseExceptionGroup) else []
    while stack and len(leaves) < 3:
        node = stack.pop()
        if isinstance(node, BaseExceptionGroup):
            stack.extend(reversed(node.exceptions))
        else:
            leaves.append(node)
    return leaves


def _traceback(exc: BaseException) -> str:
    parts = list(islice(_parts(exc, PARTS_MAX), PARTS_MAX))
    share = TRACEBACK_BYTES_MAX // len(parts)
    return "\n".join(_part_text(title, part, share - 1) for title, part in parts)


def _parts(exc: BaseException, depth: int) -> Iterator[tuple[str, BaseException]]:
    """The exceptions of a chain as (title, exception), in the order of Python: causes, `exc`, its group's members."""
    chain = [(exc, "")]
    while len(chain) < CHAIN_MAX:
        outer = chain[-1][0]
        inner = outer.__cause__ or (None if outer.__suppress_context__ else outer.__context__)
        if inner is None or any(inner is seen for seen, _ in chain):
            break
        how = "was the direct cause of" if outer.__cause__ else "was being handled during"
        chain[-1] = (outer, f"The above exception {how} the following one:\n")
        chain.append((inner, ""))
    for part, title in reversed(chain):
        yield title, part
    if isinstance(exc, BaseExceptionGroup) and depth > 0:
        for number, member in enumerate(exc.exceptions, 1):
            where = f"Member {number} of {len(exc.exceptions)}:\n"
            for title, part in _parts(member, depth - 1):
                yield where + title if part is member else title, part


def _part_text(title: str, exc: BaseException, bytes_max: int) -> str:
    """One exception in at most `bytes_max` bytes: a quarter for the message, the rest for the innermost frames.

    The first frame is the handler's: those of the engine that called it are left out.
    """
    notes = getattr(exc, "__notes__", None)
    headline = "\n".join([_headline(exc), *map(str, notes[:3] if isinstance(notes, list) else ())])
    inner = exc.__traceback__
    while inner is not None and inner.tb_frame.f_code.co_filename.startswith(_ENGINE):
        inner = inner.tb_next
    head = f"{title}Traceback (most recent call last):\n" if inner else title
    foot = _kept(headline, bytes_max // 4)
    frames = "".join(traceback.format_tb(inner, limit=-FRAMES_MAX))
    return head + _tail(frames, bytes_max - len(head.encode()) - len(foot.encode())) + foot


def _tail(text: str, bytes_max: int) -> str:
    text = redact(text[-2 * bytes_max :])
    data = clean_text(text[-bytes_max:], 8 * bytes_max).encode()  # an escape takes up to six bytes
    if len(text) <= bytes_max and len(data) <= bytes_max:
        return data.decode()
    return "…" + data[3 - bytes_max :].decode("utf-8", "ignore")
