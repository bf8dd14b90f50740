"""Streams that never block and never fail: each test is a program with an odd reader."""

from __future__ import annotations

import fcntl
import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from pgworkd.process import output

INSTALLED = """
import os, sys, time
from pgworkd.process import output
output.open_missing()
output.install()
def told(stream, count):
    sys.stderr.write(f"dropped {count}\\n")
output.on_recovery = told
"""
LINE = "x" * 99


def program(text: str, **streams: Any) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", INSTALLED + text], **streams)


def small_pipe() -> tuple[int, int]:
    read, write = os.pipe()
    fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, 4096)
    return read, write


def all_of(descriptor: int) -> bytes:
    with os.fdopen(descriptor, "rb") as file:
        return file.read()


def test_a_reader_that_is_stuck_costs_no_time_and_learns_what_it_missed() -> None:
    read, write = small_pipe()
    text = f"""
began = time.monotonic()
for n in range(30_000):
    print("{LINE}", file=sys.stderr)
took = time.monotonic() - began
print(took)
sys.stdin.read()
print("after", file=sys.stderr)
"""
    process = program(text, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=write)
    os.close(write)
    assert process.stdin is not None
    assert process.stdout is not None
    assert float(process.stdout.readline()) < 5, "3 MB, of which the pipe takes 4 kB"
    process.stdin.close()
    lines = all_of(read).decode().splitlines()
    process.stdout.close()
    assert process.wait() == 0
    dropped = [int(line.split()[1]) for line in lines if line.startswith("dropped")]
    whole = [line for line in lines if line == LINE]
    assert len(dropped) == 1
    assert len(whole) + dropped[0] == 30_000
    assert len(whole) * 100 > output.BUFFER_BYTES * 0.9
    assert len(lines) == len(whole) + 2
    assert "after" in lines


@pytest.mark.parametrize("state", ["broken", "full", "stuck"])
def test_what_cannot_be_written_fails_nothing_and_the_end_comes_in_time(state: str) -> None:
    read, write = small_pipe()
    if state == "broken":
        os.close(read)
    if state == "full":
        os.close(write)
        write = os.open("/dev/full", os.O_WRONLY)
    began = time.monotonic()
    text = (
        f'for n in range(1000):\n    print("{LINE}", flush=True)\n    print("{LINE}", file=sys.stderr)\nsys.exit(3)\n'
    )
    process = program(text, stdout=write, stderr=write)
    assert process.wait(20) == 3
    assert time.monotonic() - began < output.LAST_S + 3
    os.close(write)
    if state != "broken":
        os.close(read)


def test_what_was_printed_last_arrives_also_from_exit_hooks() -> None:
    text = 'import atexit\natexit.register(print, "hook")\nprint("last")\n'
    process = program(text, stdout=subprocess.PIPE)
    assert process.communicate()[0].split() == [b"last", b"hook"]


def test_a_reader_that_comes_back_gets_the_lines_again(tmp_path: Path) -> None:
    path = tmp_path / "fifo"
    os.mkfifo(path)
    read = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    write = os.open(path, os.O_WRONLY)
    text = """
for line in sys.stdin:
    print(line, end="", file=sys.stderr)
    while line == "two\\n" and not output.is_broken("stderr"):
        time.sleep(0.01)
    print("printed")
"""
    process = program(text, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=write, bufsize=0)
    os.close(write)
    os.set_blocking(read, True)
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(b"one\n")
    assert os.read(read, 100) == b"one\n"
    os.close(read)
    process.stdin.write(b"two\n")
    assert [process.stdout.readline() for _ in range(2)] == [b"printed\n"] * 2
    read = os.open(path, os.O_RDONLY)
    process.stdin.write(b"three\n")
    process.stdin.close()
    assert all_of(read) == b"two\nthree\n"
    process.stdout.close()
    assert process.wait() == 0


