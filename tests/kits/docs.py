"""Pages of README.md and docs/, as far as their tests need to understand Markdown: code blocks, headings, links."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
NAMES = [str(path.relative_to(ROOT)) for path in PAGES]

_FENCE = re.compile(r"(?ms)^(?P<mark><!-- output -->\n)?```(?P<language>\w*)\n(?P<text>.*?)^```$")
_HEADING = re.compile(r"(?m)^#{1,6} (.+)$")
_LINK = re.compile(r"!?\[(?:[^\]\[]|\[[^\]]*\])*\]\(([^)\s]+)\)")
_MODULE = re.compile(r"# ((?:\w+/)*\w+\.py)\n")


@dataclass(frozen=True)
class Block:
    """A fenced block of code."""

    page: str
    line: int
    language: str
    text: str
    is_output: bool
    """It shows what the block before it prints: the line `<!-- output -->` stands above."""

    @property
    def name(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def module(self) -> str | None:
        """The file that the block is, if its first line names one: `# notes/jobs.py`."""
        found = _MODULE.match(self.text) if self.language == "python" else None
        return found[1] if found else None


def text(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def line_of(whole: str, at: int) -> int:
    return whole.count("\n", 0, at) + 1


def blocks(page: str) -> list[Block]:
    """The blocks of a page, in order."""
    whole = text(page)
    return [
        Block(page, line_of(whole, found.start("language")), found["language"], found["text"], bool(found["mark"]))
        for found in _FENCE.finditer(whole)
    ]


def prose(page: str) -> str:
    """A page without its blocks and its `code`."""
    return re.sub(r"`[^`\n]*`", "", _FENCE.sub("", text(page)))


def anchors(page: str) -> set[str]:
    """What links to headings of a page may end in, by the rule of GitHub and GitLab."""
    found: set[str] = set()
    for heading in _HEADING.findall(_FENCE.sub("", text(page))):
        plain = re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")
        number = 0
        while (anchor := f"{plain}-{number}" if number else plain) in found:
            number += 1
        found.add(anchor)
    return found


def links(page: str) -> list[str]:
    """Where the links of a page lead."""
    return _LINK.findall(_FENCE.sub("", text(page)))


def section(page: str, heading: str) -> str:
    """What stands under a heading, up to the next one of any level."""
    parts = re.split(r"(?m)^#{1,6} ", text(page))
    return next(part for part in parts if part.startswith(heading + "\n"))


def table(page: str, heading: str) -> list[list[str]]:
    """The cells of the first table under a heading, without its head."""
    rows = [line for line in section(page, heading).splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]] for row in rows[2:]]
