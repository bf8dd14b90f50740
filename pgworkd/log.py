"""The public name of `pgworkd.core.log`, for applications that configure their own logging."""

from __future__ import annotations

from pgworkd.core.log import JobFilter, add_job

__all__ = ["JobFilter", "add_job"]
