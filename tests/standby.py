"""A streaming standby of a test's server, which may be disconnected and promoted."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from pgworkd.embedded import EmbeddedPostgres
from tests.kits.server import MEMORY


@contextmanager
def standby_of(primary: EmbeddedPostgres, bin_dir: Path) -> Iterator[EmbeddedPostgres]:
    """An asynchronous hot standby of the running `primary`."""
    directory = Path(tempfile.mkdtemp(prefix="standby-", dir=MEMORY if MEMORY.is_dir() else None)).resolve()
    directory.chmod(0o711)
    pgdata, password = directory / "pgdata", directory / "password"
    address = urlsplit(primary.dsn())
    try:
        subprocess.run(
            [bin_dir / "pg_basebackup", "-d", primary.dsn(), "-D", pgdata, "-R", "-X", "stream", "-c", "fast"],
            check=True,
            capture_output=True,
            timeout=60,
        )
        password.write_text(address.password or "")
        if os.geteuid() == 0:
            user = pwd.getpwnam("pgserver")
            for each in (pgdata, *pgdata.rglob("*")):
                os.chown(each, user.pw_uid, user.pw_gid)
        with EmbeddedPostgres(directory, settings=primary.settings, bin_dir=bin_dir) as standby:
            yield standby
    finally:
        shutil.rmtree(directory, ignore_errors=True)


CUT_OFF = "ALTER SYSTEM SET primary_conninfo = ''"
"""Followed by pg_reload_conf(), this disconnects the standby from its primary."""
