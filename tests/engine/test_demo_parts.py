"""The parts of `pgworkd demo`: file selection, OCR, the downstream, the terminal."""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import AsyncIterator
from itertools import combinations
from pathlib import Path

import anyio
import pytest

from pgworkd.demo import jobs
from pgworkd.demo.downstream import Answer, Downstream, post
from pgworkd.demo.view import Tally, printable
from pgworkd.errors import PermanentError


def test_only_readable_text_files_are_used(tmp_path: Path) -> None:
    wanted = [tmp_path / "a.txt", tmp_path / "deep" / "b.md"]
    unwanted = ("zero", ".hidden", ".git/config", "node_modules/x.js", "data/pgdata/PG_VERSION", "data/password")
    for path in [*wanted, *(tmp_path / name for name in unwanted)]:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("" if path.name == "zero" else "some text")
    (tmp_path / "binary").write_bytes(b"a\0b")
    (tmp_path / "huge").write_bytes(b"x" * (jobs.FILE_BYTES_MAX + 1))
    (tmp_path / "link").symlink_to(wanted[0])
    (tmp_path / "name-\udcff").write_text("its name is not UTF-8")
    os.mkfifo(tmp_path / "fifo")
    assert [path for path, _ in jobs.text_files(tmp_path)] == wanted
    assert jobs.text_files(tmp_path, deep=False) == [(wanted[0], 9)]
    assert jobs.text_files(tmp_path / "gone") == []


def test_a_missing_file_is_a_permanent_error_and_invalid_bytes_are_not(tmp_path: Path) -> None:
    with pytest.raises(PermanentError, match="No such file"):
        jobs.read_text(str(tmp_path / "gone"))
    (tmp_path / "odd").write_bytes(b"caf\xe9 \xff\xfe bar")
    assert jobs.embedding_of(jobs.read_text(str(tmp_path / "odd")))[0] == 2


def test_text_without_words_has_the_zero_vector() -> None:
    assert jobs.embedding_of("-- !!") == (0, [0.0] * 256)


def test_every_drawn_text_is_recognised_without_noise() -> None:
    rng = random.Random(1)  # noqa: S311
    for mark in jobs.FONT:
        assert jobs.recognise(jobs.draw(mark * 3, rng, noise=0), 3) == mark * 3
    for _ in range(50):
        text = "".join(rng.choices(list(jobs.FONT), k=rng.randint(1, 24)))
        assert jobs.recognise(jobs.draw(text, rng, noise=0), len(text)) == text


def test_some_noise_is_tolerated_and_too_much_is_not() -> None:
    def share_wrong(noise: float) -> float:
        rng = random.Random(2)  # noqa: S311
        wrong = 0
        for _ in range(40):
            text = "".join(rng.choices(list(jobs.FONT), k=10))
            read = jobs.recognise(jobs.draw(text, rng, noise), 10)
            wrong += sum(a != b for a, b in zip(text, read, strict=True))
        return wrong / 400

    assert share_wrong(jobs.NOISE) < 0.05
    assert share_wrong(0.5) > 0.8  # it recognises glyphs and does not know the text


def test_the_glyphs_differ() -> None:
    shapes = [tuple(rows) for rows in jobs.FONT.values()]
    assert all(len(rows) == jobs.HEIGHT and max(rows) < 32 for rows in shapes)
    for one, other in combinations(shapes, 2):
        assert sum((a ^ b).bit_count() for a, b in zip(one, other, strict=True)) >= 2


@contextlib.asynccontextmanager
async def serving(*moods: str, slow_s: float = 30.0) -> AsyncIterator[Downstream]:
    downstream = Downstream(iter(moods), slow_s)
    async with anyio.create_task_group() as tasks:
        await tasks.start(downstream.serve)
        with anyio.fail_after(10):
            yield downstream
        tasks.cancel_scope.cancel()


async def test_the_downstream_responds_according_to_its_mood() -> None:
    async with serving("ok", "busy", "broken", "ok") as downstream:
        answers: list[Answer] = [await post(downstream.port, "/x", b"{}", key) for key in ("a", "b", "c", "a")]
    assert [answer.status for answer in answers] == [200, 429, 500, 200]
    assert answers[1].headers["retry-after"] == "1"
    assert downstream.accepted == {"a"}
    assert downstream.answered == {"ok": 2, "busy": 1, "broken": 1}


async def test_a_slow_response_that_the_client_abandons_has_no_effect() -> None:
    async with serving("slow", "ok") as downstream:
        with anyio.move_on_after(0.02) as patience:
            await post(downstream.port, "/x", b"{}", "late")
        assert patience.cancelled_caught
        while not downstream.answered:
            await anyio.sleep(0.001)
        assert downstream.answered == {"slow": 1}
        assert downstream.accepted == set()


async def test_a_slow_response_reaches_a_waiting_client() -> None:
    async with serving("slow", slow_s=0.01) as downstream:
        assert (await post(downstream.port, "/x", b"{}", "patient")).status == 200
        assert downstream.accepted == {"patient"}


@pytest.mark.parametrize(
    "request_text",
    [
        b"nonsense\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: 0\r\n\r\n",  # no key
        b"POST / HTTP/1.1\r\nIdempotency-Key: k\r\nContent-Length: -1\r\n\r\n",
        b"POST / HTTP/1.1\r\nIdempotency-Key: k\r\nContent-Length: 99999999\r\n\r\n",
        b"POST / HTTP/1.1\r\nX: " + b"x" * 10_000,
    ],
)
async def test_the_downstream_refuses_malformed_requests(request_text: bytes) -> None:
    async with serving("ok") as downstream:
        async with await anyio.connect_tcp("127.0.0.1", downstream.port) as stream:
            await stream.send(request_text)
            assert (await stream.receive()).startswith(b"HTTP/1.1 400 ")
        assert downstream.answered == {"bad": 1}
        assert (await post(downstream.port, "/x", b"{}", "next")).status == 200


@pytest.mark.parametrize("answer", [b"", b"SSH-2.0-OpenSSH\r\n\r\n", b"HTTP/1.1 2", b"HTTP/1.1 abc\r\n\r\n"])
async def test_an_invalid_http_response_is_a_connection_error(answer: bytes) -> None:
    async def talk(stream: anyio.abc.SocketStream) -> None:
        async with stream:
            await stream.receive()
            if answer:
                await stream.send(answer)

    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener, anyio.create_task_group() as tasks:
        port = listener.extra(anyio.abc.SocketAttribute.local_port)  # noqa: S610
        tasks.start_soon(listener.serve, talk)
        with pytest.raises(ConnectionError, match="the downstream"):
            await post(port, "/x", b"{}", "k")
        tasks.cancel_scope.cancel()


async def test_displayed_text_cannot_control_the_terminal() -> None:
    assert printable("a\x1b[2Jb\n") == "a\\x1b[2Jb\\x0a"
    tally = Tally()
    facts = {"queue": "ocr", "kind": "\x1b]0;x\x07", "attempt": 1, "error": "line\nbreak"}
    tally("job.failed", facts)
    assert tally.latest[0].isprintable()
    assert tally.retries == {"ocr": 1}
