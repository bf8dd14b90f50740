"""The kinds of schedules of a daemon: each makes trouble where one invariant could break. All invariants are checked
in all of them."""

from __future__ import annotations

from .plans import CHANGES, DEAF, DOINGS, ODD, STORMS, Profile
from .store import CALM

QUICK_S = (0.0, 0.0002, 0.001, 0.003)
HUNG_SETTLES = (STORMS[3], STORMS[5], STORMS[6])

KINDS = {
    "slots": Profile(doings=DOINGS + ODD, changes=("concurrency", "cancel"), slots_max=4),
    "settled_once": Profile(weathers=STORMS, outages_max=1, changes=("cancel", "cut"), flush_max=(1_000, 2)),
    "reported_once": Profile(weathers=HUNG_SETTLES, doings=DOINGS + ODD, changes=("cancel",)),
    "idle_slot": Profile(weathers=(CALM, *DEAF), changes=("concurrency", "cut", "pause"), lasts_s=2.5),
    "claims_bounded": Profile(
        takes_s=QUICK_S, burst_jobs_max=30, doings=("ok",), weathers=(CALM, *STORMS), changes=CHANGES
    ),
    "hoarding": Profile(takes_s=(*QUICK_S, 0.3, 1.0), burst_jobs_max=30, doings=("ok", "burn"), weathers=(CALM, *STORMS)),
    "one_flush": Profile(weathers=(CALM, *STORMS), burst_jobs_max=20, flush_max=(1, 2, 5)),
    "backlog": Profile(
        takes_s=QUICK_S, burst_jobs_max=30, weathers=HUNG_SETTLES, flush_max=(1, 5), capacity=(8, 20), outages_max=1, queues_max=1
    ),
    "stop": Profile(stops=True, weathers=(CALM, *STORMS), outages_max=2, doings=DOINGS + ODD, changes=CHANGES),
    "lease": Profile(
        lease_s=3.0, outages_max=2, outage_s=6.0, doings=("ok", "ok", "stubborn", "swallow", "fail"),
        takes_s=(0.01, 0.5, 1.5), weathers=(CALM, STORMS[1], STORMS[2]), burst_jobs_max=4, lasts_s=4.0,
    ),
    "removal": Profile(changes=("remove", "remove", "concurrency"), weathers=(CALM, *STORMS[:3]), doings=DOINGS + ODD),
    "all_end": Profile(weathers=(*STORMS, *DEAF), outages_max=2, changes=CHANGES, doings=DOINGS + ODD, capacity=(10_000, 15)),
}  # fmt: skip
