"""The systemd units: their exposure to a compromised handler, and that systemd accepts them."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from pgworkd.database.connection import ConnectionOptions
from pgworkd.engine.life.daemon import DaemonOptions
from pgworkd.engine.life.shutdown import FLUSH_GRACE_S
from pgworkd.settings.config import Settings
from tests.kits.planting import ROOT

EXPOSURE_MAX = 1.5
UNITS = sorted((ROOT / "systemd").glob("*.service"))


def analyze(*arguments: str) -> str:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd-analyze here")
    done = subprocess.run(["systemd-analyze", *arguments], capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.name)
def test_the_systemd_unit_has_a_low_exposure_score(unit: Path) -> None:
    said = analyze("security", "--offline=true", str(unit))
    if "unrecognized option" in said or "nvalid option" in said:
        pytest.skip("this systemd-analyze takes no files")
    level = re.search(r"Overall exposure level for \S+: ([\d.]+)", said)
    assert level is not None, said
    assert float(level[1]) <= EXPOSURE_MAX, said


@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.name)
def test_systemd_analyze_verify_accepts_the_units(unit: Path, tmp_path: Path) -> None:
    copy = tmp_path / unit.name.replace("@", "@embedding")
    text = unit.read_text(encoding="utf-8").replace("/opt/app/.venv/bin/pgworkd", "/bin/true")
    copy.write_text(text, encoding="utf-8")
    said = analyze("verify", str(copy))
    assert str(copy) not in said, said
    assert unit.name.partition(".")[0].rstrip("@") not in said, said


def test_the_units_differ_only_in_the_queues_they_serve() -> None:
    lines = [unit.read_text(encoding="utf-8").splitlines() for unit in UNITS]
    different = [one for one, other in zip(*lines, strict=True) if one != other]
    assert [line.partition("=")[0] for line in different] == ["Description", "ExecStart"]


@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.name)
def test_the_stop_timeout_covers_the_default_shutdown_time(unit: Path) -> None:
    stop_s = int(re.findall(r"(?m)^TimeoutStopSec=(\d+)$", unit.read_text(encoding="utf-8"))[0])
    grace_s = DaemonOptions(ConnectionOptions("postgresql://127.0.0.1/x")).cancel_grace_s
    assert stop_s > Settings().shutdown_s + grace_s + FLUSH_GRACE_S
