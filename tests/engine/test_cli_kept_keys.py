"""What only keeps a dedupe key is no job to any command."""

from __future__ import annotations

import json
import uuid

from tests.engine.test_cli import Shell, clean, shell

__all__ = ["clean", "shell"]  # fixtures


def test_what_keeps_a_key_is_shown_as_the_job_that_it_was(shell: Shell) -> None:
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


def test_a_queue_that_only_keeps_keys_is_unknown(shell: Shell) -> None:
    shell.sql(
        "INSERT INTO pgworkd.jobs (id, queue, dedupe_key, dedupe_until, status)"
        " VALUES (%s, 'mail', 'k', '2150-01-01', 'completed')",
        uuid.UUID(int=7),
    )
    assert json.loads(shell("jobs", "--json").stdout) == []
    assert shell.refused("pause", "mail").startswith("no queue 'mail' is known;")
    assert shell.refused("pause", "maill").startswith("no queue 'maill' is known;"), "and mail is not what was meant"
