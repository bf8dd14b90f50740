"""Life: the daemon from its start to its end, its registration, lease, queues, maintenance and schedules."""