@pytest.mark.slow("three processes that write 9,000 lines through a small pipe")
def test_lines_of_several_processes_are_not_torn_in_a_full_pipe() -> None:
    read, write = small_pipe()
    text = f"""
import json
for n in range(3000):
    print(json.dumps([n, "{LINE}"]), file=sys.stderr)
    if n % 100 == 0:
        time.sleep(0.01)
output.drain(30)
"""
    processes = [program(text, stderr=write) for _ in range(3)]
    os.close(write)
    received = b""
    with os.fdopen(read, "rb", buffering=0) as file:
        while piece := file.read(1000):  # slowly, so that the pipe is full
            received += piece
    assert [process.wait() for process in processes] == [0, 0, 0]
    lines = [json.loads(line) for line in received.splitlines()]
    assert len(lines) == 9000


def test_a_pipe_that_another_program_has_made_non_blocking_loses_nothing() -> None:
    read, write = small_pipe()
    os.set_blocking(write, False)
    process = program(f'for n in range(500):\n    print("{LINE}")\noutput.drain(30)\n', stdout=write)
    os.close(write)
    assert all_of(read).decode().splitlines() == [LINE] * 500
    assert process.wait() == 0


@pytest.mark.slow("children that wait for a reader")
def test_a_forked_child_prints_what_is_its_own_and_waits_for_nobody() -> None:
    text = """
print("parent")
if os.fork() == 0:
    print("child")
    os._exit(0)
os.wait()
output.drain()
"""
    process = program(text, stdout=subprocess.PIPE)
    assert sorted(process.communicate()[0].split()) == [b"child", b"parent"]
    read, write = small_pipe()
    stuck = """
for n in range(1000):
    print("x" * 99, flush=True)
if os.fork() == 0:
    began = time.monotonic()
    for n in range(1000):
        print("x" * 99, flush=True)
    os._exit(0 if time.monotonic() - began < 5 else 7)
sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
"""
    assert program(stuck, stdout=write).wait(30) == 0
    os.close(read)
    os.close(write)


def test_a_child_may_redirect_its_streams(tmp_path: Path) -> None:
    text = f"""
if os.fork() == 0:
    os.dup2(os.open({str(tmp_path / "other")!r}, os.O_WRONLY | os.O_CREAT), 1)
    print("child")
    os._exit(0)
os.wait()
"""
    assert program(text, stdout=subprocess.PIPE).communicate()[0] == b""
    assert (tmp_path / "other").read_text() == "child\n"


def test_it_is_a_stream_like_any_other() -> None:
    text = """
assert sys.stdout.fileno() == 1 and sys.stderr.fileno() == 2
assert not sys.stdout.isatty() and sys.stdout.writable() and not sys.stdout.closed
assert sys.stdout.encoding == "utf-8", sys.stdout.encoding
print("a", "b", sep=",")
print("no newline", end="", flush=True)
sys.stdout.buffer.write(b"\\0bytes\\n")
print("\\udc80")
sys.stdout.close()
sys.stderr.close()
os.close(1)
print("after closing")
sys.stdout.writelines(["more\\n"])
"""
    process = program(text, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, "PYTHONUTF8": "1"})
    out, err = process.communicate()
    assert err == b""
    assert out == b"a,b\nno newline\0bytes\n\\udc80\nafter closing\nmore\n"


def test_a_terminal_stays_one() -> None:
    master, slave = os.openpty()
    text = "print(sys.stdout.isatty(), sys.stderr.isatty())\n"
    process = program(text, stdout=slave, stderr=slave)
    os.close(slave)
    assert process.wait() == 0
    assert os.read(master, 100) == b"True True\r\n"
    os.close(master)


