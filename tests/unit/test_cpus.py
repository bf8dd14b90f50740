"""How many CPUs a process may use, whatever its machine has."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pgworkd import App
from pgworkd.process import cpus


def nothing() -> None:
    """A handler that a process can import."""


@pytest.fixture
def system(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine of 64 CPUs without control groups; files below may add some."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    monkeypatch.setattr(cpus, "CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(cpus, "OWN", tmp_path / "own")
    return tmp_path


def write(root: Path, own: str, files: dict[str, str]) -> None:
    (root / "own").write_text(own)
    for name, text in files.items():
        (root / "cgroup" / name).parent.mkdir(parents=True, exist_ok=True)
        (root / "cgroup" / name).write_text(text)


def of_version_1(group: str, quota_us: int) -> dict[str, str]:
    return {f"{group}/cpu.cfs_quota_us": f"{quota_us}\n", f"{group}/cpu.cfs_period_us": "100000\n"}


@pytest.mark.parametrize(
    ("own", "files", "wanted"),
    [
        ("", {}, 64),
        ("0::/\n", {"cpu.max": "100000 100000\n"}, 1),
        ("0::/\n", {"cpu.max": "150000 100000\n"}, 2),
        ("0::/\n", {"cpu.max": "5000 100000\n"}, 1),
        ("0::/\n", {"cpu.max": "max 100000\n"}, 64),
        ("0::/\n", {"cpu.max": "9900000 100000\n"}, 64),
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000", "a/cpu.max": "300000 100000", "cpu.max": "max 100000"}, 3),
        ("0::/../../host/path\n", {"cpu.max": "400000 100000\n"}, 4),
        ("0::/\n", {"cpu.max": "what is this\n"}, 64),
        ("0::/\n", {"cpu.max": "100000 0\n"}, 64),
        ("nonsense\n\xff\n", {}, 64),
        ("4:cpu,cpuacct:/x\n", of_version_1("cpu,cpuacct/x", 250_000), 3),
        ("4:cpu,cpuacct:/of/the/host\n", of_version_1("cpu", 200_000), 2),
        ("1:cpu:/\n0::/\n", of_version_1("cpu", -1), 64),
        ("5:cpuset:/\n", of_version_1("cpuset", 100_000), 64),
    ],
)
def test_the_limit_of_a_control_group_counts(system: Path, own: str, files: dict[str, str], wanted: int) -> None:
    write(system, own, files)
    assert cpus.available() == wanted


def test_the_affinity_counts(system: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(system, "0::/\n", {"cpu.max": "600000 100000\n"})
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 5})
    assert cpus.available() == 2
    app = App()
    app.handler("p", run_in="process")(nothing)
    assert app.queues() == {"p": 2}
