"""A message that cannot be sent: its job dies, and the next one is made a cool-down later, though more is untold."""

from __future__ import annotations

from tests.kits.alerts import count, declare, die, messages, tell
from tests.kits.verbs import Db, claim, clock, fail, worker


async def test_after_the_death_of_a_message_the_next_one_waits_for_the_cool_down(db: Db) -> None:
    await clock(0, db)
    worker_id = await worker(db)
    await declare(db, {"bundle_s": 10, "cooldown_s": 100})
    await die(db)
    await count(db)
    (job,) = await claim(db, worker_id, 1, "alerts")
    assert (await fail(db, [job["id"]], permanent=True, message="no such recipient"))[job["id"]] == "dead"
    for now in (11, 50, 99):
        await clock(now, db)
        await count(db)
        assert len(await messages(db)) == 1, "it would die as well"
        assert await db.fetchval("SELECT pgworkd.next_alert_s()") == 100 - now
    await clock(101, db)
    await count(db)
    assert len(await messages(db)) == 2
    assert ("a", "new", 1) in await tell(db), "the next one tells all"
