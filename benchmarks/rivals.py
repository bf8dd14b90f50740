"""Other job systems on Postgres, installed at run time into the scratch folder with npm and pip.

Each with the fastest settings from its own documentation or a sweep; what they do on success differs, as described in
benchmarks/README.md. One that cannot be installed here is skipped, with a line that gives the reason.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from .bare import DSN
from .bench import Bench
from .processes import ROOT, BenchmarkError, running
from .systems import System

NODE_PACKAGES = {"graphile-worker": "0.18.0", "pg-boss": "12.35.0"}
PYTHON_PACKAGES = {"pgqueuer": "1.6.0", "procrastinate": "3.10.0"}
_PYTHON_REQUIREMENTS = ("asyncpg==0.32.0", "uvloop==0.23.0", "psycopg[binary]>=3.2.4")
NODE_LEAST = (22, 18)
"""The version that both node packages need; if node is older, a newer one is installed beside it, from npm."""
PROXY_PACKAGE = "@pg-boss/proxy@1.5.3"
INSTALL_S = 900
PGQUEUER_INSERT = (
    "INSERT INTO pgqueuer (priority, entrypoint, payload, status) VALUES (0, 'bench', convert_to($1, 'UTF8'), 'queued')"
)
PROCRASTINATE_INSERT = (
    "SELECT procrastinate_defer_jobs_v1("
    "ARRAY[ROW('bench', 'bench', 0, NULL, NULL, $1::text::jsonb, NULL)::procrastinate_job_to_defer_v1])"
)

GRAPHILE: dict[str, dict[str, Any]] = {
    "graphile-tuned": {"concurrentJobs": 100, "localQueue": {"size": 2000}},
    "graphile-fast": {"concurrentJobs": 24, "maxPoolSize": 25, "localQueue": {"size": 500}},
}
"""The second is what its own performance test uses; 0 ms: what is complete is told at the next turn of the loop."""
_BATCHED = {"completeJobBatchDelay": 0, "failJobBatchDelay": 0}


def installed(scratch: Path, say: Callable[[str], None]) -> list[System]:
    """All rivals that can be installed."""
    found: list[System] = []
    for what, install in (
        ("graphile-worker and pg-boss", _node_systems),
        ("pgqueuer and procrastinate", _python_systems),
    ):
        try:
            found += install(scratch)
        except (OSError, subprocess.SubprocessError, BenchmarkError) as error:
            said = (getattr(error, "stderr", None) or str(error) or repr(error)).strip()
            say(f"peers: {what} are left out: {said.splitlines()[-1]}")
    return found


def proxy_command(scratch: Path, checkout: str | None) -> list[str]:
    """How to start pg-boss' proxy: of the npm package, or of a checkout in which it is built. After `installed`."""
    npm, folder = shutil.which("npm"), scratch / "proxy"
    node = next((str(path) for path in (scratch / "node" / "node_modules" / ".bin").glob("node")), shutil.which("node"))
    if node is None or npm is None:
        raise BenchmarkError("there is no node (or no npm) on this machine")
    if checkout is not None:
        return [node, str(Path(checkout) / "dist" / "server.js")]
    if _is_news(folder, [PROXY_PACKAGE]):
        try:
            _run([npm, "install", "--no-audit", "--no-fund", "--prefix", str(folder), PROXY_PACKAGE])
        except subprocess.CalledProcessError as error:
            raise BenchmarkError(f"{PROXY_PACKAGE}: {error.stderr.strip().splitlines()[0]}") from None
        _remember(folder, [PROXY_PACKAGE])
    return [node, str(folder / "node_modules" / "@pg-boss" / "proxy" / "dist" / "server.js")]


