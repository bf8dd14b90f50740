"""For applications that configure their own logging: the public name of `pgworkd.words.log`."""

from __future__ import annotations

from pgworkd.words.log import JobFilter, add_job

__all__ = ["JobFilter", "add_job"]
