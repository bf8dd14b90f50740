"""Links of README.md, docs/ and the other pages lead somewhere."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

import pytest

from tests.kits.docs import NAMES, ROOT, anchors, links, section, text

OTHERS = ["CHANGELOG.md", "SECURITY.md", "benchmarks/README.md"]


@pytest.mark.parametrize("page", [*NAMES, *OTHERS])
def test_links_lead_somewhere(page: str) -> None:
    """Those to files and headings of this project; others are looked at, not followed."""
    wrong = [link for link in links(page) if not _leads(page, link)]
    assert not wrong


def _leads(page: str, link: str) -> bool:
    parts = urlsplit(link)
    if parts.scheme:
        return parts.scheme == "https" and "." in parts.netloc and parts.netloc == parts.netloc.lower()
    path = (ROOT / page).parent / parts.path if parts.path else ROOT / page
    if not path.exists() or not path.resolve().is_relative_to(ROOT):
        return False
    return not parts.fragment or parts.fragment in anchors(str(path.resolve().relative_to(ROOT)))


def test_ten_questions_are_answered_within_two_links_of_the_readme() -> None:
    assert "docs/README.md#find-it" in links("README.md")
    _, *questions = section("docs/README.md", "Find it").split("\n- ")
    assert len(questions) == 10
    for question in questions:
        answers = re.findall(r"\]\(([^)]+)\)", question)
        assert answers, question
        assert all(_leads("docs/README.md", each) for each in answers), question


@pytest.mark.parametrize("picture", sorted(path.name for path in (ROOT / "docs").glob("*.svg")))
def test_a_picture_stands_on_a_page_in_words_too_and_is_drawn_for_the_dark(picture: str) -> None:
    words = [found for page in NAMES for found in re.findall(rf"!\[([^\]]+)\]\({picture}\)", text(page))]
    assert [len(each) > 40 for each in words] == [True]
    drawn = text(f"docs/{picture}")
    assert "<title>" in drawn
    assert "@media (prefers-color-scheme: dark)" in drawn


def test_the_index_names_every_page() -> None:
    listed = {link for link in links("docs/README.md") if "/" not in link}
    assert listed >= {page.removeprefix("docs/") for page in NAMES if page.startswith("docs/")} - {"README.md"}