def _node_systems(scratch: Path) -> list[System]:
    node, npm, folder = shutil.which("node"), shutil.which("npm"), scratch / "node"
    if node is None or npm is None:
        raise BenchmarkError("there is no node (or no npm) on this machine")
    version = _run([node, "--version"])
    old = tuple(map(int, re.findall(r"\d+", version)[:2])) < NODE_LEAST
    wanted = [f"{name}@{release}" for name, release in NODE_PACKAGES.items()] + (["node@22"] if old else [])
    if _is_news(folder, wanted):
        _run([npm, "install", "--no-audit", "--no-fund", "--prefix", str(folder), *wanted])
        _remember(folder, wanted)
    node = str(folder / "node_modules" / ".bin" / "node") if old else node
    runtime = f"node {_run([node, '--version']).strip()}"
    for script in (ROOT / "benchmarks" / "peers").glob("*.mjs"):
        shutil.copy(script, folder)  # node resolves modules from the script's directory
    table, insert = "graphile_worker._private_jobs", "SELECT graphile_worker.add_job('bench', $1::text::json)"
    work = partial(_system, table=table, left=table, insert=insert)
    version = f"{NODE_PACKAGES['graphile-worker']}, {runtime}"
    found = [
        work(
            name,
            [node, str(folder / "graphile.mjs")],
            version,
            GRAPHILE_PRESET=json.dumps(preset | _BATCHED),
            NO_LOG_SUCCESS="1",
        )
        for name, preset in GRAPHILE.items()
    ]
    version = f"{NODE_PACKAGES['pg-boss']}, {runtime}"
    left = "pgboss.job WHERE name = 'bench' AND state < 'completed'"
    return [*found, _system("pg-boss", [node, str(folder / "pgboss.mjs")], version, table="pgboss.job", left=left)]


def _python_systems(scratch: Path) -> list[System]:
    folder = scratch / "python"
    python = str(folder / "bin" / "python")
    wanted = [f"{name}=={release}" for name, release in PYTHON_PACKAGES.items()] + list(_PYTHON_REQUIREMENTS)
    if _is_news(folder, wanted):
        _run([sys.executable, "-m", "venv", "--clear", str(folder)])
        _run([python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *wanted])
        _remember(folder, wanted)
    module = [python, "-m"]
    return [
        _system(
            "pgqueuer",
            [*module, "benchmarks.peers.pgqueuer_worker"],
            PYTHON_PACKAGES["pgqueuer"],
            table="pgqueuer",
            left="pgqueuer",
            insert=PGQUEUER_INSERT,
        ),
        _system(
            "procrastinate",
            [*module, "benchmarks.peers.procrastinate_worker"],
            PYTHON_PACKAGES["procrastinate"],
            table="procrastinate_jobs",
            left="procrastinate_jobs",
            insert=PROCRASTINATE_INSERT,
            share=0.2,
        ),
    ]


def _system(
    name: str,
    program: Sequence[str],
    version: str,
    *,
    table: str,
    left: str,
    share: float = 1.0,
    insert: str = "",
    **environ: str,
) -> System:
    """A rival whose program knows `install`, `enqueue COUNT` and `work`.

    `left`: table and condition of live jobs; `insert`: the statement that inserts one, whose payload is $1.
    """

    async def make(dsn: str) -> None:
        await _said(program, "install", dsn=dsn, environ=environ)

    async def load(bench: Bench, dsn: str, jobs: int) -> None:
        await _said(program, "enqueue", str(jobs), dsn=dsn, environ=environ)

    return System(
        name=name,
        template=name if not environ else "graphile",  # both presets have the same tables
        make=make,
        command=[*program, "work"],
        load=load,
        table=table,
        left_sql=f"SELECT EXISTS (SELECT FROM {left})",  # noqa: S608 - ours
        remaining_sql=f"SELECT count(*) FROM {left}",  # noqa: S608 - ours
        insert_sql=insert,
        environ=environ,
        share=share,
        version=version,
    )


async def _said(program: Sequence[str], *arguments: str, dsn: str, environ: dict[str, str]) -> str:
    """The output of a program that exits by itself."""
    with tempfile.TemporaryDirectory(prefix="pgworkd-peer-") as folder:
        async with running([*program, *arguments], {DSN: dsn, **environ}, Path(folder) / "log") as started:
            return await started.finished()


def _run(command: Sequence[str]) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=INSTALL_S).stdout  # noqa: S603


def _is_news(folder: Path, wanted: Sequence[str]) -> bool:
    stamp = folder / "installed.json"
    return not stamp.is_file() or json.loads(stamp.read_text()) != list(wanted)


def _remember(folder: Path, wanted: Sequence[str]) -> None:
    (folder / "installed.json").write_text(json.dumps(list(wanted)))
