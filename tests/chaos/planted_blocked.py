"""Bugs planted into what notices that the database refuses claims."""

from __future__ import annotations

from tests.chaos.bug import python

_REFUSED = "tests/engine/test_claims_refused.py"
BUGS = (
    python(
        "claims that the database refuses are not told",
        "engine/claim/claim_loop",
        "                self._tallies.refusals.failed(self.queue, error, sent_at)\n",
        "                pass\n",
        tests=_REFUSED,
    ),
    python(
        "polls that the database refuses are not told",
        "engine/wake/poller",
        "            self._refusals.failed(PART, error, sent_at)\n",
        "",
        tests="tests/unit/test_poller.py",
    ),
    python(
        "the database is well while it refuses every connection",
        "metrics/daemon",
        '            Check("database", not waits and not reached,',
        '            Check("database", left_s > 0,',
        tests=_REFUSED,
    ),
    python(
        "a moment's refusal is told as one",
        "engine/refusals",
        "        since = known.since if (known := self._by_part.get(part)) is not None else sent_at\n",
        "        since = min(sent_at, self._first_at) if hasattr(self, '_first_at') else sent_at\n"
        "        self._first_at = since\n",
        tests=_REFUSED,
    ),
)
