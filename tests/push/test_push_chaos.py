"""A short run of the chaos of push; `python -m tests.push.chaos` is the whole one."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.kits.planting import ROOT

pytestmark = pytest.mark.slow("daemons and gateways that are killed")


def test_pushes_survive_kills_and_every_answer() -> None:
    command = [sys.executable, "-m", "tests.push.chaos", "--jobs", "240", "--kills", "4", "--seed", "7"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
