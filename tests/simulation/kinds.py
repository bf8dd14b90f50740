"""The kinds of schedules of a daemon: each stresses some invariants, and all invariants are checked in it."""

from __future__ import annotations

from .network import CALM
from .plans import CHANGES, DEAF, DOINGS, ODD, STORMS, Profile

QUICK_S = (0.0, 0.0002, 0.001, 0.003)
HUNG_SETTLES = (STORMS[3], STORMS[5], STORMS[6])

KINDS = {
    "slots": Profile(
        doings=DOINGS + ODD, changes=("concurrency", "cancel", "remove"), slots_max=4, weathers=(CALM, *STORMS[:3])
    ),
    "settles": Profile(
        weathers=(*STORMS, *HUNG_SETTLES), doings=DOINGS + ODD, changes=("cancel", "cut"), outages_max=1,
        flush_max=(1_000, 1, 3),
    ),
    "idle": Profile(
        weathers=(CALM, *DEAF), changes=("concurrency", "cut", "pause"), takes_s=(0.0005, 0.03, 2.0), lasts_s=2.5
    ),
    "wakes": Profile(
        trickles_max=2, weathers=(CALM, CALM, *DEAF, STORMS[0]), changes=("cut", "concurrency"), bursts_max=2,
        takes_s=(0.0005, 0.03), lasts_s=5.0,
    ),
    "claims": Profile(
        takes_s=(*QUICK_S, 0.3, 1.0), burst_jobs_max=30, doings=("ok", "ok", "burn"), weathers=(CALM, *STORMS),
        changes=CHANGES,
    ),
    "backlog": Profile(
        takes_s=QUICK_S, burst_jobs_max=30, bursts_max=3, weathers=HUNG_SETTLES, flush_max=(1, 5), capacity=(8, 20),
        outages_max=1, queues_max=1,
    ),
    "stop": Profile(
        stops=True, weathers=(CALM, *STORMS), outages_max=2, doings=DOINGS + ODD, changes=CHANGES,
        takes_s=(*QUICK_S, 0.3, 1.0), burst_jobs_max=30,
    ),
    "lease": Profile(
        lease_s=3.0, outages_max=2, outage_s=6.0, doings=("ok", "stubborn", "stubborn", "swallow"),
        takes_s=(0.05, 1.0, 2.0), weathers=(CALM, STORMS[1], STORMS[2]), burst_jobs_max=4, bursts_max=3, lasts_s=6.0,
    ),
    "anything": Profile(
        weathers=(*STORMS, *DEAF), outages_max=2, changes=CHANGES, doings=DOINGS + ODD, capacity=(10_000, 15)
    ),
}  # fmt: skip
