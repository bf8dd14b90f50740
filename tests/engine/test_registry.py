"""Only registered handlers run: no name and no payload in a row makes the daemon import or call anything."""

from __future__ import annotations

import ast
import json
import os
import pickle
import sys
from pathlib import Path
from typing import Any

import asyncpg
import pytest

import pgworkd
from pgworkd import App
from tests.kits.daemon import insert, running, status, until

NAMES = [
    "os.system",
    "os:system",
    "xml.dom.minidom:parseString",
    "antigravity",
    "this",
    "__import__",
    "__main__",
    "__class__",
    "handler.__globals__",
    "App.handler",
    "builtins.exec",
    "../../../bin/sh",
    "/bin/true",
    "pgworkd.demo.demo:main",
    "tests.engine.test_registry:handle",
    "handle",
    "$(touch ran)",
    "lambda: 1",
    "",
]
"""As kinds; the empty one is refused by the table itself."""


class Ran(BaseException):
    """A payload was unpickled."""

    def __reduce__(self) -> Any:
        return (exec, ("import sys; sys.modules['it_ran'] = sys",))


def handle(payload: dict[str, Any]) -> dict[str, Any]:
    """Returns its payload and the modules that the process has loaded."""
    return {"payload": payload, "modules": sorted(sys.modules)}


async def handle_in_loop(payload: dict[str, Any]) -> dict[str, Any]:
    return handle(payload)


@pytest.mark.slow("commands and daemons in processes of their own")
@pytest.mark.parametrize("mode", ["loop", "thread", "process"])
async def test_a_kind_is_looked_up_and_never_imported(
    dsn: str, db: asyncpg.Connection[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    app = App()
    app.handler("known", queue="q", run_in=mode)(handle_in_loop if mode == "loop" else handle)
    async with running(app, dsn):
        first = await insert(db, "q", kind="known")
        await until(lambda: db.fetchval("SELECT result FROM pgworkd.finished_jobs WHERE id = $1", first))
        before = set(sys.modules)
        jobs = [await insert(db, "q", kind=name) for name in NAMES if name]
        for job in jobs:
            error = await until(lambda job=job: db.fetchval("SELECT error FROM pgworkd.jobs WHERE id = $1", job))
            assert error.startswith("no handler for kind ")
            assert await status(db, job) == "pending"
        assert set(sys.modules) == before
    assert not os.listdir(tmp_path)  # noqa: PTH208 - it takes no time
    with pytest.raises(asyncpg.CheckViolationError):
        await insert(db, "q", kind="")


@pytest.mark.slow("commands and daemons in processes of their own")
@pytest.mark.parametrize("mode", ["loop", "thread", "process"])
async def test_a_payload_is_only_ever_data(dsn: str, db: asyncpg.Connection[Any], mode: Any) -> None:
    frame = pickle.dumps(Ran(), protocol=0).decode("latin-1")  # of ASCII without NUL
    odd = {"__class__": "Ran", "py/object": "os.system", "!!python/object/apply:os.system": ["true"], "pickle": frame}
    odd |= {"__import__": "antigravity", "__reduce__": ["os.system", "true"], "payload": "{{ 7 * 7 }} ${7*7} %(x)s"}
    app = App()
    app.handler("q", run_in=mode)(handle_in_loop if mode == "loop" else handle)
    async with running(app, dsn):
        job = await db.fetchval(
            "INSERT INTO pgworkd.jobs (queue, payload) VALUES ('q', $1) RETURNING id", json.dumps(odd)
        )
        result = await until(lambda: db.fetchval("SELECT result FROM pgworkd.finished_jobs WHERE id = $1", job))
    got = json.loads(result)
    assert got["payload"] == odd
    assert "it_ran" not in got["modules"]
    assert "it_ran" not in sys.modules
    assert "antigravity" not in got["modules"]


ALLOWED = {
    ("process_child", "pickle.loads"): 2,  # requests and payloads pickled by the daemon: from a pipe, not the database
    ("process_pool", "pickle.loads"): 1,  # the response of our own child
    ("parent_guard", "os.execvp"): 1,  # the command that the operator typed after `pgworkd autoscale --`
    ("process_child", "importlib.import_module"): 1,  # the module of a registered function, named by the daemon
    ("__init__", "importlib.import_module"): 1,  # the public names of the package, from a table of its own
    ("load_app", "importlib.import_module"): 1,  # the app, named by the settings
    ("run", "importlib.import_module"): 1,  # our own demo
}
"""(module, call): how many. Every call that could run code from data, and why it does not."""
DANGEROUS = """
    eval exec compile __import__ importlib.import_module runpy.run_path runpy.run_module pickle.load pickle.loads
    pickle.Unpickler marshal.load marshal.loads shelve.open dill.loads yaml.load yaml.unsafe_load jsonpickle.decode
    os.system os.popen os.execvp os.execv subprocess.getoutput subprocess.getstatusoutput
    asyncio.create_subprocess_shell pty.spawn
""".split()


def calls(source: str) -> list[str]:
    """Every dangerous call, by the name that the code uses; `shell=True` with any function."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name in DANGEROUS:
                found.append(name)
            if any(each.arg == "shell" and ast.unparse(each.value) != "False" for each in node.keywords):
                found.append(f"{name}(shell)")
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            # `from pickle import loads` would hide the name
            found += [each for each in (f"{node.module}.{alias.name}" for alias in node.names) if each in DANGEROUS]
    return found


def test_nothing_in_the_package_runs_code_from_data() -> None:
    found: dict[tuple[str, str], int] = {}
    for path in sorted(Path(pgworkd.__file__).parent.rglob("*.py")):
        for call in calls(path.read_text(encoding="utf-8")):
            found[path.stem, call] = found.get((path.stem, call), 0) + 1
    assert found == ALLOWED


@pytest.mark.parametrize(
    "source",
    ["pickle.loads(x)", "from pickle import loads", "eval('1')", "run(x, shell=True)", "yaml.load(x)", "__import__(x)"],
)
def test_the_scan_finds_each_dangerous_call(source: str) -> None:
    assert calls(source)
