"""Pure values, no I/O: what a job, an event, a payload, a delay, an address and an error report are."""
