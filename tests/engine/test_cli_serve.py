"""The moments of `pgworkd run` that no signal from outside can hit for certain."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator, Iterator
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
import structlog

from pgworkd import cli_serve, cli_signals
from pgworkd.app import App
from pgworkd.config import Settings

NOBODY = "postgresql://nobody@127.0.0.1:1/nothing"


@pytest.fixture
def service() -> Iterator[Any]:
    yield cli_serve._Service(Settings(dsn=NOBODY, shutdown_s=0, log_format="json"), {})
    structlog.reset_defaults()


def test_a_stop_between_the_import_and_the_loop_is_heard(service: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli_signals, "asked", lambda: True)
    app = App()
    app.handler("q")(lambda: None)
    assert anyio.run(service.run, app) == 0


async def test_a_stop_that_takes_too_long_ends_the_process(service: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    ended: list[str] = []

    async def signals() -> AsyncIterator[signal.Signals]:
        yield signal.SIGTERM
        await anyio.sleep_forever()

    def end_process(reason: str) -> None:
        ended.append(reason)
        raise SystemExit

    monkeypatch.setattr(cli_serve, "end_process", end_process)
    monkeypatch.setattr(cli_serve, "FLUSH_GRACE_S", 0.01)
    monkeypatch.setattr(cli_serve, "STUCK_S", 0.01)
    daemon = SimpleNamespace(
        request_stop=lambda *, now: asked.append(now), options=SimpleNamespace(shutdown_s=0, cancel_grace_s=0.01)
    )
    with pytest.raises(SystemExit):
        await service._obey(signals(), daemon)
    assert asked == [False]
    assert ended == ["the stop takes too long"]
