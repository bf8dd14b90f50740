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
from tests.kits.docs import blocks
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


STUBS = {
    # A system where nothing has been prepared: what a command needs must have been made by one before it.
    "useradd": 'for name; do :; done; echo "$name" >> "$ROOT/users"',
    "systemctl": 'echo "$@" >> "$ROOT/systemctl"',
    "install": """
        arguments=()
        while [ $# -gt 0 ]; do
            case "$1" in
                -g) grep -qx "$2" "$ROOT/users" || { echo "install: invalid group '$2'" >&2; exit 1; }; shift ;;
                -o) shift ;;
                *) arguments+=("$1") ;;
            esac
            shift
        done
        exec /usr/bin/install "${arguments[@]}" """,
    "python3": """
        [ "$*" = "-m venv $ROOT/opt/app/.venv" ] || exit 1
        mkdir -p "$ROOT/opt/app/.venv/bin"
        printf '#!/bin/sh\\n[ "$1" = install ] && touch %s/pgworkd' "$ROOT/opt/app/.venv/bin" \\
            > "$ROOT/opt/app/.venv/bin/pip"
        chmod +x "$ROOT/opt/app/.venv/bin/pip" """,
}


def test_the_units_are_installed_by_the_docs_on_a_system_where_nothing_has_been_prepared(tmp_path: Path) -> None:
    steps = "\n".join(each.text for each in blocks("docs/deploy.md") if "systemctl daemon-reload" in each.text)
    for folder in ("root/opt", "root/etc/systemd/system", "bin"):
        (tmp_path / folder).mkdir(parents=True)
    for name, script in STUBS.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{script}\n", encoding="utf-8")
        (tmp_path / "bin" / name).chmod(0o755)
    root = tmp_path / "root"
    text = re.sub(r"(?<= )(/opt|/etc)", r"$ROOT\1", re.sub(r"(?m)^/opt", "$ROOT/opt", steps))
    done = subprocess.run(
        ["bash", "-ec", f"umask 077\n{text}"],
        cwd=ROOT,
        env={"ROOT": str(root), "PATH": f"{tmp_path}/bin:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (root / "systemctl").read_text(encoding="utf-8").splitlines()[0] == "daemon-reload"
    for unit in UNITS:
        settings = dict(re.findall(r"(?m)^(\w+)=(.*)$", unit.read_text(encoding="utf-8")))
        assert settings["User"] in (root / "users").read_text(encoding="utf-8").split()
        for needed in (settings["WorkingDirectory"], settings["ExecStart"].split()[0], settings["EnvironmentFile"]):
            path = root / needed.lstrip("/")
            assert path.exists(), needed
            assert all(each.stat().st_mode & 0o005 == 0o005 for each in path.parents if root in each.parents), needed
        assert (root / "etc/systemd/system" / unit.name).read_bytes() == unit.read_bytes()
    assert (root / "etc/pgworkd/pgworkd.env").stat().st_mode & 0o777 == 0o640
    for program, environment in (("serve", "gateway"), ("push", "pgworkd")):
        unit = root / f"etc/systemd/system/pgworkd-{program}.service"
        lines = unit.read_text(encoding="utf-8").splitlines()
        assert f"ExecStart=/opt/app/.venv/bin/pgworkd {program}" in lines
        assert f"EnvironmentFile=/etc/pgworkd/{environment}.env" in lines
        assert unit.stat().st_mode & 0o777 == 0o644


def test_the_example_of_the_environment_names_settings_that_there_are() -> None:
    named = re.findall(r"(?m)^(?:# )?PGWORKD_(\w+)=", (ROOT / "systemd/pgworkd.env").read_text(encoding="utf-8"))
    assert {"DSN", "APP", "ENVIRONMENT"} <= set(named)
    assert {name.lower() for name in named} <= Settings.model_fields.keys()
