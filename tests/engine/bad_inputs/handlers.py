"""Bad inputs 40 to 43: return values and exceptions of handlers, in each mode, and handlers of the same name."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pgworkd import App
from pgworkd.core import events
from pgworkd.core.error_report import MESSAGE_BYTES_MAX, TRACEBACK_BYTES_MAX
from pgworkd.errors import UsageError
from tests.engine.bad_inputs import Case, among_good_ones, dead_handler
from tests.kits.verbs import Db

# Handlers in processes are at the top level of a module: the child imports them from here.


def return_an_object() -> Any:
    return {"found": object()}


def return_too_much() -> Any:
    return "x" * (1024 * 1024)


def return_nul() -> Any:
    return ["a\0b"]


def return_nan() -> Any:
    return {"mean": float("nan")}


def return_a_surrogate() -> Any:
    return "\ud800"


class Mute(Exception):  # noqa: N818
    def __str__(self) -> str:
        raise RuntimeError("no words")


class Rude(Exception):  # noqa: N818
    def __str__(self) -> str:
        raise SystemExit(1)


def raise_rude() -> None:
    raise Rude


def raise_mute() -> None:
    raise Mute


def raise_50_mb() -> None:
    raise ValueError("x" * (50 << 20))


def raise_nul_and_surrogate() -> None:
    raise ValueError("nul \0 and \ud800")


def raise_system_exit() -> None:
    sys.exit(3)


def raise_keyboard_interrupt() -> None:
    raise KeyboardInterrupt


def raise_generator_exit() -> None:
    raise GeneratorExit


def raise_cancelled() -> None:
    raise asyncio.CancelledError


PLAIN = "return plain JSON types, a dataclass or a pydantic model"
INVALID = "pgworkd.errors.InvalidPayload: result"
RETURNED: list[tuple[Callable[[], Any], str]] = [
    (return_an_object, f"{INVALID}.found is of type object, which cannot be written as JSON: {PLAIN}"),
    (
        return_too_much,
        f"{INVALID} takes 1,048,578 bytes, 1,048,576 bytes are allowed: store the data elsewhere and pass a reference",
    ),
    (return_nul, f"{INVALID}[0] holds a NUL character: remove it or encode the text"),
    (return_nan, f"{INVALID}.mean is nan, which JSON does not know: pass None/null or text"),
    (return_a_surrogate, f"{INVALID} holds a lone surrogate (half a character): remove it or encode the text"),
]
RAISED: list[tuple[Callable[[], Any], str]] = [
    (raise_mute, f"{__name__}.Mute: (its str() raised RuntimeError)"),
    (raise_rude, f"{__name__}.Rude: (its str() raised SystemExit)"),
    (raise_50_mb, "ValueError: " + "x" * (MESSAGE_BYTES_MAX - len("ValueError: …".encode())) + "…"),
    (raise_nul_and_surrogate, r"ValueError: nul \x00 and \ud800"),
]
EXITS: list[tuple[Callable[[], Any], str]] = [
    (raise_system_exit, "SystemExit: 3"),
    (raise_keyboard_interrupt, "KeyboardInterrupt"),
    (raise_generator_exit, "GeneratorExit"),
    (raise_cancelled, "asyncio.exceptions.CancelledError"),
]


def in_each_mode(number: int, handlers: list[tuple[Callable[[], Any], str]]) -> Iterator[Case]:
    for function, error in handlers:

        async def in_loop(function: Callable[[], Any] = function) -> Any:
            return function()

        name = function.__name__.replace("_", " ")
        yield Case(number, f"{name}, in the loop", dead_handler(in_loop, error))
        yield Case(number, f"{name}, in a thread", dead_handler(function, error))
        yield Case(number, f"{name}, in a process", dead_handler(function, error, run_in="process"))


async def long_history(dsn: str, db: Db) -> None:
    """Each error has the maximum size; the last 20 are kept."""
    app = App()

    @app.handler("odd", queue="q", max_attempts=25, backoff=0)
    def handle() -> None:
        deep(200)

    def deep(levels: int) -> None:
        if not levels:
            raise ValueError("é" * (1 << 20))
        deep(levels - 1)

    async with among_good_ones(dsn, db, app, kind="odd") as (odd, _, seen):
        await seen.wait(events.JOB_DEAD, job_id=str(odd))
    kept = json.loads(await db.fetchval("SELECT errors FROM pgworkd.jobs WHERE id = $1", odd))
    assert [entry["attempt"] for entry in kept] == list(range(6, 26))
    for entry in kept:
        assert entry["message"].endswith("é…")
        assert MESSAGE_BYTES_MAX - 4 <= len(entry["message"].encode()) <= MESSAGE_BYTES_MAX
        assert len(entry["traceback"].encode()) <= TRACEBACK_BYTES_MAX


async def two_of_one_name(_: str, __: Db) -> None:
    app = App()
    app.handler("mail")(raise_mute)
    with pytest.raises(UsageError) as caught:
        app.handler("mail", queue="another")(return_nul)
    assert str(caught.value) == f"two handlers for kind 'mail': {__name__}.raise_mute and {__name__}.return_nul"
    assert app.handlers["mail"].function is raise_mute


CASES = [
    *in_each_mode(40, RETURNED),
    *in_each_mode(41, RAISED),
    Case(41, "25 failures of the largest size", long_history),
    *in_each_mode(42, EXITS),
    Case(43, "two handlers of one name", two_of_one_name),
]
