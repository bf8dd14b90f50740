"""What a daemon remembers about kinds that it has no handler for."""

from __future__ import annotations

from typing import Any, cast

from pgworkd.core.events import Events
from pgworkd.database.store import Store
from pgworkd.engine.run.unknown_kinds import KINDS_MAX, UnknownKinds


class _Elsewhere:
    """Another worker has a handler for every kind."""

    async def kinds_elsewhere(self, worker_id: int, queue: str, kinds: list[str]) -> set[str]:
        return set(kinds)


async def test_the_memory_of_unknown_kinds_is_bounded() -> None:
    unknown = UnknownKinds(cast(Store, _Elsewhere()), Events())
    for number in range(KINDS_MAX + 100):
        await unknown._ask("q", 1, f"kind-{number}")
    left_out = unknown.left_out("q")
    assert len(left_out) == KINDS_MAX
    assert left_out[-1] == f"kind-{KINDS_MAX + 99}", "the latest are remembered"
    many: Any = [f"other-{number}" for number in range(2 * KINDS_MAX)]
    await unknown._ask("q", 1, *many)
    assert set(unknown.left_out("q")) == set(many), "whoever asks for many gets an answer for each"
