"""For applications that configure their own logging: the public name of `pgworkd.core.log`."""

from __future__ import annotations

from pgworkd.core.log import JobFilter, add_job

__all__ = ["JobFilter", "add_job"]
