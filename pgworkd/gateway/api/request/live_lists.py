"""Lists that callers follow: each is read once however many do, and only while somebody does."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Hashable
from contextlib import aclosing
from typing import Any

import anyio
from anyio.abc import TaskGroup

from pgworkd.core.access import Access
from pgworkd.errors import PgworkdError

PERIOD_S = 1.0
SHARE = 20
"""A list is read for at most one part in this many of the time, however slow the database is."""
AGES = frozenset({"oldest_due_s", "sample_age_s", "heartbeat_age_s", "lease_left_s"})
"""Members of rows that differ from second to second: they are no news by themselves."""
PAUSE_MAX_S = 5.0
"""The longest pause between two reads of a list, however slow the database is."""
REPEAT_S = 15.0
"""A list without news is told again after this time, so that ages are known and proxies see life."""

Row = dict[str, Any]


class LiveList:
    """A list that callers follow. `read` returns its rows."""

    def __init__(self, read: Callable[[], Awaitable[list[Row]]]) -> None:
        self._read = read
        self._followers = 0
        self._wanted, self._news, self._was_read = anyio.Event(), anyio.Event(), anyio.Event()
        self._began_s = 0.0
        """When the read of the newest rows began."""
        self._rows: list[Row] | None = None
        """The newest rows; None: not read yet."""
        self._texts: dict[Hashable, str] = {}
        """The newest rows as texts, by who may see what of them."""
        self._error: PgworkdError | None = None
        """Why the last read failed."""

    async def run(self, *, once: bool = False) -> None:
        """Reads the list as long as somebody follows; runs until it is cancelled. `once`: or until nobody follows."""
        while True:
            await self._wanted.wait()
            began_s = anyio.current_time()
            try:
                rows, error = await self._read(), None
            except PgworkdError as found:
                rows, error = None, found
            took_s = anyio.current_time() - began_s
            is_news = (error is None) != (self._error is None) or _plain(rows) != _plain(self._rows)
            self._rows, self._texts, self._error, self._began_s = rows, {}, error, began_s
            was_read, self._was_read = self._was_read, anyio.Event()
            was_read.set()
            if is_news:
                news, self._news = self._news, anyio.Event()
                news.set()
            await anyio.sleep(max(PERIOD_S, min(PAUSE_MAX_S, SHARE * took_s)))
            if not self._followers:
                if once:
                    return
                self._wanted = anyio.Event()
                self._rows, self._texts, self._error = None, {}, None

    def text(self, rows: list[Row], viewer: Hashable, make: Callable[[list[Row]], str]) -> str:
        """`make(rows)`, which is called once for all followers who are such a viewer."""
        if rows is not self._rows:
            return make(rows)
        if viewer not in self._texts:
            self._texts[viewer] = make(rows)
        return self._texts[viewer]

    async def follow(self, *, newer: bool = False) -> AsyncGenerator[list[Row] | PgworkdError, None]:
        """Yields the rows now, and again whenever they have changed, or after REPEAT_S; or why they cannot be read.

        Who is slow gets the newest only: nothing is kept for anyone. `newer`: the first rows are none that were read
        before this call; the caller knows newer ones.
        """
        came_s = anyio.current_time()
        self._followers += 1
        self._wanted.set()
        try:
            while newer and self._began_s < came_s:
                await self._was_read.wait()
            while True:
                news = self._news
                found = self._error or self._rows
                if found is not None:
                    yield found
                with anyio.move_on_after(REPEAT_S):
                    await news.wait()
        finally:
            self._followers -= 1


class LiveLists:
    """Lists that are there while somebody follows, by whatever names them."""

    def __init__(self) -> None:
        self._lists: dict[Hashable, LiveList] = {}

    async def follow(
        self, key: Hashable, read: Callable[[], Awaitable[list[Row]]], tasks: TaskGroup
    ) -> AsyncGenerator[list[Row] | PgworkdError, None]:
        """Yields as `LiveList.follow` what is newer; `read`: for the first follower of that key, in a task of `tasks`.

        A page that is opened just after an act would else go back, for seconds, to what was before it.
        """
        if (found := self._lists.get(key)) is None:
            found = self._lists[key] = LiveList(read)
            tasks.start_soon(self._run, key, found)
        async with aclosing(found.follow(newer=True)) as changes:
            async for change in changes:
                yield change

    async def _run(self, key: Hashable, found: LiveList) -> None:
        try:
            await found.run(once=True)
        finally:
            del self._lists[key]


def viewer(access: Access) -> Hashable:
    """Equal for callers who see the same."""
    return tuple((scope, queues and tuple(queues)) for scope, queues in access.scopes.items())


def _plain(rows: list[Row] | None) -> list[Row] | None:
    return None if rows is None else [{name: row[name] for name in row.keys() - AGES} for row in rows]
