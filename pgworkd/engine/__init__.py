"""The engine: how a job travels, a folder for each step.

insert   an application commits a row; a trigger sends NOTIFY if a pool of that queue is idle      (schema.sql)
wake     `poller` asks for all idle pools at once when jobs are due; notifications reach the pools through `life`
claim    `pool` claims as many jobs as it has capacity for, from the place that its `claim_cursor` remembers
run      `executor` assigns each attempt to a task; `runner` calls the handler in the loop, a thread or a process
settle   `settler` ends attempts in batches: completed, failed, released, cancelled; `job_events` reports them
life     `daemon` starts and stops it all: `worker` (registration), `heartbeat` (lease), `queues`, `maintenance`

Shared by all steps: `registry` (the App and its handlers), `attempts` (those in flight), `shared`, `runner_task`.
Each step may import the steps below it in this list, never one above.
"""
