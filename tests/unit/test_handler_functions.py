"""What can be registered as a handler: payloads that an object fits, signatures that can be seen, no generators."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import decimal
import enum
import functools
import ipaddress
import pathlib
import re
import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import pytest
from pydantic import (
    AfterValidator,
    AnyUrl,
    BaseModel,
    BeforeValidator,
    Field,
    Json,
    PlainValidator,
    RootModel,
    SecretStr,
    TypeAdapter,
    ValidationError,
    WrapValidator,
    model_validator,
)
from pydantic_core import core_schema
from typing_extensions import TypedDict

from pgworkd import App, Job
from pgworkd.client.streams import _made, stream_handler
from pgworkd.core.backoff import Backoff
from pgworkd.errors import UsageError
from tests.kits import decorators
from tests.kits.apps import registered


class Note(BaseModel):
    note: int = 0


class Tagged(BaseModel):
    tag: Literal["a"] = "a"


class Other(BaseModel):
    tag: Literal["b"]


class Tree(BaseModel):
    below: list[Tree] = []


class WithFunction(BaseModel):
    hook: Callable[[], int] | None = None


class Numbers(RootModel[list[int]]):
    pass


class Table(RootModel[dict[str, int]]):
    pass


class Unpacked(RootModel[list[int]]):
    @model_validator(mode="before")
    @classmethod
    def unpack(cls, value: Any) -> Any:
        return list(value.values())


@dataclasses.dataclass
class Record:
    note: int = 0


class Typed(TypedDict, total=False):
    note: int


class Named(NamedTuple):
    note: int = 0


class Color(enum.Enum):
    RED = "red"


class Own:
    @classmethod
    def __get_pydantic_core_schema__(cls, *_: Any) -> Any:
        return core_schema.no_info_plain_validator_function(lambda value: value)


def first(value: Any) -> Any:
    return next(iter(value.values()), 0)


SCALARS: list[Any] = [int, float, decimal.Decimal, str, bytes, bool, complex, None]
SEQUENCES: list[Any] = [list, tuple, set, frozenset, list[int], tuple[int, ...], set[int], Sequence[int], Iterable[int]]
INSTANTS: list[Any] = [datetime.datetime, datetime.date, datetime.timedelta]
TEXTS: list[Any] = [uuid.UUID, ipaddress.IPv4Address, pathlib.Path, re.Pattern, AnyUrl, SecretStr, Json]
ODD: list[Any] = [collections.deque, Color, Literal["a"], Literal[1, None], type[int], Callable[[], int], Numbers]
UNIONS: list[Any] = [int | str, int | None, list[Note], list[dict[str, int]]]
ANNOTATED = [Annotated[int, Field(gt=0)], Annotated[int, AfterValidator(str)], Annotated[list[int], "text"]]
NO_OBJECTS = [*SCALARS, *SEQUENCES, *INSTANTS, *TEXTS, *ODD, *UNIONS, *ANNOTATED]
MAPPINGS: list[Any] = [dict, dict[str, int], dict[str, Any], Mapping[str, Any], collections.OrderedDict[str, int]]
CLASSES: list[Any] = [Note, Record, Typed, Named, Table, Tree, WithFunction, Own, Unpacked]
OBJECTS: list[Any] = [
    *MAPPINGS,
    Any,
    object,
    *CLASSES,
    Note | None,
    int | Note,
    list[int] | Note,
    Annotated[Note, "text"],
    Annotated[WithFunction, "text"],
    Annotated[Tagged | Other, Field(discriminator="tag")],
    Annotated[int, BeforeValidator(first)],
    Annotated[int, PlainValidator(first)],
    Annotated[int, WrapValidator(lambda value, go_on: go_on(first(value)))],
]


PAYLOADS: list[dict[str, Any]] = [{"note": 7}, {"tag": "a"}, {}]


def taking(annotation: Any) -> Callable[..., Any]:
    async def handle(payload: Any) -> None: ...

    handle.__annotations__["payload"] = annotation
    return handle


def number(annotation: Any) -> str:
    return re.sub(r"0x[0-9a-f]+", "", str(annotation))


@pytest.mark.parametrize("annotation", NO_OBJECTS, ids=number)
def test_a_payload_that_no_object_can_be_is_refused(annotation: Any) -> None:
    with pytest.raises(UsageError, match="payload is always an object: annotate it with a model, a dataclass or dict"):
        registered(taking(annotation))
    if annotation != Iterable[int]:  # which would be the keys, one by one
        for payload in PAYLOADS:
            with pytest.raises(ValidationError):
                TypeAdapter(annotation).validate_python(payload)


@pytest.mark.parametrize("annotation", OBJECTS, ids=number)
def test_a_payload_that_an_object_can_be_is_not_refused(annotation: Any) -> None:
    adapter = registered(taking(annotation)).adapter
    assert adapter is None or any(_fits(adapter, payload) for payload in PAYLOADS)


def _fits(adapter: TypeAdapter[Any], payload: dict[str, Any]) -> bool:
    try:
        adapter.validate_python(payload)
    except ValidationError:
        return False
    return True


class Early(BaseModel):
    later: Later | None = None


def test_a_model_may_name_a_class_that_is_defined_later() -> None:
    assert registered(taking(Early)).adapter is not None


class Later(BaseModel):
    pass


def test_the_refusal_names_the_annotation() -> None:
    with pytest.raises(UsageError, match=r"annotated list\[int\], and"):
        registered(taking(list[int]))
    with pytest.raises(UsageError, match=r"annotated int, and"):
        registered(taking(int))


# Signatures.


async def note_and_job(note: Note, job: Job) -> None: ...


def rest_only(*args: Any, **kwargs: Any) -> None: ...


@pytest.mark.parametrize(
    "function",
    [decorators.nameless(note_and_job), rest_only, functools.partial(rest_only, 7), decorators.plain(rest_only)],
    ids=["decorated", "of its own", "partial", "below"],
)
def test_a_function_whose_signature_says_nothing_is_named(function: Callable[..., Any]) -> None:
    with pytest.raises(UsageError) as caught:
        registered(function)
    assert "which does not say what it is to be given: use functools.wraps in its decorator" in str(caught.value)
    assert (
        "nameless.<locals>.inner" in str(caught.value) or "rest_only" in str(caught.value) or "partial" in str(caught)
    )


def test_a_decorator_that_takes_no_names_is_named() -> None:
    with pytest.raises(UsageError) as caught:
        registered(decorators.by_position(note_and_job))
    assert "note_and_job) cannot be called with note and job by name" in str(caught.value)
    assert "let its decorator take and pass on **kwargs" in str(caught.value)


def test_the_outermost_signature_counts_where_it_says_all() -> None:
    handler = registered(decorators.narrow(note_and_job))
    assert (handler.payload_parameter, handler.job_parameter, handler.mode) == (None, "job", "loop")


def test_a_parameter_that_a_decorator_passes_needs_a_default() -> None:
    async def handle(session: str, note: Note) -> None: ...

    with pytest.raises(UsageError, match="what a decorator passes needs a default"):
        registered(decorators.injecting(handle))


# Generators and classes.


def generator(payload: dict[str, Any]) -> Iterator[int]:
    yield 1


async def async_generator(payload: dict[str, Any]) -> AsyncIterator[int]:
    yield 1


class OfClass:
    def method(self, payload: dict[str, Any]) -> Iterator[int]:
        yield 1

    async def __call__(self, payload: dict[str, Any]) -> AsyncIterator[int]:
        yield 1


@pytest.mark.parametrize(
    "function",
    [generator, async_generator, OfClass().method, OfClass(), functools.partial(generator), staticmethod(generator)],
    ids=["def", "async def", "method", "object", "partial", "static"],
)
def test_a_generator_is_refused(function: Any) -> None:
    with pytest.raises(UsageError, match=r"yields, and nobody would take what it yields: return a list"):
        registered(function)


@pytest.mark.parametrize("function", [OfClass, Note, int], ids=str)
def test_a_class_is_refused(function: Any) -> None:
    with pytest.raises(UsageError, match="is a class: give a function"):
        registered(function)


def test_a_coroutine_below_a_decorator_may_be_sent_to_a_thread() -> None:
    assert registered(decorators.own_loop(note_and_job), run_in="thread").mode == "thread"


def test_a_plain_function_below_a_decorator_stays_in_a_thread() -> None:
    assert registered(decorators.plain(lambda payload: None)).mode == "thread"
    with pytest.raises(UsageError, match="make it an `async def`"):
        registered(decorators.plain(lambda payload: None), run_in="loop")


# Its siblings.


async def doubled(given: Any, result: Any) -> Any:
    return [{"n": given["n"]}, {"n": result}]


async def yielded(given: Any, result: Any) -> Any:
    yield {"n": given["n"]}
    yield {"n": result}


def made(given: Any, result: Any) -> Any:
    yield {"n": given["n"]}
    yield {"n": result}


@pytest.mark.parametrize("function", [doubled, yielded, made], ids=["async def", "async generator", "generator"])
@pytest.mark.parametrize(
    "decorate", [lambda f: f, decorators.plain, decorators.nameless], ids=["bare", "plain", "nameless"]
)
async def test_a_stream_function_may_be_decorated(function: Any, decorate: Any) -> None:
    assert await _made(decorate(function), {"n": 1}, 2) == [{"n": 1}, {"n": 2}]
    assert App().handler("k")(stream_handler(decorate(function)))


def test_a_backoff_function_that_is_a_coroutine_is_refused_below_a_decorator() -> None:
    async def delay(failures: int) -> float:
        return 1.0

    for function in (delay, decorators.plain(delay)):
        with pytest.raises(UsageError, match="a backoff function is a plain function"):
            Backoff.parse(function)
