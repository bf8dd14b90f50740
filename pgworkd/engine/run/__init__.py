"""Run: from a claimed attempt to an outcome, in the event loop, a thread or a process."""
