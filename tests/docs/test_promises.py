"""Each promise has a test in the fast lane: who breaks one sees it before anything is pushed."""

from __future__ import annotations

import re

import pytest

from tests.conftest import SLOW_WHOLE
from tests.kits.docs import ROOT, text

PROMISES = [
    paragraph.split("Shown by")
    for paragraph in text("docs/guarantees.md").partition("## What is not promised")[0].split("\n\n")
    if "Shown by" in paragraph
]
SLOW_TEST = "@pytest.mark.slow("


def in_fast_lane(file: str) -> bool:
    """Whether the lane has a test of this file."""
    text = (ROOT / file).read_text(encoding="utf-8")
    return "mark.fast" in text or (not SLOW_WHOLE.search(text) and text.count("def test_") > text.count(SLOW_TEST))


@pytest.mark.parametrize(("promise", "shown_by"), PROMISES, ids=[promise.strip("*\n")[:40] for promise, _ in PROMISES])
def test_the_fast_lane_has_a_test_that_shows_it(promise: str, shown_by: str) -> None:
    files = re.findall(r"\]\(\.\./(tests/[^)]+\.py)\)", shown_by)
    assert len(PROMISES) >= 21
    assert any(in_fast_lane(file) for file in files), "mark the quickest of its tests: @pytest.mark.fast"
