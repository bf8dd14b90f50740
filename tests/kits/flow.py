"""Serialize keys and limits in SQL: claims, limited queues, and an audit trigger for every change of status."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from datetime import datetime
from typing import Any, NamedTuple

from tests.kits.verbs import Db, claim, complete

AUDIT = """
    CREATE TABLE public.audit (n bigserial PRIMARY KEY, job uuid, attempt int, queue text, key text, old text, new text,
                               run_at timestamptz, started_at timestamptz);
    CREATE FUNCTION public.audit() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        IF TG_OP = 'DELETE' THEN
            INSERT INTO public.audit (job, attempt, queue, key, old, new, run_at, started_at)
            VALUES (OLD.id, OLD.attempts, OLD.queue, OLD.serialize_key, OLD.status, 'gone', OLD.run_at, OLD.started_at);
        ELSIF TG_OP = 'INSERT' OR NEW.status <> OLD.status THEN
            INSERT INTO public.audit (job, attempt, queue, key, old, new, run_at, started_at)
            VALUES (NEW.id, NEW.attempts, NEW.queue, NEW.serialize_key,
                    CASE WHEN TG_OP = 'UPDATE' THEN OLD.status END, NEW.status, NEW.run_at, NEW.started_at);
        END IF;
        RETURN NULL;
    END $$;
    CREATE TRIGGER audit AFTER INSERT OR UPDATE OR DELETE ON pgworkd.jobs
    FOR EACH ROW EXECUTE FUNCTION public.audit();
"""
"""Every change of a status, in the order in which it was made, without what was rolled back."""

HOLDERS = """SELECT count(*) FROM pgworkd.jobs
    WHERE serialize_key IS NOT NULL AND (status = 'running' OR status = 'failed' AND NOT yields)
    GROUP BY queue, serialize_key HAVING count(*) > 1"""
"""A row for each serialize_key that is held by two jobs."""


class Taken(NamedTuple):
    """The answer to a claim: the jobs it took, and after how many seconds a rate says to claim again."""

    ids: list[uuid.UUID]
    again_s: float | None


async def take(db: Db, worker_id: int, limit: int = 10, queue: str = "q") -> Taken:
    """Claims."""
    rows = await claim(db, worker_id, limit, queue)
    if rows and rows[-1]["id"] is None:
        return Taken([row["id"] for row in rows[:-1]], rows[-1]["created_at"])
    return Taken([row["id"] for row in rows], None)


async def take_ids(db: Db, worker_id: int, limit: int = 10, queue: str = "q") -> list[uuid.UUID]:
    """Claims; the ids in the order returned."""
    return (await take(db, worker_id, limit, queue)).ids


async def settings(db: Db, queue: str = "q", **values: Any) -> None:
    """Sets these columns of the queue's row; the others keep their values."""
    names = list(values)
    marks = ", ".join(f"${number}" for number in range(2, len(names) + 2))
    updates = ", ".join(f"{name} = excluded.{name}" for name in names)
    await db.execute(
        f"INSERT INTO pgworkd.queues (name, {', '.join(names)}) VALUES ($1, {marks}) "  # noqa: S608 - names are ours
        f"ON CONFLICT (name) DO UPDATE SET {updates}",
        queue,
        *values.values(),
    )


async def line(db: Db, *keys: str, queue: str = "q", **columns: Any) -> list[uuid.UUID]:
    """Inserts a job for each of these serialize_keys; their ids."""
    ids = []
    for key in keys:
        names = ["queue", "serialize_key", *columns]
        marks = ", ".join(f"${number}" for number in range(1, len(names) + 1))
        sql = f"INSERT INTO pgworkd.jobs ({', '.join(names)}) VALUES ({marks}) RETURNING id"  # noqa: S608 - as above
        ids.append(await db.fetchval(sql, queue, key, *columns.values()))
    return ids


async def unblock(db: Db) -> int:
    """unblock; the number of keys it repaired."""
    return int(await db.fetchval("SELECT pgworkd.unblock()"))


async def expire(db: Db) -> int:
    """expire; the number of jobs it finished."""
    return int(await db.fetchval("SELECT pgworkd.expire()"))


async def run_all(db: Db, worker_id: int, queue: str = "q", limit: int = 1) -> list[uuid.UUID]:
    """Claims and completes until nothing is left, without maintenance; the ids in the order of their starts."""
    order: list[uuid.UUID] = []
    while ids := await take_ids(db, worker_id, limit, queue):
        order += ids
        attempts = await db.fetch("SELECT id, attempts FROM pgworkd.jobs WHERE id = ANY ($1)", ids)
        by_id = {row["id"]: row["attempts"] for row in attempts}
        assert await complete(db, ids, [by_id[job_id] for job_id in ids]) == set(ids)
    return order


def most_in_window(instants: Sequence[datetime], window_s: float) -> int:
    """The maximum number of these instants in any window of that length, both ends included."""
    ordered = sorted(instants)
    return max(
        (sum(1 for at in ordered[n:] if (at - first).total_seconds() <= window_s) for n, first in enumerate(ordered)),
        default=0,
    )
