"""Remote: the engine's work for workers that reach the database through this process.

`service` runs it; `claims`, `beats` and `settles` each do for all workers at once what a daemon does for itself, so
that the database sees a few statements per second however many workers there are.
"""
