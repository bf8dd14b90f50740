"""The command `pgworkd`. Exit codes: 0 done or stopped as asked, 1 failed, 2 wrong usage or configuration.

main         the entry point; handles SIGTERM from the start     app          all commands, how errors are shown
run          run, migrate, dev, demo, conformance, grants        serve        a daemon as a process: signals, exit
autoscale    autoscale                                           load_app     imports "module:attribute"
jobs         enqueue, jobs, job                                  job_operations, bulk  retry, cancel, edit, audit
queues       queues (list, show, set, pause, resume)             batches, schedules, keys  the commands of that name
fleet        workers, stats, config show                         doctor, health  doctor
common       settings, database, ids                             output, table   tables, JSON, escaping
"""
