"""What the command `bench` does: enqueue, drain and latency of one's own database and machine, in a scratch queue.

`measure`   times, drains and CPU seconds, as the project's own benchmarks measure them, too
`scratch`   the queue: its name, its rows, how it and those of dead runs are removed
`run`       one run, phase by phase; `verdict`: its results, and the sentence on what limits them
"""
