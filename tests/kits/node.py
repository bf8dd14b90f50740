"""Programs in JavaScript and TypeScript; their packages: `npm ci` in tests/clients, or NODE_PATH says where."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

CLIENTS = Path(__file__).parent.parent / "clients"


def _modules() -> Path | None:
    """Where the packages are; None: nowhere."""
    places = [CLIENTS / "node_modules", *map(Path, os.environ.get("NODE_PATH", "").split(":"))]
    return next((place for place in places if (place / "axe-core").is_dir()), None)


MODULES = _modules()
needs_packages = pytest.mark.skipif(
    shutil.which("node") is None or MODULES is None, reason="no node, or no packages: npm ci in tests/clients"
)


def program_of(folder: Path) -> None:
    """Makes a folder one of programs: they find the packages, and are checked as strictly as can be."""
    (folder / "node_modules").symlink_to(MODULES or "")
    (folder / "package.json").write_text('{"type": "module"}')
    options = {"strict": True, "target": "es2022", "module": "nodenext", "skipLibCheck": True, "outDir": "out"}
    (folder / "tsconfig.json").write_text(json.dumps({"compilerOptions": options}))


def run_package(folder: Path, package: str, *arguments: str) -> str:
    """Runs a program of a package in that folder, which must succeed; what it prints."""
    command = ["node", str(folder / "node_modules" / package), *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def compiled(folder: Path) -> Path:
    """Compiles all TypeScript of the folder; where the programs are."""
    run_package(folder, "typescript/bin/tsc")
    (folder / "out" / "package.json").write_text('{"type": "module"}')
    return folder / "out"
