"""What the pages say of settings, commands, events, functions and figures is what the project has."""

from __future__ import annotations

import itertools
import json
import re
from typing import Any

import asyncpg
import pytest
import typer

from pgworkd import errors
from pgworkd.cli.app import app as cli
from pgworkd.database import schema
from pgworkd.database.grants import ROLES
from pgworkd.settings import queue
from pgworkd.settings.config import Settings
from tests.kits.boards import rules
from tests.kits.docs import HTTP, NAMES, ROOT, SETTINGS, WATCHING, section, table, text, with_tables

README_LINES_MAX = 220
DEVELOPING = (
    "python3 -m venv .venv && .venv/bin/pip install -e '.[embedded,http]' && .venv/bin/pgworkd demo --seconds 20",
    "python3 -m venv .venv && .venv/bin/pip install -e '.[dev]' && .venv/bin/pytest",
)


def test_the_readme_is_a_page() -> None:
    lines = text("README.md").splitlines()
    assert len(lines) <= README_LINES_MAX
    assert all(line in lines for line in DEVELOPING)


def test_the_changelog_has_the_version_of_the_schema_and_the_number_of_roles() -> None:
    words = " ".join(text("CHANGELOG.md").split())
    count = ("no", "one", "two", "three", "four", "five", "six")[len(ROLES)]
    assert re.findall(r"schema is at version (\d+)", words) == [str(schema.VERSION)]
    assert re.findall(r"(\w+) roles with the least privileges", words) == [count.title()]


@pytest.mark.parametrize("page", [HTTP, SETTINGS, WATCHING])
def test_generated_tables_are_up_to_date(page: str) -> None:
    """If one is not: `python -m tests.kits.docs`."""
    assert text(page) == with_tables(page)


def test_every_alert_is_in_the_table() -> None:
    assert {row[0].strip("`") for row in table(WATCHING, "Alert rules")} == {rule.name for rule in rules()}


def test_settings_of_queues_are_all_there() -> None:
    named = set(re.findall(r"`(\w+)`", "".join(row[0] for row in table("docs/settings.md", "Queues"))))
    assert named == {*queue.SETTINGS, *queue.BOUNDS, "paused_until"}


@pytest.mark.parametrize("page", [*NAMES, "SECURITY.md"])
def test_defaults_in_parentheses_are_those_of_the_settings(page: str) -> None:
    told = re.findall(r"`(\w+)`(?:\]\([^)]*\))? \(([\d.,]+)(?: [a-z]+)?\)", text(page))
    defaults = {name: field.default for name, field in Settings.model_fields.items()}
    assert not [each for each in told if each[0] in defaults and float(each[1].replace(",", "")) != defaults[each[0]]]


def commands() -> dict[str, Any]:
    """Every command that does something, by what is typed after `pgworkd`."""
    found: dict[str, Any] = {}
    todo = [("", typer.main.get_command(cli))]
    while todo:
        path, command = todo.pop()
        below = getattr(command, "commands", {})
        todo += [(f"{path} {name}".strip(), each) for name, each in below.items()]
        if path and (not below or getattr(command, "invoke_without_command", False)):
            found[path] = command
    return found


COMMANDS = commands()
OPTION = re.compile(r"`(--?[a-z][a-z-]*)")
FILTERED = {"retry", "cancel", "discard"}


def described() -> dict[str, str]:
    """The rows of docs/cli.md by command; with the table of filters for commands that take those."""
    rows: dict[str, str] = {}
    filters = section("docs/cli.md", "Many jobs at once").split("```")[0]
    for line in text("docs/cli.md").splitlines():
        for cell in re.findall(r"`([a-z][^`]*)`", line.split("|")[1]) if line.startswith("| `") else ():
            command = " ".join(itertools.takewhile(lambda word: re.fullmatch("[a-z-]+", word), cell.split()))
            rows[command] = line.split("|")[2] + (filters if command in FILTERED else "")
    return rows


def test_every_command_is_described() -> None:
    assert described().keys() == COMMANDS.keys()


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_the_options_of_a_command_are_described(command: str) -> None:
    options = {name for param in COMMANDS[command].params for name in (*param.opts, *param.secondary_opts)}
    options = {name for name in options if name.startswith("-")} - {"--help", "-h", "--dsn"}
    assert set(OPTION.findall(described()[command])) == options


@pytest.mark.parametrize("page", NAMES)
def test_every_command_of_a_page_exists(page: str) -> None:
    first = {command.split()[0] for command in COMMANDS} | {"--version"}
    used = set(re.findall(r"(?m)(?:^|`|\$ )pgworkd ([a-z-]+)", text(page)))
    assert used <= first


