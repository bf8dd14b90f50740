"""Loading the app: accepted references, and one clear line for everything else."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pgworkd import App
from pgworkd.cli.load_app import load_app
from pgworkd.errors import UsageError

Write = Callable[[str, str], Path]

GOOD = "from pgworkd import App\napp = App()\n"


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """An empty working directory; modules that a test imports from it are unloaded afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes a module."""

    def write_(name: str, text: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    return write_


def refused(reference: str) -> str:
    with pytest.raises(UsageError) as caught:
        load_app(reference)
    line = str(caught.value)
    assert "\n" not in line
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None, "a traceback hangs on to the error"
    assert "importlib" not in line
    assert "loader.py" not in line
    return line


def test_an_app_in_the_working_directory_is_found_first(write: Write, tmp_path: Path) -> None:
    write("notes_a.py", GOOD)
    assert isinstance(load_app("notes_a:app"), App)
    assert sys.path[0] == str(tmp_path)


def test_references_to_packages_and_dotted_attributes_are_accepted(write: Write) -> None:
    write("pkg_a/__init__.py", "")
    write("pkg_a/jobs.py", GOOD + "class Holder:\n    inner = app\n")
    assert load_app("pkg_a.jobs:app") is load_app("pkg_a.jobs:Holder.inner")


def test_an_app_factory_is_accepted(write: Write) -> None:
    write("factory_a.py", "from pgworkd import App\ndef make(name='x'):\n    return App()\n")
    assert isinstance(load_app("factory_a:make"), App)


@pytest.mark.parametrize("reference", ["", "app", "a:", ":a", "a.b", "a:b:c", "a-b:c", "../a:b", "a b:c", "x" * 9000])
def test_a_malformed_reference_is_refused_with_an_example(reference: str) -> None:
    assert "must be module:attribute, for example notes.jobs:app" in refused(reference)
    assert len(refused(reference)) < 400


def test_a_missing_module_is_reported_with_the_closest_match(write: Write) -> None:
    write("notes_b.py", GOOD)
    write("pkg_b/__init__.py", "")
    write("pkg_b/jobs.py", GOOD)
    assert "module 'notes_bb': No module named 'notes_bb'" in refused("notes_bb:app")
    assert "did you mean 'notes_b'?" in refused("notes_bb:app")
    assert "did you mean 'jobs'?" in refused("pkg_b.job:app")
    assert "'notes_b' is not a package" in refused("notes_b.sub:app")


def test_pgworkd_errors_are_located_in_the_users_code(write: Write) -> None:
    write("twice_a.py", GOOD + "@app.handler('x')\ndef a(): ...\n\n@app.handler('x')\ndef b(): ...\n")
    line = refused("twice_a:app")
    assert "two handlers for kind 'x'" in line
    assert line.endswith(("(twice_a.py:6)", "(twice_a.py:7)"))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("def f(:\n", "SyntaxError"),
        ("import sys\nsys.exit(3)\n", "raised on import: SystemExit: 3 (bad_a.py:2)"),
        ("class E(Exception):\n    def __str__(self): raise OSError\nraise E\n", "raised on import: bad_a.E"),
        ("raise ValueError('x' * 10**6)\n", "…"),
        ("raise ExceptionGroup('many', [KeyError('a'), KeyError()])\n", "many (2 sub-exceptions)"),
    ],
)
def test_any_exception_of_a_module_is_reported(write: Write, text: str, told: str) -> None:
    write("bad_a.py", text)
    line = refused("bad_a:app")
    assert told in line
    assert len(line) < 500


def test_ctrl_c_during_the_import_is_not_swallowed(write: Write) -> None:
    write("stopped_a.py", "raise KeyboardInterrupt\n")
    with pytest.raises(KeyboardInterrupt):
        load_app("stopped_a:app")


def test_a_missing_attribute_is_reported_with_the_closest_match(write: Write) -> None:
    write("attr_a.py", GOOD + "other = App()\n")
    assert refused("attr_a:ap") == "module 'attr_a' has no attribute 'ap', did you mean 'app'?"
    assert "apps in this module: app, other" in refused("attr_a:zzzzz")
    write("attr_b.py", "application = 1\n")
    assert "did you mean 'application'?" in refused("attr_b:aplication")


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("app = None", "is None, not a pgworkd.App"),
        ("app = 3", "is of type int, not a pgworkd.App"),
        ("import os as app", "is the module 'os'"),
        ("from pgworkd import App as app", "is the class App (name an instance)"),
        ("async def app(): ...", "is an async function"),
        ("def app(): return 3", "returned of type int"),
        ("def app(x): ...", "cannot be called without arguments (TypeError: missing a required argument: 'x')"),
        ("def app():\n    raise KeyError('k')", "raised when called: KeyError: 'k' (kind_a.py:2)"),
        ("def app(): return int('x', base='y')", "raised when called: TypeError"),
        ("def __getattr__(name): raise RuntimeError(name)", "raised when looked up: RuntimeError: app"),
    ],
)
def test_an_object_that_is_no_app_is_refused(write: Write, text: str, what: str) -> None:
    write("kind_a.py", text + "\n")
    assert what in refused("kind_a:app")


def test_the_apps_in_the_module_are_listed(write: Write) -> None:
    write("listed_a.py", GOOD + "number = 3\n")
    assert refused("listed_a:number").endswith("; apps in this module: app")
