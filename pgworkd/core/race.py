"""The first of several attempts that succeeds, where an earlier one may be silent for long."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import anyio

Found = TypeVar("Found")

STAGGER_S = 1.0
"""An attempt that has taken this long is joined by the next one. An attempt that is going well has long succeeded."""


class Failed(Exception):  # noqa: N818 - an outcome
    """Raised by an attempt: another one might succeed."""


class AllFailed(Failed):
    """No attempt succeeded; `failed`: what they raised, in that order."""

    def __init__(self, failed: list[Failed]) -> None:
        super().__init__(failed)
        self.failed = failed


async def first(
    attempts: Sequence[Callable[[], Awaitable[Found]]],
    limit_s: float,
    drop: Callable[[Found], None],
    stagger_s: float | None = None,
) -> Found:
    """Returns what the first attempt to succeed does; an attempt may itself be such a race. Raises AllFailed.

    Each begins when the one before it has failed, or has taken a while: at most `stagger_s` (None: STAGGER_S), and so
    little that the last one begins within half of `limit_s` seconds, by which the attempts themselves end. So none is
    given up early because there are many, as it would be if they shared the time, and a silent one delays the others
    little.

    What an attempt raises that is not `Failed` is raised here, and ends the others. `drop` gets what came too late.
    """
    stagger_s = min(STAGGER_S if stagger_s is None else stagger_s, limit_s / 2 / max(1, len(attempts)))
    found: list[Found] = []
    failed: list[Failed] = []
    final: list[Exception] = []

    async def run(attempt: Callable[[], Awaitable[Found]], ended: anyio.Event) -> None:
        try:
            answer = await attempt()
        except Failed as error:
            failed.extend(error.failed if isinstance(error, AllFailed) else [error])
        except Exception as error:  # noqa: BLE001 - raised below: the task group would wrap it
            final.append(error)
        else:
            found.append(answer)
        ended.set()
        if found or final:
            tasks.cancel_scope.cancel()

    try:
        async with anyio.create_task_group() as tasks:
            for attempt in attempts:
                if found or final:
                    break
                ended = anyio.Event()
                tasks.start_soon(run, attempt, ended)
                with anyio.move_on_after(stagger_s):
                    await ended.wait()
        if not found:
            raise final[0] if final else AllFailed(failed)
        return found.pop(0)
    finally:
        for late in found:
            drop(late)
