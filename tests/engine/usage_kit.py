"""Helpers for the numbered wrong usages: a shell, processes, and a directory for settings and apps."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import pytest
from typer.testing import CliRunner

from pgworkd.cli.app import app
from tests.kits.cli import Shell
from tests.kits.commands import Start


@dataclasses.dataclass(frozen=True)
class Usage:
    """`directory` is the working directory of both; `start` has written an app into it, notes:app."""

    shell: Shell
    start: Start
    directory: Path
    empty_dsn: str
    monkeypatch: pytest.MonkeyPatch

    def write(self, name: str, text: str, mode: int = 0o600) -> Path:
        path = self.directory / name
        path.write_text(text, encoding="utf-8")
        path.chmod(mode)
        return path


UsageCheck: TypeAlias = Callable[[Usage], None]


def bare(*args: str) -> str:
    """The one line of error output of this command; it takes settings from files and the environment only."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pgworkd.cli.serve._Service", None)  # a daemon that started anyway would run here forever
        result = CliRunner().invoke(app, args, catch_exceptions=False)
    assert result.exit_code == 2, result.output
    assert not result.stdout
    assert result.stderr.count("\n") == 1, result.stderr
    assert "Traceback" not in result.stderr
    return result.stderr.removeprefix("pgworkd: ").rstrip("\n")
