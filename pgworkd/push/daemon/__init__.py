"""The daemon of `pgworkd push`: it sends the jobs of queues that have an endpoint, and settles them by the answers.

An engine like any other: claims, concurrency, limits, retries, rescue and metrics are those of `Daemon`. Here are only
which queues it serves (`routes`), and what it does with an attempt (`delivery`, `runner`).
"""
