"""A row that only keeps a dedupe key is not a job to any command."""

from __future__ import annotations

import json
import shlex
import uuid

import pytest

from pgworkd.cli import common
from tests.kits.cli import Shell, clean, shell

__all__ = ["clean", "shell"]  # fixtures


def test_a_row_that_keeps_a_key_is_shown_as_the_finished_job(shell: Shell) -> None:
    kept = shell("enqueue", "mail", '{"n": 1}', "--dedupe-key", "k", "--dedupe-for-s", "3600").stdout.strip()
    shell("cancel", kept)
    assert shell.sql("SELECT status::text FROM pgworkd.jobs") == "completed"

    assert [(row["id"], row["status"]) for row in json.loads(shell("jobs", "--json").stdout)] == [(kept, "cancelled")]
    assert json.loads(shell("jobs", "--json", "--status", "completed").stdout) == []
    job = json.loads(shell("job", kept, "--json").stdout)
    assert (job["status"], job["payload"], job["dedupe_key"]) == ("cancelled", {"n": 1}, "k")
    assert json.loads(shell("queues", "--json").stdout) == []
    assert {value for value in json.loads(shell("stats", "--json").stdout).values() if value} == set()
    for act in ("cancel", "retry", "discard"):
        assert "is cancelled" in shell(act, kept, code=1).stderr


def test_a_queue_with_only_kept_keys_is_unknown(shell: Shell) -> None:
    shell.sql(
        "INSERT INTO pgworkd.jobs (id, queue, dedupe_key, dedupe_until, status)"
        " VALUES (%s, 'mail', 'k', '2150-01-01', 'completed')",
        uuid.UUID(int=7),
    )
    assert json.loads(shell("jobs", "--json").stdout) == []
    assert shell.refused("pause", "mail").startswith("unknown queue 'mail';")
    assert shell.refused("pause", "maill").startswith("unknown queue 'maill';"), "and mail is not what was meant"


def keep(shell: Shell, key: str = "k", queue: str = "mail", for_s: int = 3600) -> str:
    """A cancelled job that keeps its key."""
    kept = shell("enqueue", queue, "--dedupe-key", key, "--dedupe-for-s", str(for_s)).stdout.strip()
    shell("cancel", kept)
    return kept


def keep_by_batch(shell: Shell, name: str, key: str) -> str:
    """An empty finished tree that keeps its key."""
    made = "SELECT id FROM pgworkd.create_batch(%s, 'mail', p_dedupe_key => %s, p_dedupe_for_s => 600)"
    batch = str(shell.sql(made, name, key))
    shell("batches", "seal", batch)
    return batch


def test_kept_keys_are_listed_by_expiry_latest_first(shell: Shell) -> None:
    first, other, longest = keep(shell), keep(shell, "k", "other"), keep(shell, "k2", for_s=7200)
    batch = keep_by_batch(shell, "month", "2026-11")
    shell("enqueue", "mail", "--dedupe-key", "live", "--dedupe-for-s", "3600")

    def listed(*args: str) -> list[str]:
        return [row["id"] for row in json.loads(shell("keys", "--json", *args).stdout)]

    assert listed() == [longest, other, first, batch]
    assert listed("--limit", "2") == [longest, other]
    assert listed("--queue", "mail") == [longest, first, batch]
    assert listed("--key", "k") == [other, first]
    assert listed("--key", "2026-11") == [batch]
    rows = {row["id"]: row for row in json.loads(shell("keys", "--json").stdout)}
    assert [rows[first][name] for name in ("queue", "dedupe_key", "batch", "ended_as")] == [
        "mail",
        "k",
        None,
        "cancelled",
    ]
    assert (rows[batch]["batch"], rows[batch]["ended_as"]) == ("month", "completed")
    lines = shell("keys").stdout.splitlines()
    assert lines[0].split() == ["DEDUPE_KEY", "QUEUE", "BATCH", "UNTIL", "ENDED_AS", "ID"]
    assert lines[1].startswith("k2 ")
    assert lines[1].endswith(f"cancelled  {longest}")


