"""`python -m benchmarks.cliffs`: what operations cost beside a crowd of unrelated rows, against the same without it."""