EVENT = re.compile(
    r"`((?:daemon|database|jobs|kind|lease|orphans|outcomes?|process|queue|reload|rows|schedule|schema|settings|settle|shutdown"
    r"|worker)\.(?!py|sql)[a-z]+)`"
)
SOURCES = "\n".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "pgworkd").rglob("*.py")))


@pytest.mark.parametrize("page", NAMES)
def test_events_of_the_log_exist(page: str) -> None:
    named = set(EVENT.findall(text(page)))
    if page == "docs/operating.md":
        named |= set(re.findall(r"`([a-z]+\.[a-z]+)`", "".join(row[0] for row in table(page, "Log"))))
    assert not [name for name in named if f'"{name}"' not in SOURCES]


def test_exceptions_exist() -> None:
    rows = table("docs/sql-contract.md", "Exceptions in Python") + table("docs/sql-contract.md", "Error codes")
    named = {name for row in rows for name in re.findall(r"`([A-Z]\w+[a-z])`", "".join(row)) if name != "Results"}
    assert named
    assert not [name for name in named if not hasattr(errors, name)]


async def test_functions_and_views_exist(db: asyncpg.Connection[None]) -> None:
    tables = [*table("docs/sql-contract.md", "For applications"), *table("docs/sql-contract.md", "For operators")]
    named = {name for row in tables for name in re.findall(r"`(\w+)\(", row[0])}
    views = set(re.findall(r"`(\w+)`", "".join(row[0] for row in table("docs/sql-contract.md", "Views"))))
    known = await db.fetch("SELECT proname FROM pg_proc WHERE pronamespace = 'pgworkd'::regnamespace")
    relations = await db.fetch("SELECT relname FROM pg_class WHERE relnamespace = 'pgworkd'::regnamespace")
    assert named <= {name for (name,) in known}
    assert views <= {name for (name,) in relations}


@pytest.mark.parametrize(
    ("what", "line", "ratio"),
    [
        ("drain 50,000 no-op jobs, history kept", ("drain", "history kept", "bare loop"), "{:.2f}"),
        ("the same", ("drain", "history kept", "graphile-tuned"), "{:.4f}"),
        ("latency from insert to handler, idle, p50", ("latency", "p50", "bare loop"), "{:.2f}"),
        ("drain beside 10,000,000 rows of history", ("finished", "10,000,000 rows of history", "no history"), "{:.2f}"),
        ("idle with ten queues", ("idle", "transactions a second, in total", ""), ""),
    ],
)
def test_figures_are_those_that_were_measured(what: str, line: tuple[str, str, str], ratio: str) -> None:
    lines = json.loads((ROOT / "benchmarks" / "results.json").read_text(encoding="utf-8"))["lines"]
    found = next(each for each in lines if (each["row"], each["what"], each["against"] or "") == line)
    row = next(cells for cells in table("README.md", "Speed") if cells[0] == what)
    assert _number(row[1]) == pytest.approx(found["ours_median"], rel=0.005)
    if ratio:
        assert _number(row[2].rpartition(": ")[2]) == pytest.approx(found["reference_median"], rel=0.005)
        assert row[3] == ratio.format(found["reached"])
    assert _number(row[4]) == found["bar"]["limit"]
    assert row[5] == {"holds": "met", "missed": "**missed**"}[found["verdict"]]


def test_ratios_of_the_benchmarks_are_those_that_were_measured() -> None:
    lines = json.loads((ROOT / "benchmarks" / "results.json").read_text(encoding="utf-8"))["lines"]
    reached = {f"{each['reached']:{form}}" for each in lines if each["reached"] for form in (".2f", ".4f", ".0f")}
    ratios = {row[3] for row in table("benchmarks/README.md", "Results")} - {""}
    assert ratios <= reached


def _number(cell: str) -> float:
    found = re.search(r"[\d.,]+", cell)
    assert found, cell
    return float(found[0].replace(",", ""))


DIALECT = re.compile(
    r"\b(hears?|heard|stray|taken for lost|asleep|awake|drowsy|leash|chores?|so (?:many|long)|but for|who \w+s is told"
    r"|bury|buried|unspent|spends nothing|what holds|code says)\b",
    re.IGNORECASE,
)


@pytest.mark.parametrize("page", [*NAMES, "SECURITY.md", "CHANGELOG.md"])
def test_the_field_s_english(page: str) -> None:
    """The words that docs/architecture.md explains, and none of a dialect of our own."""
    found = [f"{number}: {line}" for number, line in enumerate(text(page).splitlines(), 1) if DIALECT.search(line)]
    assert not found


def test_the_files_that_contributing_names_exist() -> None:
    named = set(re.findall(r"`((?:pgworkd|tests|docs|schema)[\w./-]*/?)`", text("CONTRIBUTING.md")))
    assert len(named) > 20
    assert not [name for name in sorted(named) if not (ROOT / name).exists()]
