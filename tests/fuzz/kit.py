"""Shared by the fuzz tests: the number of examples, a time limit for each, and a directory without settings."""

from __future__ import annotations

import contextlib
import gc
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kits.daemon import examples

FUZZ = examples(200)
CASE_S_MAX = 1.0
"""CPU seconds within which any input must be accepted or rejected."""


@contextlib.contextmanager
def in_time() -> Iterator[None]:
    """Fails if the block takes too long."""
    gc.disable()  # collecting hypothesis' objects must not count as this example's time
    began_s = time.process_time()
    try:
        yield
    finally:
        took_s = time.process_time() - began_s
        gc.enable()
    assert took_s < CASE_S_MAX, f"took {took_s:.3f} s"


@pytest.fixture(autouse=True, scope="module")
def nowhere() -> Iterator[Path]:
    """An empty working directory and no PGWORKD_ variables, for all examples of a module."""
    before = Path.cwd()
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as directory:
        for name in list(os.environ):
            if name.upper().startswith("PGWORKD_") and name != "PGWORKD_TEST_EXAMPLES":
                patch.delenv(name)
        os.chdir(directory)
        yield Path(directory)
        os.chdir(before)
