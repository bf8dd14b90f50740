"""Several workers on one host: `--processes` (supervisor), autoscale (autoscaler, workers), systemd, parent guard."""
