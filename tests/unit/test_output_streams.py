"""Two streams that are one pipe, and streams that the application has replaced, and left behind at the end."""

from __future__ import annotations

import os
import subprocess
import time

import pytest

from pgworkd.process import output

from .test_output import all_of, program, small_pipe

LEFT = {
    "a full disk": " = open('/dev/full', 'w'); sys.{name}.write('lost')",
    "a pipe without a reader": (
        " = os.fdopen(os.pipe()[1], 'w'); os.close(sys.{name}.fileno() - 1); sys.{name}.write('lost')"
    ),
    "an object that raises": " = type('', (), {{'flush': lambda self: 1 / 0}})()",
    "an object without flush": " = 1",
    "nothing": " = None",
    "closed": ".close()",
}


@pytest.mark.parametrize("name", ["stdout", "stderr"])
@pytest.mark.parametrize("left", LEFT)
def test_a_stream_that_the_application_has_left_behind_changes_no_exit_code(name: str, left: str) -> None:
    process = program(f"sys.{name}{LEFT[left].format(name=name)}\nsys.exit(3)\n")
    assert process.wait() == 3


def test_long_lines_of_two_streams_are_not_torn_in_one_full_pipe() -> None:
    read, write = small_pipe()
    text = """
for n in range(90):
    sys.stderr.write("a" * 9999 + chr(10))
    print("b" * 99)
    time.sleep(0.005)
output.drain(30)
"""
    process = program(text, stdout=write, stderr=write)
    os.close(write)
    received = b""
    with os.fdopen(read, "rb", buffering=0) as file:
        while piece := file.read(1000):
            received += piece
            time.sleep(0.0005)
    assert process.wait() == 0
    assert sorted(received.splitlines()) == [b"a" * 9999] * 90 + [b"b" * 99] * 90


def test_a_line_that_was_begun_is_in_the_middle_of_no_other() -> None:
    read, write = os.pipe()
    text = """
log = output.line_writer()
sys.stderr.write("\\rhalf")
sys.stderr.flush()
log("event 1")
print(" and whole", file=sys.stderr)
print("not ended", end="", file=sys.stderr, flush=True)
log("event 2")
output.end_lines()
log("event 3")
for _ in range(3):
    print("." * 1000, end="", file=sys.stderr, flush=True)
output.say("event 4\\n")
print("left", end="", file=sys.stderr)
"""
    process = program(text, stderr=write)
    os.close(write)
    lines = all_of(read).decode().split("\n")
    assert process.wait() == 0
    ended = ["event 1", "\rhalf and whole", "event 2", "not ended", "event 3", "event 4", "." * 3000 + "left", ""]
    assert lines == ended, "the parent logs after the end"


def test_a_print_at_the_very_end_is_written_though_no_thread_is_left_to_do_so() -> None:
    read, write = os.pipe()
    text = """
import threading
sink = output._sinks["stdout"]
lock = sink._lock

class Late:  # the end of the program comes in the middle of a print
    def __enter__(self):
        sink._lock = lock
        ending = threading.Thread(target=output.write_directly, args=(10.0,))
        ending.start()
        ending.join()
        lock.acquire()

    def __exit__(self, *_):
        lock.release()

for printed in ("begun", " and left"):
    sink._lock = Late()
    print(printed, end="", flush=True)
os._exit(0)
"""
    process = program(text, stdout=write)
    os.close(write)
    assert all_of(read) == b"begun and left"
    assert process.wait() == 0


def test_each_stream_of_a_stuck_pipe_tells_what_it_dropped() -> None:
    (read, write), (printed, tell) = small_pipe(), os.pipe()
    text = f"""
def told(stream, count):
    output.line_writer()(f"dropped {{count}} {{'.' * 200}}")
output.on_recovery = told
for stream in (sys.stdout, sys.stderr):
    for n in range(20_000):
        print("." * 99, file=stream)
os.close({tell})
sys.stdin.read()
for sink in output._sinks.values():
    sink.drain(time.monotonic() + 30)
"""
    process = program(text, stdin=subprocess.PIPE, stdout=write, stderr=write, pass_fds=(tell,))
    os.close(write)
    os.close(tell)
    assert all_of(printed) == b""
    assert process.stdin is not None
    process.stdin.close()
    lines = all_of(read).decode().splitlines()
    assert process.wait() == 0
    dropped = [int(line.split()[1]) for line in lines if line.startswith("dropped")]
    assert len(lines) - len(dropped) + sum(dropped) == 40_000


def test_what_never_ends_a_line_takes_no_more_memory_than_the_buffer() -> None:
    read, write = os.pipe()
    text = """
for _ in range(3 * output.BUFFER_BYTES // 10_000):
    print("." * 10_000, end="", flush=True)
    if len(output._sinks["stdout"]._begun) > output.BUFFER_BYTES:
        os._exit(3)
    output._sinks["stdout"].drain(time.monotonic() + 10)
"""
    process = program(text, stdout=write)
    os.close(write)
    assert all_of(read) == b"." * (3 * output.BUFFER_BYTES // 10_000 * 10_000) + b"\n"
    assert process.wait() == 0


def test_a_terminal_shows_what_is_printed_at_once() -> None:
    master, slave = os.openpty()
    process = program('print("50 %", end="", flush=True)\nsys.stdin.read()\n', stdin=subprocess.PIPE, stdout=slave)
    os.close(slave)
    assert os.read(master, 100) == b"50 %"
    process.communicate()
    assert process.wait() == 0
    os.close(master)
