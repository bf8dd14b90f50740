"""Real daemons under an autoscale that is killed, and the metric that KEDA scales by."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from tests.kits.cli import Shell, clean, run_bare, shell
from tests.kits.commands import Start, events, logged, start
from tests.kits.daemon import until

pytestmark = pytest.mark.slow("commands and daemons in processes of their own")

__all__ = ["clean", "shell", "start"]  # fixtures

APP = """
from pathlib import Path
import anyio
from pgworkd import App

app = App()

@app.handler("embedding", concurrency=10)
async def embed():
    while not Path("open").exists():
        await anyio.sleep(0.01)
"""


async def test_daemons_stop_gracefully_when_autoscale_is_killed(
    start: Start, tmp_path: Path, dsn: str, db: asyncpg.Connection[Any]
) -> None:
    (tmp_path / "scaled.py").write_text(APP)
    await db.execute("INSERT INTO pgworkd.jobs (queue) VALUES ('embedding')")
    environ = {
        "PGWORKD_DSN": dsn,
        "PGWORKD_LOG_FORMAT": "json",
        "PGWORKD_APP": "scaled:app",
        "PGWORKD_LOG_LEVEL": "debug",
    }
    command = [sys.executable, "-m", "pgworkd.cli", "run"]
    run = start("autoscale", "-q", "embedding", "--max=2", "--up-at=9", "--down-at=1", "--", *command, **environ)
    await logged(run, "job.started")
    run.process.kill()
    await logged(run, "daemon.stopping")
    (tmp_path / "open").touch()
    await until(lambda: events(run, "daemon.stopped"))
    assert await db.fetchval("SELECT count(*) FROM pgworkd.finished_jobs WHERE status = 'completed'") == 1
    assert await db.fetchval("SELECT count(*) FROM pgworkd.workers") == 0


# One number for other autoscalers


@pytest.fixture
def busy(shell: Shell) -> Shell:
    """Two jobs that are due and one of each kind that is not; another queue."""
    insert = "INSERT INTO pgworkd.jobs (queue, status, run_at, attempts, worker_id) VALUES "
    shell.sql("SET TIME ZONE 'UTC'")
    worker = shell.sql(
        "INSERT INTO pgworkd.workers (name, pid, version, lease_s, lease_until)"
        " VALUES ('w', 1, '0', 30, now() + '1 min') RETURNING id"
    )
    shell.sql(insert + "('embedding', 'pending', now() - '100 s'::interval, 0, NULL)")
    shell.sql(insert + "('embedding', 'failed', now() - '1 s'::interval, 1, NULL)")
    shell.sql(insert + "('embedding', 'failed', now() + '1 h'::interval, 1, NULL)")
    shell.sql(insert + "('embedding', 'pending', now() + '1 h'::interval, 0, NULL)")
    shell.sql(insert + "('embedding', 'running', now(), 1, %s)", worker)
    shell.sql(insert + "('embedding', 'dead', now(), 3, NULL)")
    shell.sql(insert + "('other', 'pending', now(), 0, NULL)")
    return shell


def test_each_metric_prints_one_number(busy: Shell) -> None:
    def said(metric: str) -> str:
        return busy("stats", "--metric", metric, "--queue", "embedding").stdout

    numbers = {metric: said(metric) for metric in ("depth", "scheduled", "running", "failed", "dead")}
    assert numbers == {"depth": "2\n", "scheduled": "1\n", "running": "1\n", "failed": "1\n", "dead": "1\n"}
    assert re.fullmatch(r"1\d\d\.\d{3}\n", said("oldest_due_s"))
    assert busy("stats", "--metric", "depth").stdout == "3\n"


def test_an_unknown_metric_is_refused_with_the_choices(clean: None) -> None:
    result = run_bare("stats", "--metric", "length")
    assert (result.exit_code, result.stdout) == (2, "")
    for name in ("depth", "scheduled", "running", "failed", "dead", "oldest_due_s"):
        assert f"'{name}'" in result.stderr


def yaml_of_the_docs() -> list[tuple[int, str, str]]:
    """(indent, key, value) of each line of the ScaledObject in docs/scaling.md."""
    page = (Path(__file__).parents[2] / "docs" / "scaling.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```yaml\n(apiVersion: keda\.sh/.*?)```", page, re.S)
    lines = [re.fullmatch(r"([ -]*)(\w+):(?: (.*?))?(?:  # .*)?", line) for line in block.splitlines()]
    assert all(lines), block
    return [(len(line[1]), line[2], line[3] or "") for line in lines if line]


def test_the_scaled_object_in_the_docs_has_what_keda_requires() -> None:
    """https://keda.sh/docs/latest/reference/scaledobject-spec and .../docs/latest/scalers/postgresql.

    As checked by pkg/scalers/postgresql_scaler.go of kedacore/keda: `query`, a `targetQueryValue` other than 0, and
    a `connection`, which `connectionFromEnv` names, in place of host, port, userName, dbName and sslmode. All
    values of a trigger's metadata are strings.
    """
    lines = yaml_of_the_docs()
    flat = {key: value for _, key, value in lines}
    assert (flat["apiVersion"], flat["kind"]) == ("keda.sh/v1alpha1", "ScaledObject")
    keys = [key for _, key, _ in lines]
    assert keys.index("scaleTargetRef") < keys.index("triggers")
    target = keys.index("scaleTargetRef") + 1
    assert keys[target] == "name"
    assert lines[target][2]
    assert lines[target][0] > lines[target - 1][0]
    trigger = lines[keys.index("triggers") + 1 :]
    assert trigger[0] == (4, "type", "postgresql")
    assert trigger[1] == (4, "metadata", "")
    metadata = {key: value for indent, key, value in trigger[2:] if indent == 6}
    assert len(metadata) == len(trigger) - 2
    assert {"query", "targetQueryValue", "connectionFromEnv"} <= set(metadata)
    assert set(metadata) <= {"query", "targetQueryValue", "activationTargetQueryValue", "connectionFromEnv"}
    assert float(metadata["targetQueryValue"].strip('"')) > 0
    assert all(re.fullmatch(r'"[^"\\]+"|[A-Z_]+', value) for value in metadata.values()), "strings"


def test_the_query_in_the_docs_returns_the_same_number(busy: Shell) -> None:
    (query,) = (value.strip('"') for _, key, value in yaml_of_the_docs() if key == "query")
    rows = busy.db.execute(query.encode()).fetchall()
    assert rows == [(2,)]
    assert busy("stats", "--metric", "depth", "--queue", "embedding").stdout == "2\n"
    busy.sql("DELETE FROM pgworkd.jobs")
    assert busy.db.execute(query.encode()).fetchall() == [(0,)]
