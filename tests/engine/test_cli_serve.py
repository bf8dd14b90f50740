"""Moments of `pgworkd run` that no signal from outside can hit reliably."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from pgworkd import App
from pgworkd.cli import running as cli_running
from pgworkd.cli import serve
from pgworkd.cli.programs import Program
from pgworkd.engine.life.daemon import Daemon
from pgworkd.process import stop_signals
from pgworkd.settings.config import Settings, load

NOBODY = "postgresql://nobody@127.0.0.1:1/nothing"


@pytest.fixture
def service() -> Any:
    app = App()
    app.handler("q")(lambda: None)
    return serve._Service(Settings(dsn=NOBODY, shutdown_s=0, log_format="json"), {}, Program(app, Daemon))


def test_a_signal_between_the_import_and_the_event_loop_stops_the_daemon(
    service: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(stop_signals._state, "asked", True)
    assert anyio.run(service.run) == 0


async def test_a_stop_that_takes_too_long_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    ended: list[str] = []

    async def signals() -> AsyncIterator[signal.Signals]:
        yield signal.SIGTERM
        await anyio.sleep_forever()

    def end_process(reason: str) -> None:
        ended.append(reason)
        raise SystemExit

    monkeypatch.setattr(cli_running, "end_process", end_process)
    monkeypatch.setattr(serve, "FLUSH_GRACE_S", 0.01)
    monkeypatch.setattr(cli_running, "STUCK_S", 0.01)
    daemon: Any = SimpleNamespace(
        run=None,
        request_stop=lambda *, now: asked.append(now),
        options=SimpleNamespace(shutdown_s=0, cancel_grace_s=0.01),
    )
    with pytest.raises(SystemExit):
        await cli_running.obey(signals(), serve._Runs(daemon))
    assert asked == [False]
    assert ended == ["the stop takes too long"]


@pytest.mark.parametrize(
    ("place", "chosen", "told"),
    [
        (
            "kubernetes",
            {},
            "by default Kubernetes kills after 30 s: set terminationGracePeriodSeconds to 50",
        ),
        ("docker", {}, "by default docker stop kills after 10 s: pass --stop-timeout 50"),
        ("kubernetes", {"shutdown_s": "10"}, None),
        ("host", {}, None),
    ],
)
def test_a_stop_timeout_beyond_the_containers_is_warned_about_at_startup(
    place: str, chosen: dict[str, str], told: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.setattr(serve, "CONTAINER_MARKS", (tmp_path / "mark",))
    if place == "kubernetes":
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    if place == "docker":
        (tmp_path / "mark").touch()
    notes = serve._stop_notes(load(dsn=NOBODY, **chosen))
    assert (told is None and notes == []) or (told is not None and len(notes) == 1 and told in notes[0])
