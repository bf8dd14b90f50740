"""The workers of tests/clients/ do what the conformance program asks; a few of its checks, for each of them."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.conformance import checks
from tests.conformance.checks import CHECKS, Check
from tests.conformance.field import fields
from tests.conformance.lost_answers import acknowledges_what_it_has_read, admits_what_it_has_begun, misses_no_claim

pytestmark = pytest.mark.slow("workers and gateways in processes of their own, behind a network that is cut")

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
    async with fields(dsn) as make:
        for check in QUICK:
            field = make(command)
            try:
                await check(field)
            finally:
                field.reset()


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
    async with fields(dsn) as make:
        field = make(["node", str(tmp_path / "worker.mjs")])
        try:
            with pytest.raises(AssertionError, match=says):
                await check(field)
        finally:
            field.reset()


async def test_a_worker_that_does_nothing_fails_each_check(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.conformance.field.START_S", 0.2)
    idle: Sequence[str] = ["sleep", "60"]
    async with fields(dsn) as make:
        for check in CHECKS:
            field = make(idle)
            try:
                with pytest.raises(AssertionError):
                    await check(field)
            finally:
                field.reset()
