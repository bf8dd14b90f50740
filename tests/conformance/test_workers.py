"""The workers of tests/clients/ do what the conformance program asks; a few of its checks, for each of them."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from pgworkd.conformance import checks
from pgworkd.conformance.checks import CHECKS, Check
from pgworkd.conformance.conformance import play
from pgworkd.conformance.lost_answers import (
    acknowledges_what_it_has_read,
    admits_what_it_has_begun,
    misses_no_claim,
    signs_off_from_a_claim,
)
from pgworkd.database.connection import ConnectionOptions
from tests.kits.cli import run_bare
from tests.kits.commands import Start, start, waits_until

pytestmark = pytest.mark.slow("workers and gateways in processes of their own, behind a network that is cut")

__all__ = ["start"]  # a fixture
CLIENTS = Path(__file__).parent.parent / "clients"
WORKERS = {
    "bash": ("jq", ["bash", str(CLIENTS / "worker.sh")]),
    "node": ("node", ["node", str(CLIENTS / "worker.mjs")]),
    "go": ("go", []),  # compiled for the test
}
QUICK: tuple[Check, ...] = (
    checks.keeps_text,
    checks.takes_large_payloads,
    checks.tells_failures,
    misses_no_claim,
    acknowledges_what_it_has_read,
    admits_what_it_has_begun,
    signs_off_from_a_claim,
    checks.leaves_what_is_gone,
    checks.cancels,
    checks.ends_at_once_when_idle,
)


@pytest.fixture(params=WORKERS)
def command(request: pytest.FixtureRequest, tmp_path: Path) -> list[str]:
    """How to start a worker."""
    program, found = WORKERS[request.param]
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed")
    if program == "go":
        found = [str(tmp_path / "worker")]
        subprocess.run(["go", "build", "-o", *found, str(CLIENTS / "worker.go")], check=True)
    return found


async def test_each_worker_passes(dsn: str, command: Sequence[str]) -> None:
    said: list[str] = []
    assert await play(ConnectionOptions(dsn), command, QUICK, said.append), said


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
@pytest.mark.parametrize(
    ("right", "wrong", "check", "says"),
    [
        ("claim_id: read || null", "claim_id: claims || null", acknowledges_what_it_has_read, "took it back"),
        ("    dropped.add(assignment);\n", "", admits_what_it_has_begun, "the job is dead"),
    ],
    ids=["what it has not read", "not what it has begun"],
)
async def test_a_worker_that_acknowledges_wrongly_fails(
    dsn: str, tmp_path: Path, right: str, wrong: str, check: Check, says: str
) -> None:
    text = (CLIENTS / "worker.mjs").read_text()
    assert right in text
    (tmp_path / "worker.mjs").write_text(text.replace(right, wrong))
    said: list[str] = []
    assert await play(ConnectionOptions(dsn), ["node", str(tmp_path / "worker.mjs")], [check], said.append) is False
    assert says in said[1]


@pytest.mark.parametrize(("command", "says"), [("sleep 60", "it registers"), ("false", "it has exited with 1")])
async def test_a_worker_that_does_nothing_fails_each_check(
    dsn: str, monkeypatch: pytest.MonkeyPatch, command: str, says: str
) -> None:
    monkeypatch.setattr("pgworkd.conformance.trial.START_S", 0.2)
    said: list[str] = []
    first, *others = CHECKS
    assert not await play(ConnectionOptions(dsn), command.split(), others, said.append)
    *each, sum_ = said
    assert [line for line in each if says in line] == each[1::3]
    assert sum_ == f"0 of {len(others)} checks passed"
    assert not await play(ConnectionOptions(dsn), command.split(), CHECKS, said.append)
    assert said[-1] == f"0 of {len(CHECKS)} checks passed; {len(others)} were not played"
    assert first is checks.registers


def test_a_stop_ends_the_workers_too(start: Start, tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    run = start("conformance", "--only", "registers", "--", "sh", "-c", f"echo $$ > {pid}; exec sleep 60")
    waits_until(lambda: pid.exists() and pid.read_text())
    run.stop()
    assert run.ends() == 1
    command = Path(f"/proc/{pid.read_text().strip()}/cmdline")
    waits_until(lambda: not command.exists() or not command.read_bytes())  # ended, if perhaps not waited for


def test_the_command_says_what_is_wrong() -> None:
    assert "no such program" in run_bare("conformance", "--", "no-such-worker").stderr
    assert "it is not executable" in run_bare("conformance", "--", __file__).stderr
    assert "did you mean keeps_text?" in run_bare("conformance", "--only", "keep_text", "--", "true").stderr
    result = run_bare("conformance", "--only", "registers", "--", "true")
    assert (result.exit_code, result.stdout.splitlines()[-1]) == (1, "0 of 1 checks passed")
