"""What this process is made of: descriptors, streams, signals, CPUs and secrets, and what its forks inherit."""
