"""Fixtures of several files here."""

from __future__ import annotations

from tests.kits.traces import spans

__all__ = ["spans"]
