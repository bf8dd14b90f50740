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
    checks.misses_no_claim,
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
                field.proxy.mode = "pass"
                field.close()


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
                field.proxy.mode = "pass"
                field.close()
