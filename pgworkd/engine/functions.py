"""What a handler's function is: where it runs, which parameters take the payload and the `Job`, what payloads fit."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, get_type_hints

from pydantic import PydanticSchemaGenerationError, PydanticUserError, TypeAdapter

from pgworkd.core.decorated import innermost, is_async, outermost
from pgworkd.core.job import Job
from pgworkd.errors import UsageError

Mode = Literal["loop", "thread", "process"]
_ANY = (dict, dict[str, Any], dict[str, object], Any, object)
"""Annotations that every payload fits."""
_STEPS = ("function-before", "function-wrap", "function-plain")
"""Validators that see the payload before it is compared with the type."""


def name_of(function: Callable[..., Any]) -> str:
    """The module and the qualified name of a function."""
    module, name = getattr(function, "__module__", "?"), getattr(function, "__qualname__", repr(function))
    return f"{module}.{name}"


class Examined(NamedTuple):
    """What is known of a function: see `Handler`."""

    function: Callable[..., Any]
    mode: Mode
    payload_parameter: str | None
    job_parameter: str | None
    adapter: TypeAdapter[Any] | None


def examined(function: Callable[..., Any], run_in: Mode | None, kind: str, scope: dict[str, Any]) -> Examined:
    """How to call a handler. `scope`: names that its annotations may use besides those of its module.

    Raises UsageError for what is no function, a generator, a `run_in` or a signature that does not fit, and a payload
    that no object can be.
    """
    if isinstance(function, staticmethod):
        function = function.__func__
    called, mode = _placed(function, run_in, kind)
    return Examined(called, mode, *_taken(function, kind, scope))


def _placed(function: Callable[..., Any], run_in: Mode | None, kind: str) -> tuple[Callable[..., Any], Mode]:
    """The function to call, and where: an `async def` in the loop, also one below decorators that are no coroutines."""
    if not callable(function) or inspect.isclass(function):
        what = "class" if inspect.isclass(function) else type(function).__name__
        raise UsageError(f"the handler of kind {kind!r} is a {what}: give a function")
    for each in (function, getattr(function, "__call__", None)):  # noqa: B004 - of an object that can be called
        if inspect.isgeneratorfunction(each) or inspect.isasyncgenfunction(each):
            raise UsageError(
                f"handler {kind!r} ({name_of(function)}) yields, and nobody would take what it yields: return a list"
            )
    is_loop = is_async(function)
    is_below = not is_loop and is_async(innermost(function))
    mode = run_in or ("loop" if is_loop or is_below else "thread")
    if mode not in ("loop", "thread", "process"):
        raise UsageError(f"run_in of handler {kind!r} is {mode!r}: give 'loop', 'thread' or 'process'")
    if (mode == "loop") != is_loop and not is_below:
        raise UsageError(
            f"handler {kind!r} cannot run in a {mode}: "
            + ("an `async def` runs in the loop; make it a plain `def`" if is_loop else "make it an `async def`")
        )
    importable = inspect.isfunction(function) and "<" not in function.__qualname__ and function.__module__ != "__main__"
    if mode == "process" and not importable:
        raise UsageError(
            f"handler {kind!r} cannot run in a process: it must be a function at the top of a module that can be "
            "imported (not of a script)"
        )
    return (_awaited(function) if mode == "loop" and is_below else function), mode


def _awaited(function: Callable[..., Any]) -> Callable[..., Any]:
    """Awaits the result of a plain decorator around an `async def`: its coroutine, or a result at once."""

    @functools.wraps(function)
    async def call(**arguments: Any) -> Any:
        result = function(**arguments)
        return await result if inspect.isawaitable(result) else result

    return call


def _taken(
    function: Callable[..., Any], kind: str, scope: dict[str, Any]
) -> tuple[str | None, str | None, TypeAdapter[Any] | None]:
    """The parameters of payload and `Job`, and the payload's validator (None: it is passed as a dict)."""
    try:
        outer = inspect.signature(function, follow_wrapped=False)
        first, last = outermost(function), innermost(function)
        shown, annotated = (inspect.signature(function), last) if _has_rest(outer) else (outer, first)
        names = {**getattr(first, "__globals__", {}), **getattr(last, "__globals__", {})}
        hints = get_type_hints(annotated, names, scope, include_extras=True)
    except (NameError, TypeError, ValueError) as error:
        raise UsageError(f"the signature of handler {kind!r} cannot be read: {error}") from error
    payload, job = _parameters(shown, hints, kind)
    if payload is job is None and _has_rest(shown):
        raise UsageError(
            f"handler {kind!r} ({name_of(function)}) takes {shown}, which does not say what it is to be given: "
            "use functools.wraps in its decorator, or name the payload's parameter"
        )
    passed = [each for each in (payload, job) if each is not None]
    try:
        outer.bind(**dict.fromkeys(passed))
    except TypeError as error:
        raise UsageError(
            f"handler {kind!r} ({name_of(function)}) cannot be called with {' and '.join(passed)} by name: {error}; "
            "let its decorator take and pass on **kwargs"
        ) from None
    return payload, job, _validator(hints.get(payload or "", dict), kind)


