"""The parts of `pgworkd demo`: file selection, a file that is gone, the view."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from rich.console import Console

from pgworkd.demo import demo
from pgworkd.demo.view import DemoTally, live_view, queue_table


def test_only_readable_text_files_are_used(tmp_path: Path) -> None:
    wanted = [tmp_path / "a.txt", tmp_path / "deep" / "b.md"]
    unwanted = ("zero", ".hidden", ".git/config", "node_modules/x.js", "data/pgdata/PG_VERSION", "data/password")
    for path in [*wanted, *(tmp_path / name for name in unwanted)]:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("" if path.name == "zero" else "some text")
    (tmp_path / "binary").write_bytes(b"a\0b")
    (tmp_path / "huge").write_bytes(b"x" * (demo.FILE_BYTES_MAX + 1))
    (tmp_path / "link").symlink_to(wanted[0])
    (tmp_path / "name-\udcff").write_text("its name is not UTF-8")
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "closed").mkdir(mode=0)
    assert demo.text_files(tmp_path) == wanted
    assert demo.text_files(tmp_path / "gone") == []


async def test_events_are_counted_by_queue() -> None:
    tally = DemoTally()
    facts = {"queue": "ocr", "kind": "ocr", "attempt": 1, "error": "late", "status": "failed", "duration_s": 0.1}
    for name in ("job.started", "job.completed", "job.failed", "job.lost", "job.dead", "daemon.ready"):
        tally(name, facts)
    tally("job.lost", {**facts, "status": "dead"})
    assert (tally.completed, tally.retries, tally.dead) == ({"ocr": 1}, {"ocr": 2}, {"ocr": 2})
    assert len(tally.latest) == 4


async def test_displayed_text_cannot_control_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    tally = DemoTally()
    tally("job.failed", {"queue": "\x1b[2J", "kind": "\x1b]0;x\x07", "attempt": 1, "error": "line\nbreak"})
    assert tally.latest[0].isprintable()
    assert tally.retries == {"\x1b[2J": 1}
    console = Console(highlight=False, markup=False, emoji=False, width=120)
    console.print(live_view(queue_table({"ocr": 1}, [("\x1b[2J", 0, 1, 2, 3)], tally), tally))
    output = capsys.readouterr().out
    assert output.replace("\n", "").isprintable()
    assert "\\x1b[2J" in output
