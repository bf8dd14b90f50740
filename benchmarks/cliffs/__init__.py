"""`python -m benchmarks.cliffs`: what work costs beside a crowd that should not matter, against the same without it."""