def test_descriptors_that_were_closed_are_no_sockets_and_are_handed_on() -> None:
    text = """
import socket, subprocess
made = [socket.socket() for _ in range(3)]
assert min(each.fileno() for each in made) > 2
print("nowhere"); print("nowhere", file=sys.stderr)
done = subprocess.run([sys.executable, "-c", "import os; [os.fstat(n) for n in (0, 1, 2)]"])
os._exit(done.returncode)
"""
    command = ["sh", "-c", 'exec "$@" 0<&- 1>&- 2>&-', "sh", sys.executable, "-c", INSTALLED + text]
    assert subprocess.run(command, check=False).returncode == 0


def test_a_file_that_reached_its_limit_loses_lines_only(tmp_path: Path) -> None:
    """As a disk that is full."""
    path = tmp_path / "log"
    text = f"""
import resource
for n in range(100):
    print("{LINE}")
output.drain()
assert output.is_broken("stdout")
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
print("room")
while output.is_broken("stdout"):
    time.sleep(0.01)
"""
    with path.open("wb") as file:
        before = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.RLIM_INFINITY))  # noqa: E731
        assert program(text, stdout=file, preexec_fn=before).wait(20) == 0
    assert path.read_text().splitlines() == [LINE] * 100 + ["room"]


def test_a_thread_that_cannot_be_started_is_done_without() -> None:
    text = """
import threading
def no(self): raise RuntimeError("can't start new thread")
threading.Thread.start = no
print("written")
"""
    assert program(text, stdout=subprocess.PIPE).communicate()[0] == b"written\n"


@pytest.mark.slow("processes that have to end, each beside a reader that is gone or stuck")
@pytest.mark.parametrize("form", ["json", None])
@pytest.mark.parametrize("state", ["read", "about to write", "stuck", "broken", "the log hangs"])
def test_a_process_that_has_to_end_ends_whatever_becomes_of_its_last_words(state: str, form: str | None) -> None:
    read, write = small_pipe()
    if state == "broken":
        os.close(read)
    text = f"""
import structlog
from pgworkd.engine.life.heartbeat import end_process
from pgworkd import log
if {form!r}:
    log.configure("info", {form!r})
if {state!r} == "the log hangs":
    log.tell = lambda *_, **__: time.sleep(60)
if {state!r} == "stuck":
    for n in range(1000):
        print("{LINE}", file=sys.stderr)
if {state!r} == "about to write":  # the thread has taken the line, and is not given the processor
    room = output._Sink._room
    output._Sink._room = lambda self: (time.sleep(0.02), room(self))[1]
with open("/proc/self/fd/1", "w") as told:
    told.write(str(time.monotonic()))
end_process("the test is over")
"""
    process = program(text, stdout=subprocess.PIPE, stderr=write)
    os.close(write)
    assert process.stdout is not None
    began = float(process.stdout.read())
    assert time.monotonic() - began < 0.8, "the lease is about to expire"
    process.stdout.close()
    assert process.wait(20) == 1
    if state != "broken":
        said = all_of(read).decode()
        if state in ("read", "about to write") and form:
            assert json.loads(said)["event"] == "daemon.aborted"
            assert json.loads(said)["reason"] == "the test is over"
        elif state in ("read", "about to write"):
            assert said == "pgworkd: daemon.aborted reason=the test is over\n"


@pytest.mark.slow("hundreds of signals in the middle of prints")
def test_a_signal_handler_and_a_finaliser_may_print_in_the_middle_of_a_print() -> None:
    text = """
import signal, threading
def handler(*_): print("h" * 50)
signal.signal(signal.SIGUSR1, handler)
class Finalised:
    def __init__(self): self.me = self
    def __del__(self): print("f" * 50)
def kick():
    for _ in range(300):
        os.kill(os.getpid(), signal.SIGUSR1); time.sleep(0.0005)
thread = threading.Thread(target=kick); thread.start()
while thread.is_alive():
    Finalised(); print("p" * 50)
"""
    process = program(text, stdout=subprocess.PIPE)
    out = process.communicate(timeout=30)[0]
    assert process.returncode == 0
    assert {line[:1] for line in out.splitlines()} >= {b"h", b"p"}
    assert process.returncode != -signal.SIGSEGV
