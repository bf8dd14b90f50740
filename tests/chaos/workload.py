"""The workload of a chaos run, and the tables in which the database itself records every change."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import resource
import signal
import time
from collections.abc import Iterator
from typing import Any

import anyio
import anyio.lowlevel

from pgworkd import App, Job, PermanentError, Snooze
from tests.chaos.history import of_this_process

WITHOUT_DATABASE = "CHAOS_REMOTE"
"""In the environment of a run whose daemons have no database: nothing is written in job.transaction()."""
MAX_RUNNING = 3
"""The limit of the queue `limited`, over all daemons."""
TICK_S = 2
"""Interval of the recurring job."""
CLOCK_STEP_S = 10
"""Step of the database's clock, forward and back: longer than a lease."""
POOL_S_MAX = 10.0
ATTEMPTS_MAX = 50
"""High enough that no job of the workload ends dead because of failures."""
QUEUES = {"mixed": 15, "limited": 5, "process": 2, "block": 1, "probe": 2}
"""Slots of each daemon."""

AUDIT = f"""
    CREATE SCHEMA chaos;
    CREATE TABLE chaos.audit (
        seq bigint GENERATED ALWAYS AS IDENTITY, at timestamptz DEFAULT clock_timestamp(), job uuid, queue text,
        was text, became text, attempts int, failures int, losses int, worker int, dedupe_key text, occurrence text,
        due_in_s float8);
    CREATE INDEX ON chaos.audit (job);
    CREATE TABLE chaos.workers (id int, name text);
    CREATE TABLE chaos.effects (job uuid, attempt int);
    CREATE FUNCTION chaos.note_job() RETURNS trigger LANGUAGE plpgsql AS $$
    DECLARE
        j pgworkd.jobs := coalesce(NEW, OLD);
    BEGIN
        IF TG_OP = 'UPDATE' AND OLD.status = NEW.status AND OLD.attempts = NEW.attempts THEN
            IF NEW.status = 'running' THEN  -- passed on to another worker, in the transaction of the claim
                UPDATE chaos.audit SET worker = NEW.worker_id
                WHERE job = j.id AND attempts = j.attempts AND became = 'running';
            END IF;
            RETURN NULL;
        END IF;
        INSERT INTO chaos.audit (job, queue, was, became, attempts, failures, losses, worker, dedupe_key, occurrence,
                                 due_in_s)
        VALUES (j.id, j.queue, CASE WHEN TG_OP <> 'INSERT' THEN OLD.status END,
                CASE WHEN TG_OP <> 'DELETE' THEN NEW.status END, j.attempts, j.failures, j.losses,
                CASE WHEN TG_OP = 'UPDATE' THEN coalesce(NEW.worker_id, OLD.worker_id) ELSE j.worker_id END,
                j.dedupe_key, j.schedule || ' ' || j.occurrence, extract(epoch FROM j.run_at - clock_timestamp()));
        RETURN NULL;
    END $$;
    CREATE TRIGGER chaos_note AFTER INSERT OR DELETE OR UPDATE OF status, worker_id ON pgworkd.jobs
        FOR EACH ROW EXECUTE FUNCTION chaos.note_job();
    CREATE FUNCTION chaos.note_worker() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        INSERT INTO chaos.workers VALUES (NEW.id, NEW.name);
        RETURN NULL;
    END $$;
    CREATE TRIGGER chaos_note AFTER INSERT ON pgworkd.workers
        FOR EACH ROW EXECUTE FUNCTION chaos.note_worker();
    INSERT INTO pgworkd.queues (name, max_running) VALUES ('limited', {MAX_RUNNING});
"""  # noqa: S608 - a number of ours

app = App()


@contextlib.contextmanager
def recorded(job: Job, **facts: Any) -> Iterator[None]:
    """Records the start of a run, and its outcome, if it has one."""
    note = of_this_process()
    run = {"job": str(job.id), "attempt": job.attempt}
    note("start", **run, kind=job.kind, **facts)
    try:
        yield
    except BaseException as error:
        note("end", **run, how=type(error).__name__)
        raise
    note("end", **run, how="ok")


def result(job: Job) -> dict[str, int]:
    """A result that names its attempt."""
    return {"attempt": job.attempt}


@app.handler("plain", queue="mixed", concurrency=QUEUES["mixed"], max_attempts=ATTEMPTS_MAX, backoff=0.2)
async def plain(payload: dict[str, Any], job: Job) -> dict[str, int]:
    """Awaits for a while; raises in its first `fails` attempts, and snoozes in the first if `snoozes` is set."""
    with recorded(job, key=payload.get("key")):
        await anyio.sleep(payload.get("seconds", 0.0))
        if job.attempt <= payload.get("fails", 0):
            raise RuntimeError("as it was told to")
        if payload.get("snoozes") and job.attempt == 1:
            raise Snooze(0.3)
        if payload.get("hopeless"):
            raise PermanentError("as it was told to")
    return result(job)


