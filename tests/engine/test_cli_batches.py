"""Commands on batches: listing, showing and following trees, and sealing, cancelling and deleting them."""

from __future__ import annotations

import json
import threading
from typing import Any

import psycopg
import pytest

from pgworkd.cli import batches
from pgworkd.client import batch
from tests.kits.cli import NOBODY, Shell, clean, shell

__all__ = ["clean", "shell"]  # fixtures


def tree(shell: Shell, *, jobs: int = 4) -> Any:
    """`payroll` with two children, the first of which has a child itself; not sealed."""
    root = batch(shell.db, "payroll", kind="calculate")
    cheques = root.child("cheques", stream=True)
    cheques.child("letters", stream=True)
    root.child("\x1b[31mtax", kind="tax").add([{}])
    root.add({"n": n} for n in range(jobs))
    return root


def end(shell: Shell, batch_id: Any, count: int, status: str = "completed") -> None:
    """Ends `count` of its waiting jobs."""
    if status == "cancelled":
        shell.sql(
            "SELECT pgworkd.cancel(ARRAY(SELECT id FROM pgworkd.jobs WHERE batch_id = %s LIMIT %s))", batch_id, count
        )
        return
    worker = shell.sql(
        "INSERT INTO pgworkd.workers (name, pid, version, lease_s, lease_until)"
        " VALUES ('w', 1, '0', 30, now() + interval '1 min') RETURNING id"
    )
    queue = shell.sql("SELECT queue FROM pgworkd.batches WHERE id = %s", batch_id)
    shell.sql(
        "SELECT pgworkd.settle_completed(array_agg(id), array_agg(attempt), array_agg(NULL::text))"
        " FROM pgworkd.claim(%s, %s, %s)",
        worker,
        queue,
        count,
    )


def test_a_tree_is_shown_with_its_progress(shell: Shell) -> None:
    root = tree(shell)
    end(shell, root.id, 2)
    end(shell, root.id, 1, "cancelled")
    assert shell("batches", "show", str(root.id)).stdout.splitlines() == [
        "payroll         ███████████████░░░░░  75 %  3 of 4, open, 1 cancelled",
        "├─ cheques      ░░░░░░░░░░░░░░░░░░░░   0 %  0 of 2, open",
        "│  └─ letters   ░░░░░░░░░░░░░░░░░░░░   0 %  0 of 0, open",
        "└─ \\x1b[31mtax  ░░░░░░░░░░░░░░░░░░░░   0 %  0 of 1, open",
    ]
    facts = json.loads(shell("batches", "show", str(root.id), "--json").stdout)
    assert [(each["name"], each["depth"], each["done"]) for each in facts] == [
        ("payroll", 0, 3),
        ("cheques", 1, 0),
        ("letters", 2, 0),
        ("\x1b[31mtax", 1, 0),
    ]


def test_a_subtree_is_shown_from_its_own_root(shell: Shell) -> None:
    root = tree(shell)
    cheques = shell.sql("SELECT id FROM pgworkd.batches WHERE parent_id = %s AND name = 'cheques'", root.id)
    lines = shell("batches", "show", str(cheques)).stdout.splitlines()
    assert [line.split("  ")[0] for line in lines] == ["cheques", "└─ letters"]


def test_trees_are_listed_newest_first(shell: Shell) -> None:
    root = tree(shell)
    done = batch(shell.db, "done")
    done.seal()
    lines = shell("batches").stdout.splitlines()
    assert lines[0].split()[:5] == ["ID", "NAME", "QUEUE", "STATE", "BATCHES"]
    assert [line.split()[:5] for line in lines[1:]] == [
        [str(done.id), "done", "done", "completed", "1"],
        [str(root.id), "payroll", "calculate", "running", "4"],
    ]
    assert [row["total"] for row in json.loads(shell("batches", "--name", "payroll", "--json").stdout)] == [5]
    assert len(json.loads(shell("batches", "-n", "1", "--json").stdout)) == 1


def test_the_meta_of_trees_is_listed(shell: Shell) -> None:
    tree = shell.sql("SELECT id FROM pgworkd.create_batch('m', 'q', p_meta => '{\"by\": \"ann\"}')")
    assert '{"by": "ann"}' in shell("batches").stdout
    for command in (("batches",), ("batches", "show", str(tree))):
        assert json.loads(shell(*command, "--json").stdout)[0]["meta"] == {"by": "ann"}


def test_a_tree_is_followed_until_it_finishes(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "REFRESH_S", 0.01)
    root = batch(shell.db, "payroll", kind="calculate")
    root.add([{}, {}])
    root.seal()
    drawn: list[str] = []
    first = threading.Event()
    monkeypatch.setattr(batches, "out", lambda text: (drawn.append(text), first.set()))

    def work() -> None:
        assert first.wait(5)
        with psycopg.connect(shell.dsn, autocommit=True) as connection:
            other = Shell.__new__(Shell)
            other.db = connection
            end(other, root.id, 2)

    worker = threading.Thread(target=work)
    worker.start()
    shell("batches", "show", str(root.id), "--follow")
    worker.join()
    assert ("0 of 2, sealed" in drawn[0], "2 of 2, completed" in drawn[-1]) == (True, True)


def test_batches_are_sealed_cancelled_and_deleted(shell: Shell) -> None:
    root = tree(shell)
    name = str(root.id)
    assert shell("batches", "seal", name).stdout == f"batch {name} is sealed\n"
    assert shell("batches", "seal", name).stdout == f"batch {name} was sealed, cancelled or finished before\n"
    assert "belongs to a tree that is not finished" in shell.refused("batches", "delete", name, code=1)
    assert "5 jobs cancelled, 0 running jobs asked to stop" in shell("batches", "cancel", name).stdout
    assert shell("batches", "delete", name).stdout == "4 batches deleted\n"
    assert shell.sql("SELECT count(*) FROM pgworkd.audit WHERE what LIKE %s", "%_batch") == 2


def test_a_large_batch_is_cancelled_in_chunks(shell: Shell) -> None:
    root = batch(shell.db, "large")
    root.add({"n": n} for n in range(2500))
    assert "2,500 jobs cancelled" in shell("batches", "cancel", str(root.id)).stdout


def test_an_unknown_batch_is_reported(shell: Shell) -> None:
    for verb in ("show", "seal", "cancel", "delete"):
        assert f"batch {NOBODY} does not exist" in shell.refused("batches", verb, NOBODY, code=1)
    assert "--follow and --json exclude each other" in shell.refused("batches", "show", NOBODY, "--follow", "--json")
    assert "put options after" in shell.refused("batches", "--name", "x", "show", NOBODY)
