"""The metrics there are: the one table from which the collectors, the boards, the alert rules and the docs are made.

Names follow Prometheus' rules (https://prometheus.io/docs/practices/naming/): base units, `_total`, `_seconds`. No
label is unbounded: see `counters.KINDS_MAX`; none is ever a job's id.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Source = Literal["process", "gateway", "database"]
"""process: each daemon and gateway counts its own; gateway: only gateways do; database: the same whoever asks, so only
`pgworkd exporter`, or one gateway, needs to be asked."""


class Family(NamedTuple):
    """One metric. `merge`: how the values of several processes of one host become one."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()
    source: Source = "process"
    merge: Literal["sum", "min", "max"] = "sum"

    @property
    def is_ours(self) -> bool:
        """False for what the clients of Prometheus, and SDKs, tell of each process themselves."""
        return self.name.startswith("pgworkd_")


FAMILIES = (
    Family("pgworkd_jobs_started_total", "counter", "Attempts whose handler was called.", ("queue", "kind")),
    Family("pgworkd_jobs_finished_total", "counter", "Attempts that ended.", ("queue", "kind", "outcome")),
    Family("pgworkd_job_run_seconds", "histogram", "From the call of the handler to its end.", ("queue", "kind")),
    Family("pgworkd_job_wait_seconds", "histogram", "From due to the call of the handler.", ("queue", "kind")),
    Family("pgworkd_jobs_running", "gauge", "Handlers that have been called and have not returned.", ("queue",)),
    Family("pgworkd_slots", "gauge", "Concurrency in effect.", ("queue",)),
    Family("pgworkd_claims_total", "counter", "Claims by result: jobs, empty, failed.", ("queue", "result")),
    Family("pgworkd_claim_seconds", "histogram", "Duration of claims."),
    Family("pgworkd_claims_refused_seconds", "gauge", "How long claims, or polls, have failed.", merge="max"),
    Family("pgworkd_settle_seconds", "histogram", "Duration of settles."),
    Family("pgworkd_jobs_lost_total", "counter", "Outcomes not stored: the job had been taken back.", ("queue",)),
    Family("pgworkd_jobs_rescued_total", "counter", "Jobs taken back from lost workers.", ("queue",)),
    Family("pgworkd_lease_remaining_seconds", "gauge", "Until the lease expires unless renewed.", merge="min"),
    Family("pgworkd_lease_fences_total", "counter", "How often the lease could not be renewed in time."),
    Family("pgworkd_database_up", "gauge", "1 if the last renewal of the lease was answered, else 0.", merge="min"),
    Family("pgworkd_listening", "gauge", "1 while notifications arrive, 0 while pools only poll.", merge="min"),
    Family("pgworkd_loop_lag_seconds", "gauge", "How long the event loop has been blocked.", merge="max"),
    Family("pgworkd_wake_seconds", "histogram", "From a notification to the answer of the claim after it."),
    Family("pgworkd_endpoint_answers_total", "counter", "Answers by status; none: no answer.", ("endpoint", "status")),
    Family("pgworkd_endpoint_seconds", "histogram", "From a request to its answer, or to none.", ("endpoint",)),
    Family("pgworkd_requests_total", "counter", "Requests by their answer.", ("method", "route", "status"), "gateway"),
    Family("pgworkd_request_seconds", "histogram", "From request to whole answer.", ("method", "route"), "gateway"),
    Family("pgworkd_requests_waiting", "gauge", "Requests that wait: claims, others, streams.", ("what",), "gateway"),
    Family("pgworkd_request_connections", "gauge", "Connections for requests: used, most.", ("state",), "gateway"),
    Family("pgworkd_maintenance_seconds", "histogram", "Duration of maintenance by task.", ("task",)),
    Family("pgworkd_processes", "gauge", "Daemon processes: wanted, and answering this scrape.", ("state",)),
    Family("process_cpu_seconds_total", "counter", "CPU time of the process."),
    Family("process_resident_memory_bytes", "gauge", "Memory of the process, as the system counts it."),
    Family("process_start_time_seconds", "gauge", "When it started, since the epoch.", merge="min"),
    Family("process_open_fds", "gauge", "Open files and connections."),
    Family("process_max_fds", "gauge", "How many it may open.", merge="min"),
    Family("pgworkd_build_info", "gauge", "Always 1; labels tell versions.", ("version", "python"), merge="max"),
    Family("pgworkd_queue_jobs", "gauge", "Jobs at the last sample.", ("queue", "state"), "database"),
    Family("pgworkd_queue_oldest_due_seconds", "gauge", "How long the oldest due job waits.", ("queue",), "database"),
    Family("pgworkd_queue_paused", "gauge", "1 while paused by operator, endpoint.", ("queue", "by"), "database"),
    Family("pgworkd_queue_workers", "gauge", "Workers of the queue with a live lease.", ("queue",), "database"),
    Family("pgworkd_queue_slots", "gauge", "Slots of these workers together.", ("queue",), "database"),
    Family("pgworkd_endpoint_paused", "gauge", "1 while failures pause it.", ("endpoint",), "database"),
    Family("pgworkd_endpoint_disabled", "gauge", "1 while it is disabled.", ("endpoint",), "database"),
    Family("pgworkd_workers", "gauge", "Workers by state: running, blocked, stopping, lost.", ("state",), "database"),
    Family("pgworkd_schedule_last_seconds", "gauge", "Since one was due, if known.", ("schedule",), "database"),
    Family("pgworkd_schedule_late_seconds", "gauge", "How long a run is due, or missing.", ("schedule",), "database"),
    Family("pgworkd_oldest_snapshot_seconds", "gauge", "Age of the oldest open transaction.", (), "database"),
    Family("pgworkd_oldest_snapshot_transactions", "gauge", "How far vacuum is held back.", ("by",), "database"),
    Family("pgworkd_table_bytes", "gauge", "Size with indexes.", ("table",), "database"),
    Family("pgworkd_table_dead_rows", "gauge", "Dead rows, as the server estimates.", ("table",), "database"),
    Family("pgworkd_sample_age_seconds", "gauge", "Age of the last sample of the queues.", (), "database"),
    Family("pgworkd_scrape_up", "gauge", "1 if the database answered this scrape, else 0.", (), "database"),
)
"""All metrics, in the order of the page."""
