"""Waiting for the results of jobs: the public name of `pgworkd.client.results`."""

from __future__ import annotations

from pgworkd.client.results import Found, JobFailed, JobUnknown, Results

__all__ = ["Found", "JobFailed", "JobUnknown", "Results"]
