"""What alerts and digests say: subjects and texts, of any names and errors."""

from __future__ import annotations

import uuid
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pgworkd.admin.dead import DeadGroups
from pgworkd.admin.doctor_queries import DroppedResult, HeldEndpoint, QueueHealth
from pgworkd.alerts.digest import Digest
from pgworkd.alerts.recipient import MessageOrigin
from pgworkd.core.durations import spelled
from tests.kits.alerts import alert_of
from tests.kits.models import FUZZ

AT = datetime(2026, 1, 1, 7, 30, tzinfo=UTC)
NOTHING = Digest(
    id=uuid.UUID(int=7),
    origin=MessageOrigin("shop", "production", "10.0.0.7:5432"),
    at=AT,
    since=AT - timedelta(days=1),
    timezone="Asia/Tokyo",
    dead=DeadGroups([], 0, 0, 0),
    slow=[],
    late=[],
    endpoints=[],
    dropped=[],
    schedules=[],
    unknown=[],
)


@pytest.mark.parametrize(
    ("groups", "new", "deaths", "reason", "subject"),
    [
        (1, 1, 7, "new", "new error in q, send: it broke"),
        (1, 0, 1200, "many", "1,200 deaths in q, send: it broke"),
        (1, 0, 1, "more", "1 death in q, send: it broke"),
        (3, 1, 9, "new", "new error and 2 known errors in q, send: it broke"),
        (312, 312, 4718, "new", "312 new errors in 5 min, 4,718 deaths"),
        (312, 300, 4718, "new", "312 errors (300 new) in 5 min, 4,718 deaths"),
        (12, 0, 4718, "more", "12 errors in 5 min, 4,718 deaths"),
    ],
)
def test_the_subject_of_an_alert(groups: int, new: int, deaths: int, reason: str, subject: str) -> None:
    one = alert_of(reason=reason)
    alert = replace(one, groups=groups, new=new, deaths=deaths, since=one.at - timedelta(seconds=300))
    assert alert.subject == f"pgworkd shop, production: {subject}"
    assert "database:     shop, environment production\n" in alert.text()
    left = f"... and {groups - 1:,} error" if groups > 1 else "deaths:       "
    assert left in alert.text()


@FUZZ
@given(st.text(max_size=60), st.text(max_size=60), st.integers(1, 3))
def test_no_text_adds_a_line_to_an_alert(error: str, name: str, groups: int) -> None:
    """Line breaks, bidirectional marks and control characters are shown as what they are."""
    plain = replace(alert_of(), groups=groups)
    odd = replace(alert_of(error, pattern=error, queue=name, kind=name, place=f"x{name}"), groups=groups)
    assert len(odd.text().splitlines()) == len(plain.text().splitlines())
    assert len(odd.subject.splitlines()) == 1
    assert not set("\u202e\u2066\x1b\r") & set(odd.text() + odd.subject)


def test_a_digest_names_endpoints_and_times_of_its_zone() -> None:
    digest = replace(
        NOTHING,
        endpoints=[
            HeldEndpoint("billing", "HTTP 410\nGone", True, 0.0, ["bills", "mail"]),
            HeldEndpoint("chat", "HTTP 503", False, 700.0, ["notes"]),
        ],
        late=[QueueHealth("late", 90.0, 90.0, 0, 0, 0, False, False, None)],
        dropped=[DroppedResult("loose", "larger than 1 MiB", 7200.0)],
    )
    assert digest.subject == (
        "pgworkd shop, production: 2 paused or disabled endpoints, 1 late queue, 1 lossy endpoint"
    )
    text = digest.text()
    assert text.startswith(
        "Summary of shop, environment production, server 10.0.0.7:5432\n"
        "from 2025-12-31 16:30 to 2026-01-01 16:30, Asia/Tokyo.\n\n"
        "Endpoints that are paused or disabled (pgworkd endpoints)\n"
        "  billing: disabled, bills, mail wait: HTTP 410 Gone\n"
        "  chat: paused for 12 min more, notes waits: HTTP 503\n\n"
        "Late queues\n"
        "  late: due for 90 s, 0 workers\n"
    )
    assert "  loose: 2 h ago: larger than 1 MiB\n" in text
    assert NOTHING.quiet
    assert not digest.quiet
    for only in ("endpoints", "late", "dropped"):
        assert not replace(NOTHING, **{only: getattr(digest, only)}).quiet


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "1 s"), (90, "90 s"), (119.4, "119 s"), (300, "5 min"), (3599, "60 min"), (7200, "2 h"), (86_400, "24 h"),
     (200_000, "2 days")],
)  # fmt: skip
def test_lengths_of_time_are_rounded_to_one_unit(seconds: float, text: str) -> None:
    assert spelled(seconds) == text
