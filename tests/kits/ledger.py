"""An application that keeps a ledger of its own: a line in one file, before and after whatever each handler does."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import NamedTuple

APP = """
import asyncio, os, time

from pgworkd import App, Job, PermanentError, Snooze

app = App()
LEDGER = os.open(os.environ["LEDGER"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)


def note(*words):
    os.write(LEDGER, (" ".join(map(str, (os.environ["LIFE"], time.time(), *words))) + "\\n").encode())


def handler(kind, run_s, **options):
    def add(end):
        async def run(job: Job):
            note("begin", kind, job.id, job.attempt)
            await asyncio.sleep(run_s)
            outcome, error = end(job)
            note(outcome, kind, job.id, job.attempt)
            if error is not None:
                raise error

        run.__qualname__ = kind
        app.handler(kind, **options)(run)

    return add


handler("fast", 0.0, queue="q", concurrency=20)(lambda _: ("completed", None))
handler("slow", 0.7, queue="s", concurrency=20)(lambda _: ("completed", None))
handler("flaky", 0.01, queue="q", backoff=[0.2])(
    lambda job: ("failed", ValueError("once")) if job.failures == 0 else ("completed", None)
)
handler("bad", 0.01, queue="q", max_attempts=1)(lambda _: ("dead", PermanentError("no")))
handler("later", 0.01, queue="q")(lambda job: ("released", Snooze(0.5)) if job.attempt == 1 else ("completed", None))
"""
KINDS = ("fast", "slow", "flaky", "bad", "later")
QUEUES = {"slow": "s"}
"""The queue of a kind, unless it is q."""
OUTCOMES = ("completed", "failed", "dead", "released")


class Line(NamedTuple):
    """A line. `life`: of which process; `what`: begin, or the outcome of the attempt."""

    life: str
    at: float
    what: str
    kind: str
    job: str
    attempt: int


def lines(path: Path) -> list[Line]:
    """All lines so far."""
    words = [line.split() for line in path.read_text().splitlines()]
    return [Line(life, float(at), what, kind, job, int(attempt)) for life, at, what, kind, job, attempt in words]


def counted(found: list[Line], life: str, until: float = float("inf")) -> Counter[tuple[str, str]]:
    """How many lines a life has written until then, by what and kind."""
    return Counter((line.what, line.kind) for line in found if line.life == life and line.at <= until)
