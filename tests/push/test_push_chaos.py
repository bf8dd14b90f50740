"""A short run of the chaos of push; `python -m tests.push.chaos` is the whole one."""

from __future__ import annotations

from tests.push import chaos


def test_pushes_survive_kills_and_every_answer() -> None:
    assert chaos.main(["--jobs", "240", "--kills", "4", "--seed", "7"]) == 0
