"""Tests of the checker: a correct history passes, and each check finds the one violation planted for it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.checker import CHECKS
from tests.chaos.evidence import Change, Evidence, Row, Tree
from tests.chaos.history import History, Note, load
from tests.chaos.others import RECEIVER

pytestmark = pytest.mark.slow("daemons under faults")

JOB = "job"


def note(at_s: float, by: str, event: str, **facts: Any) -> Note:
    return Note(at_s, by, event, facts)


def run(
    job: str, attempt: int, by: str, start_s: float, end_s: float | None, how: str = "ok", **facts: Any
) -> list[Note]:
    """The records of one run; `end_s` None: it never returned."""
    notes = [note(start_s, by, "start", job=job, attempt=attempt, **{"kind": "plain", **facts})]
    return notes if end_s is None else [*notes, note(end_s, by, "end", job=job, attempt=attempt, how=how)]


def change(
    seq: int, was: str | None, became: str | None, attempts: int, *, at_s: float | None = None, **facts: Any
) -> Change:
    defaults: dict[str, Any] = {
        "job": JOB,
        "queue": "mixed",
        "failures": 0,
        "losses": 0,
        "worker": None,
        "due_in_s": 0.0,
    }
    defaults["at_s"] = float(seq) if at_s is None else at_s
    return Change(seq=seq, was=was, became=became, attempts=attempts, occurrence=None, **defaults)._replace(**facts)


def row(**facts: Any) -> Row:
    plain = Row(JOB, "mixed", "plain", "completed", 1, 0, 0, "p-1", 1, None, None)
    return plain._replace(**facts)


CLAIM = {"worker": "d1"}
BEATS = [note(n, "d1", "beat", memory_mb=50, files=20, threads=3, tasks=40) for n in range(30)]


def clean() -> Evidence:
    """One job is inserted, claimed by d1, run and completed."""
    return Evidence(
        notes=[
            note(0, "p", "invoked", call=1, tokens=["p-1"], plan="single"),
            note(0.1, "p", "acknowledged", call=1),
            *run(JOB, 1, "d1", 2.1, 2.9),
            note(50, "driver", "exit", name="d1", code=0, expected=0),
        ],
        changes=[
            change(1, None, "pending", 0),
            change(2, "pending", "running", 1, **CLAIM),
            change(3, "running", None, 1),
        ],
        rows=[row()],
    )


def taken_over(*, second_start_s: float, first_end_s: float | None, **facts: Any) -> Evidence:
    """d1 loses the job to d2, which completes it."""
    good = clean()
    return replace(
        good,
        notes=[
            *good.notes[:2],
            *run(JOB, 1, "d1", 2.1, first_end_s, "CancelledError", **facts),
            *run(JOB, 2, "d2", second_start_s, 20, **facts),
        ],
        changes=[
            *good.changes[:2],
            change(3, "running", "failed", 1, losses=1, failures=1, worker="d1", at_s=9),
            change(4, "failed", "running", 2, losses=1, failures=1, worker="d2", at_s=9.5),
            change(5, "running", None, 2, losses=1, failures=1, at_s=21),
        ],
        rows=[row(attempts=2, made_by=2, failures=1, losses=1)],
    )


def with_notes(*notes: Note) -> Evidence:
    good = clean()
    return replace(good, notes=[*good.notes, *notes])


def with_jobs(rows: list[Row], changes: list[Change], *notes: Note, **facts: Any) -> Evidence:
    good = clean()
    return replace(
        good, notes=[*good.notes, *notes], rows=[*good.rows, *rows], changes=[*good.changes, *changes], **facts
    )


def failed(how: str, kind: str = "plain") -> Evidence:
    """Its first attempt fails."""
    good = clean()
    changes = [
        *good.changes[:2],
        change(3, "running", "failed", 1, failures=1),
        change(4, "failed", "running", 2, failures=1, **CLAIM),
        change(5, "running", None, 2, failures=1),
    ]
    notes = [*run(JOB, 1, "d1", 2.1, 2.9, how, kind=kind), *run(JOB, 2, "d1", 4.1, 4.9, kind=kind)]
    return replace(
        good, notes=[*good.notes[:2], *notes], changes=changes, rows=[row(attempts=2, made_by=2, failures=1)]
    )


def cut_short(kind: str) -> Evidence:
    """A shutdown cancels its only run."""
    good = clean()
    return replace(
        good,
        notes=[*good.notes[:2], *run(JOB, 1, "d1", 2.1, 2.9, "CancelledError", kind=kind)],
        changes=[*good.changes[:2], change(3, "running", "dead", 1, failures=1)],
        rows=[row(kind=kind, status="dead", made_by=None, failures=1)],
    )


def flow(claimed: int) -> Evidence:
    """p-1 and b, and c, which depends on them and was claimed at `claimed`."""
    jobs = [row(job=job, token=token) for job, token in (("b", "p-2"), ("c", "p-3"))]
    changes = [
        change(4, "running", None, 1, job="b"),
        change(claimed, "pending", "running", 1, job="c", worker="d1"),
        change(9, "running", None, 1, job="c"),
    ]
    invoked = note(0, "q", "invoked", call=1, tokens=["p-1", "p-2", "p-3"], plan="flow")
    return with_jobs(jobs, sorted(changes, key=lambda each: each.seq), invoked)


def tree(**facts: Any) -> Evidence:
    root = Tree("tree", None, 10, 9, 10, True, 1, 10)
    below = Tree("below", "root", 9, 9, 9, True, 0, 9)
    return replace(clean(), trees={"root": root, "below": below._replace(**facts)})


def limited(count: int) -> Evidence:
    claims = [change(9 + n, "pending", "running", 1, job=f"l{n}", queue="limited") for n in range(count)]
    return with_jobs([], claims)


def occurring(second: str) -> Evidence:
    ticks = [
        change(10, None, "pending", 0, job="t1", occurrence="tick 1"),
        change(11, "running", None, 1, job="t1", occurrence="tick 1"),
        change(12, None, "pending", 0, job="t2", occurrence=second),
    ]
    return with_jobs([row(job="t1", token=None)], ticks)


def probe_taken(at_s: float, back_s: float | None = None) -> Evidence:
    notes = [note(3, "driver", "fault", name="kill"), note(7, "driver", "fault_over", name="kill")]
    notes.append(note(at_s, "driver", "probed", fault="kill", job="p", after_s=at_s - 7))
    steps = [change(20, None, "pending", 0, job="p", at_s=5), change(21, "pending", "running", 1, job="p", at_s=at_s)]
    if back_s is not None:
        steps.append(change(22, "running", "pending", 1, job="p", at_s=back_s))
    good = clean()
    return replace(good, notes=[*good.notes, *notes], changes=[*good.changes, *steps])


KEYED = {"kind": "plain", "key": "k"}
BREACHES: dict[str, Callable[[], Evidence]] = {
    "acknowledged": lambda: replace(clean(), rows=[]),
    "attempted": lambda: with_notes(*run(JOB, 2, "d2", 4, 5)),
    "one_end": lambda: replace(clean(), rows=[row(attempts=2, made_by=1)]),
    "at_most_once": lambda: failed("RuntimeError", "charge"),
    "fenced": lambda: replace(clean(), notes=[*clean().notes[:2], *run(JOB, 1, "d1", 2.1, 8)]),
    "alone": lambda: taken_over(second_start_s=9.6, first_end_s=10),
    "serialized": lambda: with_notes(*run("x", 1, "d1", 1, 3, **KEYED), *run("y", 1, "d1", 2, 4, **KEYED)),
    "kept_place": lambda: with_notes(
        *run("x", 1, "d1", 1, 2, **KEYED), *run("y", 1, "d1", 3, 4, **KEYED), *run("x", 2, "d1", 5, 6, **KEYED)
    ),
    "losses": lambda: taken_over(second_start_s=9.6, first_end_s=9),
    "leases": lambda: with_notes(note(9, "d1", "lease.lost", worker_id=1)),
    "failures": lambda: failed("ok"),
    "deaths": lambda: replace(clean(), rows=[row(status="dead")]),
    "limits": lambda: limited(4),
    "occurrences": lambda: occurring("tick 1"),
    "trees": lambda: tree(added=8, over=8, rows=8),
    "dependencies": lambda: flow(3),
    "effects": lambda: replace(clean(), rows=[row(kind="transact")], effects={JOB: 2}),
    "taken_back": lambda: with_notes(note(9, "driver", "taken_back", name="d1", after_s=60.0)),
    "resumed": lambda: with_notes(note(9, "driver", "resumed", fault="postgres_down", after_s=6.0)),
    "waits": lambda: with_notes(note(9, "driver", "looked", waited_s=1.6)),
    "probed": lambda: probe_taken(14.2),
    "unknown": lambda: probe_taken(6, back_s=22.5),
    "ends": lambda: with_notes(note(9, "driver", "exit", name="d2", code=-9, expected=None)),
    "gateways": lambda: with_notes(note(9, "driver", "gateway_exit", name="g1", code=-9, expected=None)),
    "steady": lambda: with_notes(*BEATS[:25], *(n._replace(facts={**n.facts, "files": 60}) for n in BEATS[25:])),
    "quiet": lambda: replace(
        clean(),
        logs={
            "d1": "Traceback (most recent call last):\n  boom",
            "d2": '{"exception": "Traceback (most recent call last):", "event": "job.failed"}',
        },
    ),
}
SOUND: dict[str, Callable[[], Evidence]] = {
    "a clean run": clean,
    "a takeover": lambda: replace(
        taken_over(second_start_s=9.6, first_end_s=None),
        notes=[*taken_over(second_start_s=9.6, first_end_s=None).notes,
               note(5, "driver", "killed", name="d1"), note(5, "driver", "exit", name="d1", code=-9, expected=None)],
    ),
    "a takeover from one that was frozen": lambda: replace(
        taken_over(second_start_s=9.6, first_end_s=10),
        notes=[*taken_over(second_start_s=9.6, first_end_s=10).notes,
               note(9.9, "driver", "paused", name="d1", since_s=3.0, until_s=9.9)],
    ),
    "a run that was cut short and may not be repeated": lambda: cut_short("charge"),
    "a failure": lambda: failed("RuntimeError"),
    "a probe that waits while a fault lasts": lambda: probe_taken(11.8),
    "a probe whose claim was not answered, which goes back": lambda: probe_taken(6, back_s=21.5),
    "a flow": lambda: flow(5),
    "a tree": tree,
    "a full queue": lambda: limited(3),
    "two occurrences": lambda: occurring("tick 2"),
    "a transaction": lambda: replace(clean(), rows=[row(kind="transact")], effects={JOB: 1}),
    "a steady daemon": lambda: with_notes(*BEATS),
    "a daemon that found its database late": lambda: with_notes(
        *(n._replace(facts={**n.facts, "files": 3}) for n in BEATS[:8]), note(7.5, "d1", "daemon.ready"), *BEATS[8:]
    ),
    "handlers with children at the end": lambda: with_notes(
        *BEATS[:26], *(n._replace(facts={**n.facts, "files": 60}) for n in BEATS[26:])
    ),
}  # fmt: skip


def found(evidence: Evidence) -> dict[str, list[str]]:
    verdicts = {check.__name__: check(evidence).violations for check in CHECKS.values()}
    return {name: violations for name, violations in verdicts.items() if violations}


@pytest.mark.parametrize("story", SOUND)
def test_a_correct_history_passes(story: str) -> None:
    assert found(SOUND[story]()) == {}


@pytest.mark.parametrize("check", BREACHES)
def test_each_check_finds_the_violation_planted_for_it(check: str) -> None:
    assert check in found(BREACHES[check]())


def test_every_check_has_a_violation_that_it_finds() -> None:
    assert {check.__name__ for check in CHECKS.values()} == BREACHES.keys()


def test_completing_a_job_that_is_not_running_is_found() -> None:
    good = clean()
    evidence = replace(good, changes=[*good.changes[:2], good.changes[2]._replace(was="failed")])
    assert "one_end" in found(evidence)


def test_an_incomplete_shutdown_is_found_with_its_reason() -> None:
    told = note(8, "driver", "terminated", name="d2", signals=1)
    for code, wrong in ((0, False), (1, True)):
        evidence = with_notes(told, note(9, "driver", "exit", name="d2", code=code, expected=None))
        assert ("ends" in found(evidence)) is wrong
    unclean = note(8.5, "d2", "shutdown.incomplete", reason="2 outcomes not stored")
    evidence = with_notes(told, unclean, note(9, "driver", "exit", name="d2", code=1, expected=None))
    assert found(evidence)["ends"] == ["d2 was told to end, and ended with 1: 2 outcomes not stored"]


def test_a_daemon_that_last_reports_an_expired_lease_may_exit_by_itself() -> None:
    last = "pgworkd: daemon.aborted reason=the lease expires and 1 handler would not stop\n"
    for text, wrong in ((last, False), ("Killed\n", True)):
        evidence = with_notes(note(9, "driver", "exit", name="d2", code=1, expected=None))
        assert ("ends" in found(replace(evidence, logs={"d2": text}))) is wrong


def test_an_occurrence_that_skips_earlier_ones_is_found() -> None:
    evidence = occurring("tick 2")
    far = [each._replace(due_in_s=3600.0) if each.occurrence else each for each in evidence.changes]
    assert "occurrences" in found(replace(evidence, changes=far))


def test_consecutive_short_pauses_add_up_but_one_does_not_explain_a_loss() -> None:
    evidence = taken_over(second_start_s=9.6, first_end_s=9)
    pauses = [note(9, "driver", "paused", name="d1", since_s=s, until_s=s + 1.2) for s in (5.0, 6.5)]
    one, both = (replace(evidence, notes=[*evidence.notes, *pauses[:n]]) for n in (1, 2))
    assert "losses" in found(one)
    assert found(both) == {}


def test_the_outcome_of_a_process_abandoned_by_its_daemon_is_ignored() -> None:
    good = clean()
    first, second = (run(JOB, n, "d1", 3 * n + 0.1, 3 * n + 0.9, kind="process") for n in (1, 2))
    released = [
        good.changes[0],
        change(3, "pending", "running", 1, **CLAIM),
        change(4, "running", "pending", 1),
        change(6, "pending", "running", 2, **CLAIM),
        change(7, "running", None, 2),
    ]
    notes = [*good.notes[:2], *first, *second, good.notes[-1]]
    evidence = replace(good, notes=notes, changes=released, rows=[row(attempts=2, made_by=2)])
    assert found(evidence).keys() == {"fenced"}
    for given_up in (note(3.5, "d1", "lease.fenced"), note(3.5, "driver", "terminated", name="d1", signals=5)):
        assert found(replace(evidence, notes=[*notes, given_up])) == {}
    for other in (note(3.5, "d2", "lease.fenced"), note(3.5, "driver", "terminated", name="d1", signals=1)):
        assert found(replace(evidence, notes=[*notes, other])).keys() == {"fenced"}


def test_a_pushed_run_belongs_to_the_daemon_that_claimed_it() -> None:
    good, pushed = clean(), run(JOB, 1, RECEIVER, 2.1, 2.9)
    assert found(replace(good, notes=[*good.notes[:2], *pushed, good.notes[-1]])) == {}
    again = run(JOB, 2, RECEIVER, 3.1, 3.2)
    assert "attempted" in found(replace(good, notes=[*good.notes[:2], *pushed, *again, good.notes[-1]]))


def test_a_truncated_last_record_is_ignored_and_any_other_is_an_error(
    tmp_path: Path,
) -> None:
    history, file = History(tmp_path, "d1"), tmp_path / "d1.jsonl"
    for number in (1, 2):
        history.note("start", job=JOB, attempt=number)
    whole = file.read_bytes()
    first = whole.index(b"\n") + 1
    for end in range(first, len(whole)):
        file.write_bytes(whole[:end])
        assert [(seen.event, seen.facts["attempt"]) for seen in load(tmp_path)] == [("start", 1)]
    file.write_bytes(whole[:20] + whole[first:])
    with pytest.raises(json.JSONDecodeError):
        load(tmp_path)
