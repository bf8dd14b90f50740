"""The system user of the embedded Postgres, on a machine that has none yet."""

from __future__ import annotations

import os
import pwd
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

ASKS = """
import sys
from pathlib import Path
from pgworkd import embedded

embedded._USER = sys.argv[1]
sys.stdout.write("ready\\n")
sys.stdout.flush()
sys.stdin.readline()
sys.stdout.write(str(embedded._installation(Path("/tmp"), Path("/usr/bin"))[1]["user"]))
"""


@pytest.fixture
def user() -> Iterator[str]:
    name = f"pgworkd-{uuid.uuid4().hex[:8]}"
    yield name
    subprocess.run(["/usr/sbin/userdel", name], check=False, capture_output=True)


@pytest.mark.skipif(os.geteuid() != 0 or not Path("/usr/sbin/useradd").exists(), reason="for root with useradd only")
def test_servers_that_start_at_once_make_one_system_user(user: str) -> None:
    """As the tests do, in several processes, the first time that they run on a machine."""
    command = [sys.executable, "-c", ASKS, user]
    starts = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(8)]
    for each in starts:
        assert each.stdout is not None
        assert each.stdout.readline() == "ready\n"
    for each in starts:
        assert each.stdin is not None
        each.stdin.write("go\n")
        each.stdin.flush()
    uids = [each.communicate(timeout=60)[0] for each in starts]
    assert set(uids) == {str(pwd.getpwnam(user).pw_uid)}
