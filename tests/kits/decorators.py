"""Decorators as applications and libraries write them, around handlers of each sort; each notes that it was passed."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Summary

from pgworkd import Job

Function = Callable[..., Any]
SEEN: list[str] = []
"""The decorators that were passed."""
CONNECTION = "a connection"
_REGISTRY = CollectorRegistry()
_TOOK = Summary("took", "t", registry=_REGISTRY)
_BROKEN = Counter("broken", "b", registry=_REGISTRY)
_BUSY = Gauge("busy", "b", registry=_REGISTRY)


def plain(function: Function) -> Function:
    """With wraps, returns what the function returns."""

    @functools.wraps(function)
    def inner(*args: Any, **kwargs: Any) -> Any:
        SEEN.append("plain")
        return function(*args, **kwargs)

    return inner


def by_name(function: Function) -> Function:
    """Without wraps, and with a signature of its own."""

    def inner(payload: dict[str, Any], job: Job) -> Any:
        SEEN.append("by_name")
        return function(payload, job)

    return inner


def narrow(function: Function) -> Function:
    """With wraps and a signature of its own, which differs from that of the function."""

    @functools.wraps(function)
    def inner(job: Job) -> Any:
        SEEN.append("narrow")
        return function(dict(job.payload), job)

    return inner


def awaiting(function: Function) -> Function:
    """An `async def` around whatever it is."""

    @functools.wraps(function)
    async def inner(*args: Any, **kwargs: Any) -> Any:
        SEEN.append("awaiting")
        result = function(*args, **kwargs)
        return await result if asyncio.iscoroutine(result) else result

    return inner


def cached(function: Function) -> Function:
    """Returns a coroutine, or at once a result."""

    @functools.wraps(function)
    def inner(payload: dict[str, Any], job: Job) -> Any:
        SEEN.append("cached")
        return payload["n"] if payload.get("known") else function(payload, job)

    return inner


def injecting(function: Function) -> Function:
    """Passes an argument of its own, by position."""

    @functools.wraps(function)
    def inner(*args: Any, **kwargs: Any) -> Any:
        SEEN.append("injecting")
        return function(CONNECTION, *args, **kwargs)

    return inner


def injecting_by_name(function: Function) -> Function:
    """The same, by name."""

    @functools.wraps(function)
    def inner(*args: Any, **kwargs: Any) -> Any:
        SEEN.append("injecting_by_name")
        return function(*args, session=CONNECTION, **kwargs)

    return inner


def nameless(function: Function) -> Function:
    """Without wraps: what the function takes cannot be seen."""

    def inner(*args: Any, **kwargs: Any) -> Any:
        SEEN.append("nameless")
        return function(*args, **kwargs)

    return inner


def by_position(function: Function) -> Function:
    """With wraps, but takes no arguments by name."""

    @functools.wraps(function)
    def inner(*args: Any) -> Any:
        SEEN.append("by_position")
        return function(*args)

    return inner


def own_loop(function: Function) -> Function:
    """Runs the coroutine itself."""

    @functools.wraps(function)
    def inner(*args: Any, **kwargs: Any) -> Any:
        SEEN.append("own_loop")
        return asyncio.run(function(*args, **kwargs))

    return inner


class Decorated:
    """An object of a class, as some libraries make of a function; with the attributes of `functools.wraps`."""

    def __init__(self, function: Function) -> None:
        functools.update_wrapper(self, function)
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        SEEN.append("Decorated")
        return self._function(*args, **kwargs)


PASSING: dict[str, Callable[[Function], Function]] = {
    "none": lambda function: function,
    "plain": plain,
    "plain twice": lambda function: plain(plain(function)),
    "by_name": by_name,
    "narrow": narrow,
    "awaiting": awaiting,
    "plain over awaiting": lambda function: plain(awaiting(function)),
    "awaiting over plain": lambda function: awaiting(plain(function)),
    "cached": cached,
    "object": Decorated,
    "static": staticmethod,
    "partial": functools.partial,
    "partial of plain": lambda function: functools.partial(plain(function)),
    "plain over partial": lambda function: plain(functools.partial(function)),
    "prometheus time": _TOOK.time(),
    "prometheus exceptions": _BROKEN.count_exceptions(),
    "prometheus in progress": _BUSY.track_inprogress(),
}
"""Decorators that leave a handler one that works."""
