"""What a forked child has of its parent: each test is a program that forks."""

from __future__ import annotations

import subprocess
import sys

import pytest

BEGIN = """
import os, signal, socket, sys, threading, time
from pgworkd.process import forks

def in_child(look):
    pid = os.fork()
    if pid == 0:
        try:
            look()
        except BaseException:
            import traceback
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0

def is_blank(number):
    return os.fstat(number).st_rdev == os.stat(os.devnull).st_rdev

server = socket.create_server(("127.0.0.1", 0))
"""


def passes(text: str) -> None:
    done = subprocess.run([sys.executable, "-c", BEGIN + text], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr


def test_private_descriptors_lead_nowhere_in_the_child_only() -> None:
    passes("""
ours, theirs = socket.socketpair()
other = socket.create_connection(server.getsockname())
forks.keep_private(ours)
def look():
    assert is_blank(ours.fileno()) and not is_blank(other.fileno()) and not is_blank(server.fileno())
    assert not os.get_inheritable(ours.fileno())
    ours.close()
in_child(look)
ours.send(b"x")
assert theirs.recv(1) == b"x"
ours.close()
assert theirs.recv(1) == b"", "no child holds it open"
""")


def test_a_number_that_is_used_again_is_not_taken_for_the_old_one() -> None:
    passes("""
first = socket.socket()
number = first.fileno()
forks.keep_private(first)
first.close()
forks.keep_private(first)
forks.keep_private(None)
second = socket.socket()
assert second.fileno() == number
def look():
    assert not is_blank(number)
in_child(look)
""")


def test_children_of_children_and_many_at_once() -> None:
    passes("""
pairs = [socket.socketpair() for _ in range(50)]
for ours, _ in pairs:
    forks.keep_private(ours)
def look():
    assert all(is_blank(ours.fileno()) for ours, _ in pairs)
    own = socket.socket()
    forks.keep_private(own)
    def below():
        assert is_blank(own.fileno())
    in_child(below)
    assert not is_blank(own.fileno())
in_child(look)
threads = [threading.Thread(target=in_child, args=(look,)) for _ in range(5)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
""")


def test_it_works_where_all_descriptors_are_used_up() -> None:
    passes("""
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
ours, theirs = socket.socketpair()
forks.keep_private(ours)
held = []
try:
    while True:
        held.append(open(os.devnull))
except OSError:
    pass
def look():
    assert is_blank(ours.fileno())
in_child(look)
""")


def test_a_connection_that_is_being_opened_is_private_before_it_is_named() -> None:
    """Another one, of the application, is not: neither one to another place, nor one that was there before."""
    passes("""
place = server.getsockname()
elsewhere = socket.create_server(("127.0.0.1", 0))
old = socket.create_connection(place)
with forks.opening():
    ours = socket.create_connection(place)
    forks.keep_private(ours, opened=True)
with forks.opening(), forks.opening():
    new = socket.create_connection(place)
    other = socket.create_connection(elsewhere.getsockname())
    pair, _ = socket.socketpair()
    connecting = socket.socket()
    connecting.setblocking(False)
    connecting.connect_ex(("192.0.2.1", 9))
    def look():
        blank = {n: is_blank(s.fileno()) for n, s in globals().items() if isinstance(s, socket.socket)}
        assert [name for name, is_it in blank.items() if is_it and name != "connecting"] == ["ours", "new"], blank
    in_child(look)
def after():
    assert not is_blank(new.fileno())
in_child(after)
""")


def test_a_connection_that_was_lost_at_once_takes_no_pipe_with_it() -> None:
    """It has no address any more; a pipe has none, either."""
    passes("""
import struct
with forks.opening():
    ours = socket.create_connection(server.getsockname())
    theirs, _ = server.accept()
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    theirs.close()
    while True:
        try:
            ours.getpeername()
        except OSError:
            break
    forks.keep_private(ours, opened=True)
with forks.opening():
    read, write = os.pipe()
    def look():
        assert not is_blank(read) and not is_blank(write)
    in_child(look)
""")


def test_signals_have_their_default_action_where_the_handler_was_ours() -> None:
    passes("""
def ours(*_): ...
def of_the_application(*_): ...
signal.signal(signal.SIGTERM, ours)
signal.signal(signal.SIGINT, ours)
signal.signal(signal.SIGHUP, ours)
signal.signal(signal.SIGUSR1, of_the_application)
forks.handle_signals(signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
signal.signal(signal.SIGHUP, of_the_application)
read, write = os.pipe()
os.set_blocking(write, False)
signal.set_wakeup_fd(write)
def look():
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.getsignal(signal.SIGHUP) is of_the_application
    assert signal.getsignal(signal.SIGUSR1) is of_the_application
    assert signal.set_wakeup_fd(-1) == -1
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == set()
in_child(look)
thread = threading.Thread(target=in_child, args=(look,))
thread.start()
thread.join()
assert signal.getsignal(signal.SIGTERM) is ours
assert signal.set_wakeup_fd(-1) == write
assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == set()
""")


def test_a_host_s_signals_stay_what_they_are_and_its_descriptors_do_not() -> None:
    passes("""
def of_the_host(*_): ...
signal.signal(signal.SIGTERM, of_the_host)
ours, theirs = socket.socketpair()
forks.keep_private(ours)
read, write = os.pipe()
os.set_blocking(write, False)
signal.set_wakeup_fd(write)
def look():
    assert signal.getsignal(signal.SIGTERM) is of_the_host
    assert signal.set_wakeup_fd(-1) == write
    assert is_blank(ours.fileno())
in_child(look)
""")


def test_a_signal_right_after_the_fork_is_for_the_child() -> None:
    passes("""
heard = []
signal.signal(signal.SIGTERM, lambda *_: heard.append(1))
forks.handle_signals(signal.SIGTERM)
for _ in range(60):
    pid = os.fork()
    if pid == 0:
        time.sleep(10)
        os._exit(7)
    os.kill(pid, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGTERM
assert heard == []
""")


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_only_the_program_that_is_executed_keeps_the_liveness_pipe(loop: str) -> None:
    """Handlers fork while it is started: in a thread, and in the loop."""
    text = """
import anyio, signal
from pgworkd.engine.run import liveness_pipe

read, write = os.pipe()
forks.keep_private(read)
os.environ[liveness_pipe.VARIABLE] = str(write)
liveness_pipe.hold()
leads_to, forked = os.fstat(write), []

def fork():
    began, begins = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(begins, b"x")
        time.sleep(60)
        os._exit(0)
    forked.append(pid)
    os.read(began, 1)

async def fork_in_loop():
    fork()
    await anyio.sleep(0)
    fork()

def holds(pid):
    return any(os.path.samestat(os.stat(each), leads_to) for each in os.scandir(f"/proc/{pid}/fd"))

async def main():
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(fork_in_loop)
        with liveness_pipe.passed_on() as more:
            thread = threading.Thread(target=fork)
            thread.start()
            thread.join()
            program = await anyio.open_process(["sleep", "60"], **more)
        tasks.start_soon(fork_in_loop)
    try:
        assert len(forked) == 5 and not any(map(holds, forked))
        assert holds(program.pid)
    finally:
        for pid in [*forked, program.pid]:
            os.kill(pid, signal.SIGKILL)

anyio.run(main, backend_options={"use_uvloop": LOOP})
"""
    passes(text.replace("LOOP", str(loop == "uvloop")))
