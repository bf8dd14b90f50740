"""A small disk that a test can fill up: a tmpfs, which only root may mount."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from pathlib import Path

SIZE_BYTES = 1 << 30


def mounted(at: Path) -> bool:
    """Mounts it at the path; False where that is not permitted."""
    at.mkdir()
    return _done("mount", "-t", "tmpfs", "-o", f"size={SIZE_BYTES},mode=711", "tmpfs", str(at))


def unmount(at: Path) -> None:
    """Unmounts it, with everything on it."""
    _done("umount", "-l", str(at))


def _done(program: str, *arguments: str) -> bool:
    found = shutil.which(program, path="/usr/bin:/bin:/usr/sbin:/sbin")  # whatever PATH is
    return found is not None and subprocess.run([found, *arguments], capture_output=True, check=False).returncode == 0


def fill(at: Path) -> Path:
    """Fills the disk; returns the file that takes up the space."""
    ballast = at / "ballast"
    with ballast.open("wb") as file:
        for step_bytes in (1 << 26, 1 << 20, 1 << 12):
            with contextlib.suppress(OSError):  # no space left on device
                while True:
                    os.posix_fallocate(file.fileno(), file.seek(0, os.SEEK_END), step_bytes)
    return ballast
