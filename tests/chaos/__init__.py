"""Real processes, real faults, and a checker of what they leave behind.

    python -m tests.chaos                   4 daemons, 5,000 jobs, 40 faults, 3 minutes; a table of every check
    python -m tests.chaos --minutes 60      the long run
    python -m tests.chaos.planted           bugs planted into the engine, one at a time: which check finds each
    python -m tests.chaos.wire              every operation, cut at every message

`worker` and `producer` are the processes, `workload` what they do; each appends what it sees to a file (`history`), and
a trigger notes every change of a status (`workload.AUDIT`). `fleet` starts, kills and cuts off, `faults` says how,
`watch` looks on, and `checker` judges all of it afterwards.
"""
