"""What this process does now: the stacks of its threads and asyncio tasks, and a profile by samples of them.

Code alone is shown: file, line and function, never the value of a variable nor a line of source.
"""

from __future__ import annotations

import asyncio
import re
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterable
from itertools import islice
from types import CodeType, FrameType
from typing import Any

import anyio.to_thread

from pgworkd.process.redaction import escaped, redact

FRAMES_MAX = 100
"""Frames of one stack: the innermost of a thread's, the outermost of a task's."""
CHARS_MAX = 1024 * 1024
"""The length of one answer."""
SAMPLE_S = 0.01
STACKS_MAX = 5_000
"""Stacks that a profile counts apart."""
OTHER = "(other)"
"""What a profile counts all further stacks as."""
_FRAMES, _AWAITED = ("cr_frame", "gi_frame", "ag_frame"), ("cr_await", "gi_yieldfrom", "ag_await")
_LIBRARIES = re.compile(r".*/(?:site-packages|python3\.\d+)/")
_sampling = threading.Lock()


def of_thread(thread_id: int) -> list[str]:
    """The stack of a thread, outermost first; empty: there is no such thread."""
    frame = sys._current_frames().get(thread_id)  # noqa: SLF001 - the only way
    return [] if frame is None else _stack(frame)


def of_task(task: asyncio.Task[Any]) -> list[str]:
    """The stack of a task, outermost first, through all that it awaits. Of one that runs now: its beginning."""
    return [_shown(frame.f_code, line) for frame, line in steps_of(task)]


def steps_of(task: asyncio.Task[Any]) -> list[tuple[FrameType, int]]:
    """The frames of `of_task`, each with the line at which it is."""
    found, awaited = list[tuple[FrameType, int]](), task.get_coro()
    while awaited is not None and len(found) < FRAMES_MAX:
        frame = _first(awaited, _FRAMES)
        if frame is not None:
            found.append((frame, frame.f_lineno or 0))
        awaited = _first(awaited, _AWAITED)
    return found


def all_stacks(loop: asyncio.AbstractEventLoop) -> str:
    """The stacks of all threads, and of the tasks of that loop: those that are at one place are shown once."""
    parts = [_part(f"thread {name}", of_thread(thread_id)) for thread_id, name in _threads().items()]
    tasks: dict[tuple[str, ...], list[str]] = {}
    for task in asyncio.all_tasks(loop):
        tasks.setdefault(tuple(of_task(task)), []).append(task.get_name())
    for stack, names in sorted(tasks.items(), key=lambda item: -len(item[1])):
        title = f"task {names[0]}" if len(names) == 1 else f"{len(names):,} tasks, among them {names[0]}"
        parts.append(_part(title, stack))
    return _cut(parts)


async def profile(seconds: float) -> str | None:
    """How often each stack of each thread was seen within so many seconds, at 100 samples a second.

    One line a stack, outermost frame first, as flamegraph.pl and speedscope read it. None: another one is being taken.
    """
    if not _sampling.acquire(blocking=False):
        return None
    over = threading.Event()
    try:
        return await anyio.to_thread.run_sync(_sampled, seconds, over, abandon_on_cancel=True)
    finally:
        over.set()
        _sampling.release()


def _sampled(seconds: float, over: threading.Event) -> str:
    """Takes the samples, in a thread of its own: a loop that is blocked is seen, too."""
    counts, own, until = Counter[str](), threading.get_ident(), time.monotonic() + seconds
    while not over.wait(SAMPLE_S) and time.monotonic() < until:
        names = _threads()
        for thread_id, frame in sys._current_frames().items():  # noqa: SLF001 - the only way
            if thread_id != own:
                frames = [names.get(thread_id, str(thread_id)), *_stack(frame, functions=True)]
                stack = ";".join(each.replace(";", ":") for each in frames)
                counts[stack if stack in counts or len(counts) < STACKS_MAX else OTHER] += 1
    return _cut([f"{stack} {count}\n" for stack, count in counts.most_common()])


def _threads() -> dict[int, str]:
    return {each.ident: each.name for each in threading.enumerate() if each.ident is not None}


def _stack(frame: FrameType, *, functions: bool = False) -> list[str]:
    """`functions`: with the first line of each function, in place of the one that runs."""
    steps = islice(traceback.walk_stack(frame), FRAMES_MAX)
    return [_shown(each.f_code, each.f_code.co_firstlineno if functions else line) for each, line in steps][::-1]


def _shown(code: CodeType, line: int | None) -> str:
    return f"{code.co_qualname} ({_LIBRARIES.sub('', code.co_filename)}:{line or 0})"


def _first(of: object, names: Iterable[str]) -> Any:
    return next((found for name in names if (found := getattr(of, name, None)) is not None), None)


def _part(title: str, stack: Iterable[str]) -> str:
    return "".join([f"{title}\n", *(f"  {each}\n" for each in stack), "\n"])


def _cut(parts: Iterable[str]) -> str:
    """The first parts, as many as fit whole; without passwords, control characters and lone surrogates."""
    kept, left = list[str](), CHARS_MAX
    for part in parts:
        left -= len(part)
        if left < 0:
            kept.append(f"{OTHER}: the rest is cut\n")
            break
        kept.append(part)
    return redact("\n".join(map(escaped, "".join(kept).split("\n"))))
