"""Commands from the process that has imported their libraries are what Python would have started."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.kits import warm

PROBE = """
import json, os, signal, sys, threading
facts = {
    "argv": sys.argv, "given": sys.orig_argv, "path": sys.path, "cwd": os.getcwd(), "environ": dict(os.environ),
    "main": [__name__, __package__, __spec__.name, sys.modules["__main__"].__dict__ is globals()],
    "ours": [name for name in sys.modules if name.startswith(("pgworkd", "tests"))],
    "leads": os.getsid(0) == os.getpid() == os.getpgid(0), "threads": threading.active_count(),
    "signals": [str(signal.getsignal(number)) for number in signal.valid_signals()],
    "mask": len(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    "streams": [(each.encoding, each.errors, each.line_buffering, each.write_through, each.fileno(), each.newlines)
                for each in (sys.stdin, sys.stdout, sys.stderr)],
    "open": len(os.listdir("/proc/self/fd")), "umask": os.umask(0), "in": sys.stdin.read(),
}
print(json.dumps(facts, default=str))
print("said", file=sys.stderr)
how = sys.argv[1]
if how == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
if how == "raise":
    raise ValueError("told")
sys.exit({"code": 3, "text": "the reason"}.get(how))
"""


@pytest.mark.parametrize("new_session", [False, True])
@pytest.mark.parametrize("how", ["return", "code", "text", "kill", "raise"])
def test_a_command_is_the_same(tmp_path: Path, how: str, new_session: bool) -> None:
    (tmp_path / "probe.py").write_text(PROBE)

    def run(popen: Any) -> Any:
        process = popen(
            [sys.executable, "-m", "probe", how],
            cwd=tmp_path,
            env=os.environ | {"MORE": "is set"},
            start_new_session=new_session,
            **dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE),
            text=True,
        )
        stdout, stderr = process.communicate("typed", timeout=30)
        facts = json.loads(stdout) if stdout else None
        return process.returncode, facts, [line for line in stderr.splitlines() if not line.startswith("  ")]

    found = run(warm.Popen)
    assert found == run(subprocess.Popen)
    assert found[1] is None or found[1]["in"] == "typed"


def test_it_is_waited_for_and_signalled_like_a_child(tmp_path: Path) -> None:
    (tmp_path / "stays.py").write_text("import time\nprint('here', flush=True)\ntime.sleep(60)\n")
    with warm.Popen([sys.executable, "-m", "stays"], cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "here\n"
        assert process.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.05)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == process.poll() == -signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)
