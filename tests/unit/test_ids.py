"""Ids that a client draws rise within its process, and no two are equal."""

from __future__ import annotations

import itertools
import os
import threading
import time
from uuid import UUID

import pytest

from pgworkd.client.new_job import new_ids


def test_ids_increase_even_when_the_clock_is_set_back(monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time_ns()
    clock = itertools.chain([now] * 500, [now - 600 * 10**9] * 500, [now + 10**7] * 500)
    monkeypatch.setattr(time, "time_ns", lambda: next(clock))
    drawn = [number for _ in range(1500) for number in new_ids(3)]
    assert drawn == sorted(set(drawn))
    assert {(UUID(int=number).version, UUID(int=number).variant) for number in drawn} == {
        (7, UUID(int=drawn[0]).variant)
    }


def test_ids_increase_in_each_thread_and_are_unique() -> None:
    drawn = [list[int]() for _ in range(8)]

    def draw(into: list[int]) -> None:
        for _ in range(2000):
            into += new_ids(2)

    threads = [threading.Thread(target=draw, args=(into,)) for into in drawn]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(each == sorted(each) for each in drawn)
    assert len(set(itertools.chain(*drawn))) == 8 * 4000


def test_a_forked_process_does_not_repeat_its_parents_ids() -> None:
    place = new_ids(1)[0]
    read_end, write_end = os.pipe()
    if not (pid := os.fork()):
        os.write(write_end, new_ids(1)[0].to_bytes(16, "big"))
        os._exit(0)
    os.waitpid(pid, 0)
    child = int.from_bytes(os.read(read_end, 16), "big")
    os.close(read_end)
    os.close(write_end)
    assert abs(child - place) > 1 << 31
