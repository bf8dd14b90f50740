"""The engine: the road of a job, a folder for each step.

insert   an application commits a row; a trigger sends NOTIFY if a pool of that queue is idle      (schema.sql)
wake     `poller` asks for all idle pools at once what is due; the listener's notifications come in by `life`
claim    `pool` claims as many jobs as it has capacity for, from where its `claim_cursor` stands
run      `executor` gives each attempt to a task; `runner` calls the handler in the loop, a thread or a process
settle   `settler` ends attempts in batches: completed, failed, released, cancelled; `reporter`, `hooks` report it
life     `daemon` holds it together: `worker` (registration), `heartbeat` (lease), `queues`, `maintenance`, stop

What all steps share lies here: `registry` (the App and its handlers), `attempts` (those in flight), `runner_task`.
Each step may import the steps below it in this list, never one above.
"""
