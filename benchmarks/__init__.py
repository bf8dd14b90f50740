"""`python -m benchmarks`: pgworkd against bare Postgres and its peers, on the same server in the same run."""
