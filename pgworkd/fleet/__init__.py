"""Several daemons as one: `--processes`, autoscaling, systemd, and children that end with their parent."""
