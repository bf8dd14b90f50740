"""Remote workers whose calls are cut off at the wrong moment, and settles that spoil a batch."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any, TypeAlias

import anyio
import asyncpg
import pytest

from tests.http.test_workers import insert
from tests.kits.daemon import until
from tests.kits.gateway import calling
from tests.kits.workers import registered

pytestmark = pytest.mark.slow("leases, gateways and claims that are lost")

Db: TypeAlias = "asyncpg.Connection[Any]"
HELD_BACK = """
    CREATE FUNCTION hold_back() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
        IF NEW.status = 'running' THEN PERFORM pg_advisory_xact_lock_shared(7); END IF;
        RETURN NEW; END $$;
    CREATE TRIGGER hold_back BEFORE UPDATE ON pgworkd.jobs FOR EACH ROW EXECUTE FUNCTION hold_back()"""
"""Claims wait for whoever has the advisory lock 7."""
WAITS = "SELECT EXISTS (SELECT FROM pg_locks WHERE locktype = 'advisory' AND NOT granted)"


async def test_what_a_claim_finds_for_somebody_who_has_gone_is_given_back(dsn: str, db: Db) -> None:
    (job_id,) = await insert(db)
    await db.execute(HELD_BACK)
    async with calling(dsn, workers=True) as call:
        worker = await registered(call)
        await db.execute("SELECT pg_advisory_lock(7)")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(worker.claim, 1, 30)
            await until(lambda: db.fetchval(WAITS))
            tasks.cancel_scope.cancel()
        await db.execute("SELECT pg_advisory_unlock(7)")
        await until(lambda: db.fetchval("SELECT attempts = 1 FROM pgworkd.jobs WHERE id = $1", job_id))
        other = await registered(call)
        (got,) = await other.claim(wait_s=10)
        assert (got["job"]["id"], got["job"]["attempt"], got["job"]["failures"]) == (str(job_id), 2, 0)


@pytest.mark.parametrize("result", ['"' + "x" * 2**20 + '"', "[" * 65 + "]" * 65, "[" * 500 + "]" * 500])
async def test_a_result_beyond_the_limits_is_refused_and_can_be_failed(dsn: str, db: Db, result: str) -> None:
    await insert(db, 2)
    async with calling(dsn, workers=True) as call:
        worker = await registered(call)
        one, other = await worker.claim(most=2)
        headers = {"Content-Type": "application/json"}
        path = f"/v1/assignments/{one['assignment']}/complete"
        answer = await call("POST", path, content=f'{{"result":{result}}}', headers=headers)
        assert (answer.status_code, answer.json()["errors"][0]["pointer"]) == (422, "/result")
        settles = ",".join(
            f'{{"assignment":"{each["assignment"]}","outcome":"complete","result":{text}}}'
            for each, text in ((one, result), (other, "[" * 64 + "]" * 64))
        )
        many = await call("POST", "/v1/settlements", content=f'{{"settlements":[{settles}]}}', headers=headers)
        assert [each["status"] for each in many.json()["settlements"]] == [None, "completed"]
        assert (await worker.settle(one, "fail", type="E", message="too large"))["status"] == "failed"


@pytest.mark.parametrize("outcome", ["complete", "fail"])
async def test_one_settle_that_cannot_be_stored_harms_no_other(dsn: str, db: Db, outcome: str) -> None:
    bad, *_ = await insert(db, 10)
    await db.execute(
        f"""CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
            IF OLD.id = '{bad}' AND NEW.status <> 'running' THEN
                RAISE EXCEPTION 'not this one' USING ERRCODE = '23514'; END IF;
            RETURN NEW; END $$;
        CREATE TRIGGER refuse BEFORE UPDATE ON pgworkd.jobs FOR EACH ROW EXECUTE FUNCTION refuse();
        CREATE FUNCTION keep() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
            IF OLD.id = '{bad}' THEN RAISE EXCEPTION 'not this one' USING ERRCODE = '23514'; END IF;
            RETURN OLD; END $$;
        CREATE TRIGGER keep BEFORE DELETE ON pgworkd.jobs FOR EACH ROW EXECUTE FUNCTION keep()"""
    )
    async with calling(dsn, workers=True) as call:
        worker = await registered(call)
        got = await worker.claim(most=10)
        sent = [{"assignment": each["assignment"], "outcome": outcome} for each in got]
        async with asyncio.timeout(20):
            answer = (await call.ok("POST", "/v1/settlements", {"settlements": sent}))["settlements"]
        wrong = [each["job"]["id"] for each, told in zip(got, answer, strict=True) if told["problem"] is not None]
        assert wrong == [str(bad)]
        expected = "completed" if outcome == "complete" else "failed"
        assert {told["status"] for told in answer if told["problem"] is None} == {expected}


@pytest.mark.parametrize("body", ["RAISE EXCEPTION 'not this one';", "RETURN NULL;"])
async def test_one_worker_whose_lease_cannot_be_renewed_costs_no_other_its_lease(dsn: str, db: Db, body: str) -> None:
    """Beats are sent together."""
    async with calling(dsn, workers=True) as call:
        workers = [await registered(call, name="bad" if number == 3 else "good") for number in range(8)]
        await db.execute("UPDATE pgworkd.workers SET lease_until = now() + interval '5 s' WHERE kind = 'remote'")
        await db.execute(
            f"""CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
                IF OLD.name = 'bad' THEN {body} END IF; RETURN NEW; END $$;
            CREATE TRIGGER refuse BEFORE UPDATE ON pgworkd.workers FOR EACH ROW EXECUTE FUNCTION refuse()"""
        )
        paths = [(f"/v1/workers/{worker.id}/beat", worker.headers) for worker in workers]
        async with asyncio.timeout(10):
            beats = (call("POST", path, {"assignments": []}, headers=headers) for path, headers in paths)
            codes = [answer.status_code for answer in await asyncio.gather(*beats)]
        assert [number for number, code in enumerate(codes) if code != 200] == [3]
        late = "SELECT count(*) FROM pgworkd.workers WHERE name = 'good' AND lease_until < now() + interval '6 s'"
        assert await db.fetchval(late) == 0
        await db.execute("DROP TRIGGER refuse ON pgworkd.workers")
        await workers[3].beat()


async def test_progress_that_is_refused_costs_no_lease(dsn: str, db: Db) -> None:
    await insert(db, 2)
    async with calling(dsn, workers=True) as call:
        worker = await registered(call)
        one, other = await worker.claim(most=2)
        await db.execute(
            "ALTER TABLE pgworkd.progress ADD CONSTRAINT theirs CHECK (message <> 'bad');"
            "UPDATE pgworkd.workers SET lease_until = now() + interval '5 s' WHERE kind = 'remote'"
        )
        report = {"progress": [{"assignment": one["assignment"], "done": 0.5, "message": "bad"}]}
        assert (await worker.beat(one, other, **report))["gone"] == []
        sql = "SELECT lease_until > now() + interval '6 s' FROM pgworkd.workers WHERE kind = 'remote'"
        assert await db.fetchval(sql)


async def test_a_locked_job_holds_up_no_other_that_is_settled_with_new_jobs(dsn: str, db: Db) -> None:
    locked, *_ = await insert(db, 4)
    async with calling(dsn, workers=True) as call, asyncio.TaskGroup() as tasks:
        worker = await registered(call)
        got = sorted(await worker.claim(most=4), key=lambda each: each["job"]["id"] != str(locked))
        new = [{"queue": "next"}]
        sent = [{"assignment": each["assignment"], "outcome": "complete", "enqueue": new} for each in got]
        async with db.transaction():
            await db.execute("SELECT FROM pgworkd.jobs WHERE id = $1 FOR UPDATE", locked)
            asked = tasks.create_task(call.ok("POST", "/v1/settlements", {"settlements": sent}))
            await until(lambda: db.fetchval("SELECT count(*) = 3 FROM pgworkd.jobs WHERE queue = 'next'"), limit_s=4)
        answers = (await asked)["settlements"]
        assert {each["status"] for each in answers[1:]} == {"completed"}


async def test_a_lock_on_the_table_of_jobs_does_not_hold_up_a_lease(dsn: str, db: Db) -> None:
    """A migration, or VACUUM FULL: what is to be cancelled cannot be read meanwhile, but no worker is lost."""
    await insert(db)
    async with calling(dsn, workers=True) as call, asyncio.TaskGroup() as tasks:
        worker = await registered(call, lease_s=10)
        (got,) = await worker.claim()
        soon = "UPDATE pgworkd.workers SET lease_until = now() + interval '5 s' WHERE kind = 'remote'"
        left = "SELECT lease_until > now() + interval '6 s' FROM pgworkd.workers WHERE kind = 'remote'"
        await db.execute(soon)
        async with db.transaction():
            await db.execute("LOCK TABLE pgworkd.jobs IN ACCESS EXCLUSIVE MODE")
            path, body = f"/v1/workers/{worker.id}/beat", {"assignments": [got["assignment"]]}
            asked = tasks.create_task(call("POST", path, body, headers=worker.headers))
            await until(lambda: db.fetchval(left), limit_s=4)
        await asked


async def test_a_worker_that_goes_from_gateway_to_gateway_waits_for_none_of_its_slots(dsn: str, db: Db) -> None:
    """Each job is claimed through one and settled through the other: its slot is free at once in both."""
    jobs = 12
    await insert(db, jobs)
    async with calling(dsn, workers=True) as one, calling(dsn, workers=True) as other:
        worker = await registered(one, {"q": 1})
        waited_s, clock = list[float](), asyncio.get_running_loop().time
        for run in range(jobs):
            here, there = (one, other) if run % 2 else (other, one)
            asked_at = clock()
            (got,) = await replace(worker, call=here).claim(wait_s=20)
            waited_s.append(clock() - asked_at)
            await replace(worker, call=there).beat(got)
            assert await replace(worker, call=there).settle(got) == {"status": "completed", "repeated": False}
        assert max(waited_s) < 1, waited_s
        gateways = [each.client._transport.app.gateway for each in (one, other)]  # type: ignore[attr-defined]
        ended = [gateway.remote.counters.of("q", "q").ended["completed"] for gateway in gateways]
        assert ended == [jobs // 2] * 2, "each is counted where it was settled"


async def test_a_claim_that_waits_learns_of_a_slot_that_was_freed_through_another_gateway(dsn: str, db: Db) -> None:
    await insert(db, 2)
    async with calling(dsn, workers=True) as one, calling(dsn, workers=True) as other, asyncio.TaskGroup() as tasks:
        worker = await registered(one, {"q": 1})
        (got,) = await worker.claim()
        waiting = tasks.create_task(worker.claimed(wait_s=20))
        await until(lambda: one.client._transport.app.gateway.waiters == 1)  # type: ignore[attr-defined]
        await asyncio.sleep(0.3)  # it is counted once more as it comes
        await replace(worker, call=other).settle(got)
        settled_at = asyncio.get_running_loop().time()
        assert len((await waiting)["assignments"]) == 1
        assert asyncio.get_running_loop().time() - settled_at < 3, "the bound for a due job beside an idle slot"
