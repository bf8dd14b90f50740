"""Wake: finding out that jobs are due, for pools that are idle."""