@app.handler("transact", queue="mixed", concurrency=QUEUES["mixed"], max_attempts=ATTEMPTS_MAX, backoff=0.2)
async def transact(payload: dict[str, Any], job: Job) -> None:
    """Writes in job.transaction(): the row commits together with the completion."""
    with recorded(job):
        async with job.transaction() as connection:
            await connection.execute("INSERT INTO chaos.effects VALUES ($1, $2)", job.id, job.attempt)
            await anyio.sleep(payload.get("seconds", 0.0))
            job.result = result(job)


@app.handler("charge", queue="mixed", concurrency=QUEUES["mixed"], max_attempts=1)
async def charge(payload: dict[str, Any], job: Job) -> dict[str, int]:
    """Runs at most once (max_attempts=1)."""
    with recorded(job, key=payload.get("key")):
        await anyio.sleep(payload["seconds"])
    return result(job)


@app.handler("stubborn", queue="mixed", concurrency=QUEUES["mixed"], max_attempts=ATTEMPTS_MAX, backoff=0.2)
async def stubborn(payload: dict[str, Any], job: Job) -> dict[str, int]:
    """Takes a while to react to its cancellation."""
    with recorded(job, key=payload.get("key")):
        try:
            await anyio.sleep(payload["seconds"])
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.sleep(payload["seconds"] / 2)
    return result(job)


@app.handler("thread", queue="mixed", concurrency=QUEUES["mixed"], max_attempts=ATTEMPTS_MAX, backoff=0.2)
def thread(payload: dict[str, Any], job: Job) -> dict[str, int]:
    """Works in a thread, finishes even when stopped, and then calls job.done()."""
    with recorded(job):
        time.sleep(payload["seconds"])
        job.done(result(job))
    return result(job)


def _quietly() -> None:
    """In a child: it prints nothing, such as that its pipe is broken, as the daemon was killed."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


FORKS = ("terminated", "killed", "joined", "left", "pool")


@app.handler("forks", queue="mixed", concurrency=QUEUES["mixed"], max_attempts=ATTEMPTS_MAX, backoff=0.2)
def forks(payload: dict[str, Any], job: Job) -> dict[str, int]:
    """Forks children in a thread of the daemon; what befalls them, as the payload says, must not befall it.

    Finishes even when stopped, and then calls job.done().
    """
    context, how = multiprocessing.get_context("fork"), payload["how"]
    with recorded(job):
        if how == "pool":
            with context.Pool(2, _quietly) as pool:  # which is terminated
                pool.map_async(time.sleep, [payload["seconds"] / 4] * 4).get(POOL_S_MAX)
        else:
            child = context.Process(target=time.sleep, args=(payload["seconds"],))
            child.start()
            if how in ("terminated", "killed"):
                os.kill(child.pid or 0, signal.SIGTERM if how == "terminated" else signal.SIGKILL)
            if how != "left":
                child.join()
        job.done(result(job))
    return result(job)


@app.handler("stage", queue="mixed", concurrency=QUEUES["mixed"], max_attempts=ATTEMPTS_MAX, backoff=0.2)
async def stage(job: Job) -> dict[str, int]:
    """A job of a batch."""
    with recorded(job):
        await anyio.sleep(0.005)
    return result(job)


@app.handler("tick", queue="mixed", concurrency=QUEUES["mixed"], max_attempts=ATTEMPTS_MAX, backoff=0.2, every=TICK_S)
async def tick(job: Job) -> dict[str, int]:
    """A recurring job."""
    with recorded(job, occurrence=job.occurrence):
        await anyio.lowlevel.checkpoint()
    return result(job)


@app.handler("limited", concurrency=QUEUES["limited"], max_attempts=ATTEMPTS_MAX, backoff=0.2)
async def limited(payload: dict[str, Any], job: Job) -> dict[str, int]:
    """Runs under the limit of its queue."""
    with recorded(job):
        await anyio.sleep(payload["seconds"])
    return result(job)


@app.handler("block", concurrency=1, max_attempts=ATTEMPTS_MAX, backoff=0.2)
async def block(payload: dict[str, Any], job: Job) -> dict[str, int]:
    """Blocks the event loop of its daemon, as a careless handler does."""
    with recorded(job):
        time.sleep(payload["seconds"])  # noqa: ASYNC251 - that is the point
    return result(job)


@app.handler("probe", concurrency=QUEUES["probe"], max_attempts=ATTEMPTS_MAX, backoff=0.2)
async def probe(job: Job) -> dict[str, int]:
    """A probe that shows that jobs are running."""
    with recorded(job):
        await anyio.lowlevel.checkpoint()
    return result(job)


DEADLY = ("exit", "crash", "hoard")


@app.handler(
    "process", run_in="process", concurrency=QUEUES["process"], max_attempts=ATTEMPTS_MAX, backoff=0.2, timeout_s=20
)
def process(payload: dict[str, Any], job: Job) -> dict[str, int]:
    """Kills its process in the first attempt, in the way that the payload names."""
    with recorded(job):
        how = payload.get("how") if job.attempt == 1 else None
        if how == "exit":
            os._exit(3)
        if how == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        if how == "hoard":
            resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
            bytearray(1 << 31)
        time.sleep(payload.get("seconds", 0.0))
    return result(job)