def _has_rest(signature: inspect.Signature) -> bool:
    return any(each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD) for each in signature.parameters.values())


def _parameters(signature: inspect.Signature, hints: Mapping[str, Any], kind: str) -> tuple[str | None, str | None]:
    payload = job = None
    for parameter in signature.parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise UsageError(f"parameter {parameter.name!r} of handler {kind!r} is positional-only: drop the '/'")
        hint = hints.get(parameter.name)
        if (hint is Job or hint == Job | None) and job is None:
            job = parameter.name
        elif payload is None and (parameter.default is parameter.empty or parameter.name == "payload"):
            payload = parameter.name
        elif parameter.default is parameter.empty:
            raise UsageError(
                f"handler {kind!r} wants both {payload!r} and {parameter.name!r}: a handler takes one payload (model, "
                "dataclass or dict) and, annotated with Job, its context; what a decorator passes needs a default"
            )
    return payload, job


def _validator(annotation: Any, kind: str) -> TypeAdapter[Any] | None:
    if annotation in _ANY:
        return None
    try:
        adapter = TypeAdapter(annotation)
    except (PydanticSchemaGenerationError, PydanticUserError) as error:
        raise UsageError(
            f"the payload of handler {kind!r} is annotated {annotation!r}, which cannot be validated: {error}"
        ) from error
    if not _fits_objects(adapter):
        raise UsageError(
            f"the payload of handler {kind!r} is annotated {_shown(annotation)}, and a payload is always an object: "
            "annotate it with a model, a dataclass or dict"
        )
    return adapter


def _fits_objects(adapter: TypeAdapter[Any]) -> bool:
    """False if no JSON object can be validated; validators of the application's own may make anything of one."""
    try:
        if adapter.core_schema["type"] in ("callable", "is-subclass"):
            return False
        schema = adapter.json_schema()
    except Exception:  # noqa: BLE001 - of an application's own schemas, or one that names a class defined later
        return True
    return _allows_object(schema, schema.get("$defs", {}), frozenset()) or _has_own_step(adapter.core_schema)


def _allows_object(schema: Mapping[str, Any], definitions: Mapping[str, Any], seen: frozenset[str]) -> bool:
    if (name := str(schema.get("$ref", "")).rpartition("/")[2]) != "":
        return name not in seen and _allows_object(definitions[name], definitions, seen | {name})
    for choices in ("anyOf", "oneOf", "allOf"):
        if choices in schema:
            return any(_allows_object(each, definitions, seen) for each in schema[choices])
    return not {"const", "enum"} & schema.keys() and schema.get("type", "object") == "object"


def _has_own_step(schema: Any) -> bool:
    """True for a validator that is not pydantic's, and for a named tuple, which can be made of an object."""
    if isinstance(schema, Mapping):
        step = schema.get("function")
        function = step.get("function") if isinstance(step, Mapping) else None
        module = getattr(getattr(function, "func", function), "__module__", "")  # of a partial: that of its function
        own = schema.get("type") in _STEPS and not str(module).startswith("pydantic")
        below = [value for name, value in schema.items() if name not in ("serialization", "metadata")]
        return own or schema.get("type") in ("named-tuple", "call") or any(map(_has_own_step, below))
    return isinstance(schema, list | tuple) and any(map(_has_own_step, schema))


def _shown(annotation: Any) -> str:
    return annotation.__name__ if type(annotation) is type else str(annotation)
