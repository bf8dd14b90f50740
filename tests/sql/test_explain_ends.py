"""What ends a reason: commands that can be pasted, whatever the names, and that do it."""

from __future__ import annotations

import shlex
import subprocess
import uuid

import pytest

from tests.kits import batches as b
from tests.kits import verbs as v
from tests.kits.pages import NASTY
from tests.kits.verbs import Db

NAMES = [
    "mail",
    "eu/mail@x.test:1+2_3-4.5",
    "x; touch /tmp/pwn",
    "$(touch /tmp/pwn)",
    "`touch /tmp/pwn`",
    "a'b",
    "'; touch /tmp/pwn; '",
    'say "hi"',
    "a\nb",
    "a\\",
    "~root",
    "*",
    "# no comment",
    "a=b",
    " lead and trail ",
    "é\u202e\ue000",
    NASTY,
]


async def ends(db: Db, job_id: uuid.UUID) -> dict[str, str]:
    """What ends each reason why the job does not run."""
    rows = await db.fetch("SELECT reason, ends FROM pgworkd.explain($1)", job_id)
    return {row["reason"]: row["ends"] for row in rows}


def words(command: str) -> list[str]:
    """The words that a shell makes of a command of pgworkd."""
    script = f"pgworkd() {{ printf '%s\\0' \"$@\"; }}; {command}"
    return subprocess.run(["sh", "-c", script], capture_output=True, check=True).stdout.decode().split("\0")[:-1]


@pytest.mark.parametrize("name", NAMES)
async def test_the_commands_name_the_queue_as_one_word_of_a_shell(db: Db, name: str) -> None:
    job_id = await v.one(db, name)
    await db.execute("INSERT INTO pgworkd.queues (name, paused_until) VALUES ($1, 'infinity')", name)
    found = await ends(db, job_id)
    assert shlex.split(found["paused"]) == ["pgworkd", "resume", name]
    assert shlex.split(found["no_worker"]) == ["pgworkd", "run", "--queue", name]
    for command in (found["paused"], found["no_worker"]):  # and the shell agrees with shlex
        assert words(command)[-1] == name


@pytest.mark.parametrize("how", ["dead", "cancelled", "discarded", "pending"])
async def test_what_ends_a_dependency_is_what_to_do_with_the_job_that_it_waits_for(db: Db, how: str) -> None:
    first = await v.one(db)
    job_id = await b.after(db, first)
    if how in ("dead", "discarded"):
        await v.claim(db, await v.worker(db))
        await v.fail(db, [first], permanent=True)
    if how == "cancelled":
        await db.execute("SELECT pgworkd.cancel($1)", [first])
    elif how == "discarded":
        await db.execute("SELECT pgworkd.discard($1)", [first])
    await b.mend(db)
    drop, drops = f"pgworkd undepend {job_id}", "SELECT pgworkd.undepend($1)"
    expected = {
        "dead": f"pgworkd retry {first}, or: {drop}",
        "cancelled": f"{drop}, or: pgworkd cancel {job_id}",
        "discarded": f"{drop}, or: pgworkd cancel {job_id}",
        "pending": "the end of these jobs",
    }
    assert (await ends(db, job_id))["dependency"] == expected[how]
    if how == "dead":
        await db.execute("SELECT pgworkd.retry($1)", [first])
        assert (await ends(db, job_id))["dependency"] == expected["pending"]
    await db.execute(drops, [job_id])
    assert "dependency" not in await ends(db, job_id)
