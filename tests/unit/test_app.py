"""The registry: which functions are handlers, how they are called, and what is rejected at registration."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Optional

import pytest
from pydantic import BaseModel, ValidationError
from typing_extensions import TypedDict

from pgworkd import App, Job
from pgworkd.errors import UsageError
from tests.kits.apps import registered


class Model(BaseModel):
    note: int


@dataclass
class Record:
    note: int


class Typed(TypedDict):
    note: int


# Signatures.


async def nothing() -> None: ...


async def job_only(job: Job) -> None: ...


async def job_by_keyword(*, job: Job) -> None: ...


async def job_perhaps(job: Optional[Job] = None) -> None: ...  # noqa: UP045 - an older way to say it


async def job_or_none(job: Job | None = None) -> None: ...


async def job_first(context: Job, note: Model) -> None: ...


async def job_last(note: Model, context: Job) -> None: ...


async def job_after_star(note: Model, *, context: Job) -> None: ...


async def job_as_text(note: "Model", context: "Job") -> None: ...  # noqa: UP037


async def payload_by_keyword(*, note: Model) -> None: ...


async def record(note: Record) -> None: ...


async def typed(note: Typed) -> None: ...


async def mapping(note: dict[str, int]) -> None: ...


async def plain(note: dict) -> None: ...  # type: ignore[type-arg]


async def anything(note: Any) -> None: ...


async def bare(note) -> None: ...  # type: ignore[no-untyped-def]


async def bare_and_job(note, job: Job) -> None: ...  # type: ignore[no-untyped-def]


async def with_default(note: Model, limit: int = 3) -> None: ...


async def only_defaults(limit: int = 3, *, name: str = "x") -> None: ...


async def payload_with_default(payload: Model | None = None) -> None: ...


async def with_rest(note: Model, *rest: Any, **more: Any) -> None: ...


async def job_unannotated(job) -> None: ...  # type: ignore[no-untyped-def]


@pytest.mark.parametrize(
    ("function", "payload", "job"),
    [
        (nothing, None, None),
        (job_only, None, "job"),
        (job_by_keyword, None, "job"),
        (job_perhaps, None, "job"),
        (job_or_none, None, "job"),
        (job_first, "note", "context"),
        (job_last, "note", "context"),
        (job_after_star, "note", "context"),
        (job_as_text, "note", "context"),
        (payload_by_keyword, "note", None),
        (record, "note", None),
        (typed, "note", None),
        (mapping, "note", None),
        (plain, "note", None),
        (anything, "note", None),
        (bare, "note", None),
        (bare_and_job, "note", "job"),
        (with_default, "note", None),
        (only_defaults, None, None),
        (payload_with_default, "payload", None),
        (with_rest, "note", None),
        (job_unannotated, "job", None),  # no annotation says that this is the Job
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_which_parameter_gets_the_payload_and_which_the_job(
    function: Callable[..., Any], payload: str | None, job: str | None
) -> None:
    handler = registered(function)
    assert (handler.payload_parameter, handler.job_parameter) == (payload, job)


@pytest.mark.parametrize(
    ("function", "expected"),
    [(job_first, Model(note=7)), (record, Record(7)), (typed, {"note": 7}), (mapping, {"note": 7})],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_an_annotated_payload_is_validated(function: Callable[..., Any], expected: object) -> None:
    adapter = registered(function).adapter
    assert adapter is not None
    assert adapter.validate_python({"note": "7"}) == expected
    with pytest.raises(ValidationError):
        adapter.validate_python({"note": "seven"})


@pytest.mark.parametrize("function", [plain, anything, bare, nothing, job_only])
def test_without_an_annotation_the_payload_is_passed_as_a_dict(function: Callable[..., Any]) -> None:
    assert registered(function).adapter is None


def test_annotations_may_name_local_types_of_the_enclosing_function() -> None:
    @dataclass
    class Local:
        note: int

    app = App()

    @app.handler("k")
    async def handle(payload: Local, context: Job) -> None: ...

    handler = app.handlers["k"]
    assert handler.adapter is not None
    assert handler.adapter.validate_python({"note": 7}) == Local(7)
    assert handler.job_parameter == "context"


class Callables:
    async def method(self, note: Model, job: Job) -> None: ...

    def blocking(self, note: Model, job: Job) -> None: ...

    @staticmethod
    def static(note: Model, job: Job) -> None: ...

    @classmethod
    def by_class(cls, note: Model, job: Job) -> None: ...

    async def __call__(self, note: Model, job: Job) -> None: ...


async def wants_more(connection: str, note: Model, job: Job) -> None: ...


def logged(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    async def wrapper(*args: Any, **kwargs: Any) -> Any:
        return await function(*args, **kwargs)

    return wrapper


@pytest.mark.parametrize(
    ("function", "mode"),
    [
        (Callables().method, "loop"),
        (Callables.static, "thread"),
        (Callables.by_class, "thread"),
        (Callables(), "loop"),
        (logged(job_last), "loop"),
        (functools.partial(wants_more, "a connection"), "loop"),
        (functools.partial(wants_more, connection="a connection"), "loop"),
    ],
    ids=["method", "static", "class", "object", "decorated", "partial", "partial by name"],
)
def test_any_callable_can_be_a_handler(function: Callable[..., Any], mode: str) -> None:
    handler = registered(function)
    assert handler.mode == mode
    assert handler.payload_parameter == "note"
    assert handler.job_parameter is not None
    assert handler.adapter is not None


async def two_payloads(note: Model, other: Model) -> None: ...


async def two_bare(note, other) -> None: ...  # type: ignore[no-untyped-def]


async def two_payloads_and_job(note: Model, job: Job, *, other: int) -> None: ...


async def positional(note: Model, /) -> None: ...


async def positional_job(job: Job, /, note: Model) -> None: ...


async def unknown_name(note: "NoSuchClass") -> None: ...  # type: ignore[name-defined]  # noqa: F821, UP037


async def unvalidatable(note: Callables) -> None: ...


async def two_jobs(job: Job, other: Job) -> None: ...


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (two_payloads, "wants both 'note' and 'other': a handler takes one payload"),
        (two_bare, "wants both 'note' and 'other'"),
        (two_payloads_and_job, "wants both 'note' and 'other'"),
        (positional, "'note' of handler 'k' is positional-only: drop the '/'"),
        (positional_job, "'job' of handler 'k' is positional-only"),
        (unknown_name, "the signature of handler 'k' cannot be read: name 'NoSuchClass' is not defined"),
        (unvalidatable, "which cannot be validated"),
        (two_jobs, "handler 'k'"),
        (7, "the handler of kind 'k' is a int: give a function"),
        (None, "the handler of kind 'k' is a NoneType: give a function"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_an_invalid_handler_is_rejected_at_registration(function: Any, message: str) -> None:
    app = App()
    with pytest.raises(UsageError) as caught:
        app.handler("k")(function)
    assert message in str(caught.value)
    assert app.handlers == {}


def test_two_handlers_of_one_kind_are_rejected_naming_both() -> None:
    app = App()
    app.handler("k")(nothing)
    with pytest.raises(UsageError, match=r"two handlers for kind 'k': .*test_app\.nothing and .*test_app\.job_only"):
        app.handler("k", queue="elsewhere")(job_only)
    assert app.handlers["k"].function is nothing


def test_one_function_may_serve_many_kinds() -> None:
    app = App()
    for kind in ("a", "b"):
        app.handler(kind, queue="q")(nothing)
    assert {kind: handler.queue for kind, handler in app.handlers.items()} == {"a": "q", "b": "q"}


# Modes.


def blocking() -> None: ...


lambda_at_the_top = lambda: None  # noqa: E731


def test_by_default_coroutines_run_in_the_loop_and_functions_in_a_thread() -> None:
    assert registered(nothing).mode == "loop"
    assert registered(nothing, run_in="loop").mode == "loop"
    assert registered(blocking).mode == "thread"
    assert registered(blocking, run_in="thread").mode == "thread"
    assert registered(blocking, run_in="process").mode == "process"


def _local() -> Callable[..., Any]:
    def local() -> None: ...

    return local


@pytest.mark.parametrize(
    ("function", "mode", "message"),
    [
        (nothing, "thread", "cannot run in a thread: an `async def` runs in the loop; make it a plain `def`"),
        (nothing, "process", "cannot run in a process: an `async def` runs in the loop"),
        (blocking, "loop", "cannot run in a loop: make it an `async def`"),
        (_local(), "process", "it must be a function at the top of a module"),
        (functools.partial(blocking), "process", "it must be a function at the top of a module"),
        (lambda_at_the_top, "process", "it must be a function at the top of a module"),
        (Callables().blocking, "process", "it must be a function at the top of a module"),
        (blocking, "subprocess", "run_in of handler 'k' is 'subprocess': give 'loop', 'thread' or 'process'"),
    ],
    ids=["coroutine thread", "coroutine process", "def loop", "local", "partial", "lambda", "method", "odd"],
)
def test_a_mode_that_does_not_fit_the_function_is_rejected(
    function: Callable[..., Any], mode: Any, message: str
) -> None:
    with pytest.raises(UsageError) as caught:
        registered(function, run_in=mode)
    assert message in str(caught.value)
