"""What this process is made of: its descriptors, standard streams, signals and CPUs, and what its forks inherit."""
