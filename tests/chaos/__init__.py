"""Real processes, real faults, and a checker of the history that they leave behind.

    python -m tests.chaos                   4 daemons, 5,000 jobs, 40 faults, 3 minutes; a table of every check
    python -m tests.chaos --minutes 60      the long run
    python -m tests.chaos.planted           bugs planted into the engine, one at a time: which check catches each
    python -m tests.chaos.wire              every operation, cut at every message

`worker` and `producer` are the processes, `workload` is what they run; each appends its events to a file (`history`),
and a trigger records every status change (`workload.AUDIT`). `fleet` starts and stops processes, `faults` injects
faults, `watch` monitors the run, and `checker` examines all of it afterwards.
"""
