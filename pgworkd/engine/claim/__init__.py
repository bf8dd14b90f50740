"""Claim: how many jobs to take, from where in the queue, and whether to be notified or to poll meanwhile."""
