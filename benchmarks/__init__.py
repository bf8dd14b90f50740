"""`python -m benchmarks`: pgworkd beside what bare Postgres and its peers do, on the same server in the same run."""
