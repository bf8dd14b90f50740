"""Functions below decorators: the innermost one, and calls that never reached it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from pgworkd.errors import UsageError


def outermost(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function that a call runs first: of a partial, of a bound or static method, of an object that is callable."""
    while True:
        if isinstance(function, functools.partial):
            function = function.func
        elif inspect.ismethod(function) or isinstance(function, staticmethod):
            function = function.__func__
        elif inspect.isroutine(function):
            return function
        else:
            function = type(function).__call__


def innermost(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function below all decorators that use `functools.wraps`."""
    while hasattr(function, "__wrapped__"):
        function = inspect.unwrap(function)
        if isinstance(function, functools.partial):
            function = function.func
    function = outermost(function)
    return innermost(function) if hasattr(function, "__wrapped__") else function


def is_async(function: Callable[..., Any]) -> bool:
    """True for an `async def`, and for an object whose `__call__` is one."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def explained(function: Callable[..., Any], error: BaseException) -> BaseException:
    """An error of a call; a UsageError, with what to change, where a decorator could not call the function at all.

    `error` itself if it is another one, or was raised by the function.
    """
    is_loop = isinstance(error, RuntimeError) and "event loop" in str(error)
    if not (is_loop or isinstance(error, TypeError)) or not hasattr(function, "__wrapped__"):
        return error
    inner, traceback = innermost(function), error.__traceback__
    while traceback is not None:
        if traceback.tb_frame.f_code is getattr(inner, "__code__", None):
            return error
        traceback = traceback.tb_next
    name = getattr(inner, "__qualname__", repr(inner))
    said = f"a decorator could not call {name}() ({error}): arguments are passed by name, and what a decorator passes"
    said += " itself needs a default in the function, or it is taken for the payload"
    if is_loop:
        said = f"a decorator runs {name}() in an event loop of its own ({error}): register it with run_in='thread'"
    found = UsageError(said)
    found.__cause__ = error
    return found
