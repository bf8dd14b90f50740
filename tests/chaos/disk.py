"""A small disk of our own, that can be filled up: a tmpfs, which only root may mount."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from pathlib import Path

SIZE_BYTES = 1 << 30


def mounted(at: Path) -> bool:
    """Mounts it there; False where that is not allowed."""
    at.mkdir()
    return _done("mount", "-t", "tmpfs", "-o", f"size={SIZE_BYTES},mode=711", "tmpfs", str(at))


def unmount(at: Path) -> None:
    """Takes it away, with all that is on it."""
    _done("umount", "-l", str(at))


def _done(program: str, *arguments: str) -> bool:
    found = shutil.which(program, path="/usr/bin:/bin:/usr/sbin:/sbin")  # whatever PATH is
    return found is not None and subprocess.run([found, *arguments], capture_output=True, check=False).returncode == 0


def fill(at: Path) -> Path:
    """Leaves no room on it; the file that takes it all."""
    ballast = at / "ballast"
    with ballast.open("wb") as file:
        for step_bytes in (1 << 26, 1 << 20, 1 << 12):
            with contextlib.suppress(OSError):  # no space left on device
                while True:
                    os.posix_fallocate(file.fileno(), file.seek(0, os.SEEK_END), step_bytes)
    return ballast