def test_a_kept_key_can_be_freed_for_the_next_job(shell: Shell) -> None:
    kept = keep(shell)
    assert shell("keys", "free", "mail", "k").stdout == "key k of queue mail is free\n"
    assert json.loads(shell("keys", "--json").stdout) == []
    (note,) = [row for row in json.loads(shell("audit", "--json").stdout) if row["what"] == "free_key"]
    assert (note["who"], note["queue"], note["job_id"]) == (common.operator(), "mail", kept)
    assert "dedupe_key: k -> -" in shell("audit").stdout
    assert shell("enqueue", "mail", "--dedupe-key", "k").stdout.strip() != kept


def test_the_key_of_a_finished_batch_can_be_freed(shell: Shell) -> None:
    keep_by_batch(shell, "month", "k")
    assert shell("keys", "free", "--batch", "month", "k").stdout == "key k of batch month is free\n"
    assert json.loads(shell("keys", "--json").stdout) == []
    assert "no batch has it: it is free" in shell.refused("keys", "free", "--batch", "month", "k", code=1)


@pytest.mark.parametrize("by", ["queue", "name"])
def test_a_key_of_a_batch_is_named_by_what_frees_it(shell: Shell, by: str) -> None:
    """pgworkd keys lists it under its queue."""
    keep_by_batch(shell, "last month", "k 7")
    (row,) = json.loads(shell("keys", "--json").stdout)
    refused = shell.refused("keys", "free", row["queue"] if by == "queue" else "last month", "k 7", code=1)
    assert refused.endswith("no job has it, but a batch: pgworkd keys free --batch 'last month' 'k 7'")
    assert shell(*shlex.split(refused.partition("pgworkd ")[2])).stdout == "key k 7 of batch last month is free\n"
    assert "it is free" in shell.refused("keys", "free", row["queue"], "k 7", code=1)


def test_a_key_of_a_job_is_not_one_of_a_batch(shell: Shell) -> None:
    shell("enqueue", "mail", "--dedupe-key", "k")
    assert shell.refused("keys", "free", "--batch", "mail", "k", code=1).endswith(
        "no batch has it, but a job of the queue mail: leave out --batch"
    )


def test_a_key_of_a_live_job_is_not_freed_and_the_error_names_the_job(shell: Shell) -> None:
    live = shell("enqueue", "mail", "--dedupe-key", "k", "--dedupe-for-s", "3600").stdout.strip()
    assert shell.refused("keys", "free", "mail", "k", code=1) == (
        f"key k of queue mail is not freed: job {live}, whose status is pending, has it: "
        "wait until that job has finished, or cancel it"
    )
    assert shell.status(live) == "pending"
    batch = shell.sql("SELECT id FROM pgworkd.create_batch('month', 'mail', p_dedupe_key => 'k')")
    told = f"batch {batch} is not finished and has it: wait until it is finished, or cancel it, which frees the key"
    assert shell.refused("keys", "free", "--batch", "month", "k", code=1).endswith(told)
    assert "no job has it: it is free" in shell.refused("keys", "free", "mail", "\x1b[31mK", code=1)
    assert shell.sql("SELECT count(*) FROM pgworkd.audit") == 0


def test_retrying_a_dead_job_whose_key_is_kept_tells_how_to_free_it(shell: Shell) -> None:
    dead = shell.die("mail", dedupe_key="k")
    keep(shell)
    assert "free the key with pgworkd keys free" in shell("retry", dead, code=1).stderr
    shell("keys", "free", "mail", "k")
    shell("retry", dead)
    assert shell.status(dead) == "pending"


def test_options_must_follow_the_subcommand(shell: Shell) -> None:
    assert "put options after: pgworkd keys free" in shell.refused("keys", "--key", "k", "free", "mail", "k")
    for words in (("", "k"), ("mail", ""), ("mail", "k" * 513), ("q" * 201, "k")):
        assert "must be text of 1 to" in shell.refused("keys", "free", *words)
