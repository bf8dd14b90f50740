"""`pgworkd bench`: enqueue, drain and latency of one's own database and machine, in a scratch queue.

An optional part, as `demo` is: nothing imports it but the command, when it runs.

`scratch`   the queue: its name, the rights it takes, its rows, how it and those of dead runs are removed
`session`   one run: the daemon, the stop signals, the removal at the end whatever happens
`phases`    what is measured, phase by phase; `cpu`: CPU seconds of the worker and of the server's sessions
`figures`   the results; `verdict`: the sentence on what limits them
`show`      the results as a table and as JSON, and the progress bar
"""
