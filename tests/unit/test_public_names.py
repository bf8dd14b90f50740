"""The public names are found where people look: completion, help(), `from ... import *`."""

from __future__ import annotations

import importlib
import pydoc
import subprocess
import sys
from pathlib import Path

import pytest

import pgworkd

PACKAGE = Path(pgworkd.__file__).parent
LAZY = sorted(
    ".".join(("pgworkd", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__")
    for path in PACKAGE.rglob("*.py")
    if "\ndef __getattr__" in path.read_text(encoding="utf-8")
)


def test_there_are_lazy_modules() -> None:
    assert {"pgworkd", "pgworkd.http"} <= set(LAZY)


@pytest.mark.parametrize("name", LAZY)
def test_dir_has_what_is_imported_when_it_is_first_used(name: str) -> None:
    module = importlib.import_module(name)
    assert set(module.__all__) <= set(dir(module))
    assert "__doc__" in dir(module)
    for each in module.__all__:
        assert getattr(module, each) is not None
    with pytest.raises(AttributeError):
        getattr(module, "NoSuchName")  # noqa: B009


@pytest.mark.parametrize("name", LAZY)
def test_help_shows_them(name: str) -> None:
    module = importlib.import_module(name)
    shown = pydoc.plain(pydoc.render_doc(module))
    assert [each for each in module.__all__ if each not in shown] == []


def test_help_of_the_package_explains_its_classes() -> None:
    shown = pydoc.plain(pydoc.render_doc(pgworkd))
    for each in ("class App(", "Registers a function for a kind of job", "class Snooze(", "class DaemonOptions("):
        assert each in shown


def test_dir_imports_nothing() -> None:
    code = "import sys, pgworkd; dir(pgworkd); sys.exit('asyncpg' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
