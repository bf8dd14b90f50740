"""Applications of many queues and kinds, whose handlers do nothing: what their metrics cost is measured."""

from __future__ import annotations

from typing import Any

from pgworkd import App

from .tally import from_environment

_tally = from_environment()


def _wide(queues: int, kinds: int) -> App:
    app = App()

    async def handle(payload: dict[str, Any]) -> None:
        """Counts the call and does nothing else."""
        _tally.called()

    for queue in range(queues):
        for kind in range(kinds):
            app.handler(f"q{queue}k{kind}", queue=f"q{queue}", concurrency=10)(handle)
    return app


q20k10, q200k50 = _wide(20, 10), _wide(200, 50)
