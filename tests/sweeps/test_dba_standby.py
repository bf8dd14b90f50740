"""Every command on a hot standby: reading commands print the same as on the primary, others fail clearly."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import psycopg
import pytest
import typer

from pgworkd.cli.app import app
from pgworkd.database import schema
from pgworkd.database.connection import ConnectionOptions
from pgworkd.embedded import EmbeddedPostgres
from tests.kits.browser import PAGES
from tests.kits.cli import NOBODY, WORKER, Shell, clean
from tests.kits.pages import viewing
from tests.kits.server import binaries, create_database, create_template, standby_of, start_test_server

pytestmark = pytest.mark.slow("each operation under each fault, and servers of their own")

__all__ = ["clean"]  # a fixture

LOOKS: dict[str, list[str]] = {
    "audit": ["", "--queue mail", "--job {dead}"],
    "batches": ["", "--name month"],
    "batches show": ["{batch}", "{finished} --follow"],
    "dead": ["", "--queue mail"],
    "doctor": [""],
    "endpoints": [""],
    "endpoints show": ["e"],
    "explain": ["{dead}", "{running}", "{done}", "--queue mail"],
    "job": ["{dead}", "{running}", "{done}"],
    "jobs": ["", "--queue mail", "--status dead", "--status completed", "--limit 1", "--payload n:1"],
    "keys": ["", "--queue mail", "--key k"],
    "operations": [""],
    "migrate": ["--check"],
    "schedules": [""],
    "stats": ["", "--queue mail", "--metric depth --queue urgent", "--metric dead"],
    "token list": [""],
}
LOOKS_AT_WORKERS = {"queues": "", "queues show": "mail", "workers": ""}
"""They also show unlogged tables, which a standby does not have."""
REFUSE = {
    "batches cancel": "{batch}",
    "batches delete": "{batch}",
    "batches seal": "{batch}",
    "adopt": "--yes",
    "cancel": "{dead}",
    "discard": "--queue mail --yes",
    "edit": "{dead} --priority 7",
    "enqueue": "mail",
    "endpoints add": "f https://example.com/ --unsigned",
    "endpoints disable": "e",
    "endpoints enable": "e",
    "endpoints remove": "e",
    "endpoints set": "e --timeout-s 5",
    "keys free": "mail k",
    "migrate": "",
    "operations stop": "1",
    "mute": "1 --until 2h",
    "pause": "mail",
    "queues pause": "mail",
    "queues resume": "mail",
    "queues set": "mail --concurrency 3",
    "resume": "mail",
    "replay": "{dead}",
    "retry": "{dead}",
    "schedules disable": "nightly",
    "schedules enable": "nightly",
    "schedules remove": "nightly",
    "schedules run-now": "nightly",
    "stack": "{running}",
    "token add": "n --scope read",
    "token revoke": "abcdefgh",
    "undepend": "{dead}",
}
SERVICES = {"autoscale", "bench", "conformance", "demo", "dev", "exporter", "push", "run", "serve"}
"""Long-running commands; all but the exporter wait for a writable server."""
CALLS = {"endpoints test"}
"""It reads one row, and calls a service: tests/engine/test_cli_endpoints.py."""
WITHOUT_A_DATABASE = {"alerts", "config show", "grafana", "grants", "health"}
REFUSED = "this server only reads (a standby?): connect to the primary"
OWN = ("connection", "server", "writes", "clock", "queues", "kinds")
"""What doctor reports about the server itself or about live workers, and not about replicated data."""


class Pair(NamedTuple):
    """A primary with rows of every sort, its standby, and ids by what they identify."""

    primary: EmbeddedPostgres
    first: str
    second: str
    ids: dict[str, str]


def fill(shell: Shell) -> dict[str, str]:
    worker = shell.sql(WORKER, "w", "1 min")
    shell.sql("INSERT INTO pgworkd.pools (worker_id, queue, concurrency) VALUES (%s, 'mail', 4)", worker)
    run = "UPDATE pgworkd.jobs SET status = 'running', attempts = attempts + 1, worker_id = %s WHERE id = %s"
    ids = {"dead": shell.die("mail"), "running": shell("enqueue", "mail", '{"n": 1}').stdout.strip()}
    shell("discard", "--queue", "mail", "--background")
    shell("retry", ids["dead"])
    shell.sql("UPDATE pgworkd.jobs SET status = 'dead', failures = 3, failed_at = now() WHERE id = %s", ids["dead"])
    shell.sql(run, worker, ids["running"])
    ids["done"] = shell("enqueue", "mail", "--dedupe-key", "k", "--dedupe-for-s", "3600").stdout.strip()
    for name in ("batch", "finished"):
        ids[name] = str(shell.sql("SELECT id FROM pgworkd.create_batch('month', 'mail')"))
        ids[f"of {name}"] = str(shell.sql("SELECT unnest(pgworkd.add_jobs(%s, ARRAY['{}'::jsonb]))", ids[name]))
    for job in ("done", "of finished"):
        shell.sql(run, worker, ids[job])
        shell.sql("SELECT pgworkd.settle_completed(ARRAY[%s]::uuid[], '{1}', '{NULL}')", ids[job])
    shell("batches", "seal", ids["finished"])
    assert shell.sql("SELECT finished_at IS NOT NULL FROM pgworkd.batches WHERE id = %s", ids["finished"])
    shell.sql("INSERT INTO pgworkd.schedules (name, queue, every_s) VALUES ('nightly', 'mail', 3600)")
    shell("endpoints", "add", "e", "https://example.com/", "--unsigned")
    shell("queues", "set", "mail", "--max-running", "5")
    shell("pause", "mail", "--for", "900")
    shell("enqueue", "urgent")
    shell("token", "add", "app", "--scope", "read")
    return ids


@contextmanager
def typed(dsn: str) -> Iterator[Shell]:
    """A shell at a database, whose connection is closed in the end."""
    shell = Shell(dsn)
    with shell.db:
        yield shell


@pytest.fixture(scope="module")
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    pg_bin = request.config.getoption("--pg-bin")
    if not (binaries(pg_bin) / "pg_basebackup").exists():
        pytest.skip("these binaries have no pg_basebackup")
    primary = start_test_server(pg_bin)
    try:
        asyncio.run(create_template(primary.dsn(), schema.text()))
        first = asyncio.run(create_database(primary.dsn(), "fleet"))
        with typed(first) as shell:
            ids = fill(shell)
        with standby_of(primary, binaries(pg_bin)) as standby:
            second = urlsplit(standby.dsn())._replace(path="/fleet").geturl()
            yield Pair(primary, first, second, ids)
    finally:
        primary.stop("immediate")


def commands() -> dict[str, Any]:
    """All commands by name; a group that does something without a subcommand counts as one."""
    found: dict[str, Any] = {}

    def walk(command: Any, path: str) -> None:
        if not hasattr(command, "commands") or command.invoke_without_command:
            found[path] = command
        for name, each in getattr(command, "commands", {}).items():
            walk(each, f"{path} {name}".strip())

    walk(typer.main.get_command(app), "")
    return found


def test_every_command_is_classified_as_reading_or_writing() -> None:
    assert set(commands()) - SERVICES - WITHOUT_A_DATABASE - CALLS == set(LOOKS) | set(LOOKS_AT_WORKERS) | set(REFUSE)


def caught_up(pair: Pair) -> None:
    with psycopg.connect(pair.first, autocommit=True) as primary, psycopg.connect(pair.second) as standby:
        (written,) = primary.execute("SELECT pg_current_wal_lsn()").fetchone() or ("",)
        until = time.monotonic() + 20
        while standby.execute("SELECT pg_last_wal_replay_lsn() < %s::pg_lsn", [written]).fetchone() != (False,):
            assert time.monotonic() < until, "the standby does not follow"
            time.sleep(0.01)


def told(text: str, *, own: tuple[str, ...] = ()) -> str:
    """The output without values that change over time or belong to the server alone."""
    lines = [line for line in text.splitlines() if not any(f" {subject} " in f" {line} " for subject in own)]
    return "\n".join(" ".join(re.sub(r"\d+\.\d+", "N", line).split()) for line in lines)


@pytest.fixture
def here(pair: Pair) -> Iterator[Shell]:
    with typed(pair.first) as shell:
        yield shell


@pytest.fixture
def there(pair: Pair) -> Iterator[Shell]:
    with typed(pair.second) as shell:
        yield shell


@pytest.mark.parametrize("name", [name for name in LOOKS if name != "doctor"])
def test_a_read_only_command_prints_the_same_as_on_the_primary(
    pair: Pair, here: Shell, there: Shell, name: str
) -> None:
    caught_up(pair)
    as_json = "json" in {each.name for each in commands()[name].params}
    for args in LOOKS[name]:
        for more in ([], ["--json"]) if as_json and "--follow" not in args else ([],):
            words = [*name.split(), *args.format(**pair.ids).split(), *more]
            first, second = here(*words), there(*words)
            assert told(second.stdout) == told(first.stdout), words
            assert second.stderr == first.stderr == ""
            assert first.stdout not in ("", "0\n", "[]\n"), "there is something to see"


async def test_pages_are_read_from_the_standby_and_acts_go_to_the_primary(pair: Pair) -> None:
    caught_up(pair)
    jobs = [f"/jobs/{pair.ids[which]}" for which in ("dead", "running", "done")]
    keys = "/keys?queue=mail&key=k"
    async with viewing(pair.first, dashboard_database=ConnectionOptions(pair.second)) as client:
        for path in [*PAGES, *jobs, "/queues/mail", f"/batches/{pair.ids['batch']}", keys]:
            page = await client.get(path)
            assert (page.status_code, "Not read" in page.text) == (200, False), (path, page.text)
        assert "<dd>a standby, which only reads</dd>" in (await client.get("/system")).text
        assert "Resume" in (await client.get("/queues/mail")).text
        answer = await client.post("/queues/mail/resume", data={"back": "/queues/mail"})
        assert answer.status_code == 303
        assert "queue mail is resumed" in (await client.get(answer.headers["location"])).text
        caught_up(pair)
        assert "Resume" not in (await client.get("/queues/mail")).text
        await client.post("/queues/mail/pause", data={"back": "/queues/mail"})


@pytest.mark.parametrize("name", LOOKS_AT_WORKERS)
def test_a_command_about_workers_reports_that_a_standby_has_no_pools(
    pair: Pair, here: Shell, there: Shell, name: str
) -> None:
    caught_up(pair)
    words = [*name.split(), *LOOKS_AT_WORKERS[name].split(), "--json"]
    first, second = here(*words), there(*words)
    assert first.stderr == ""
    assert second.stderr.startswith("pgworkd: this is a standby: ")
    own = {"workers", "slots", "queues", "heartbeat_age_s", "lease_left_s", "oldest_due_s", "concurrency"}

    def shared(text: str) -> Any:
        found = json.loads(text)
        rows = found if isinstance(found, list) else [found]
        assert rows
        for row in rows:
            row.get("settings", {}).pop("concurrency", None)
        return [{key: value for key, value in row.items() if key not in own} for row in rows]

    assert shared(second.stdout) == shared(first.stdout)
    assert there(*words[:-1]).stdout


def test_doctor_reports_a_standby_and_otherwise_the_same_as_on_the_primary(
    pair: Pair, here: Shell, there: Shell
) -> None:
    caught_up(pair)
    first, second = here("doctor"), there("doctor", code=1)
    assert told(second.stdout, own=OWN) == told(first.stdout, own=OWN)
    assert not {"queues", "kinds"} & {line.split()[1] for line in second.stdout.splitlines()}
    (bad,) = [line for line in second.stdout.splitlines() if line.startswith("bad")]
    assert bad.startswith("bad   writes         this is a read-only standby")
    assert "standby" not in first.stdout


@pytest.mark.parametrize("name", REFUSE)
def test_any_writing_command_fails_with_one_line(pair: Pair, there: Shell, name: str) -> None:
    line = there.refused(*name.split(), *REFUSE[name].format(**pair.ids).split(), code=1)
    assert line.startswith(f"{REFUSED}; tried ")


def test_of_several_hosts_a_writable_one_is_preferred(pair: Pair, here: Shell) -> None:
    hosts = ",".join(urlsplit(each).netloc.rpartition("@")[2] for each in (pair.second, pair.first))
    url = urlsplit(pair.first)
    here.dsn = url._replace(netloc=f"{url.netloc.rpartition('@')[0]}@{hosts}").geturl()
    assert "standby" not in here("doctor").stdout
    enqueued = here("enqueue", "other").stdout.strip()
    caught_up(pair)
    pair.primary.kill()
    assert "standby" in here("doctor", code=1).stdout
    assert f'"id": "{enqueued}"' in here("job", enqueued, "--json").stdout
    assert "connect" in here.refused("cancel", NOBODY, code=1)
