"""The house: imports go down the floors only, rooms stay small, and some doors stay shut."""

from __future__ import annotations

import ast
import functools
import re
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "pgworkd"

FLOORS = {
    0: (
        "bounds errors events failure payload backoff schedule config sources dsn grants job new_job outage log "
        "claims queue_settings registration remains safe_text session settle_sql tls"
    ),
    1: (
        "driver_errors link claim_connections store lease_store schedule_store insert_sql columns drivers batches "
        "workflow schema wake admin_sql queue_acts batch_acts key_acts schedule_acts doctor_sql acts refusals"
    ),
    2: (
        "streams app cancellation child processes held delayed payloads unknown_kinds runner cursor pace attention "
        "slots pool flushes settler lease membership chores recurring reporter hooks look live serving hearing "
        "contact options daemon"
    ),
    3: (
        "__init__ loader demo demo_jobs demo_downstream demo_view cli cli_acts cli_app cli_ask cli_batches cli_bulk "
        "cli_doctor cli_jobs cli_keys cli_look cli_queues cli_run cli_schedules cli_serve cli_signals cli_table "
        "cli_text cli_health supervisor leash crew autoscale cli_autoscale"
    ),
}
PARTS = "client results embedded systemd admin"
"""Optional companions: they know the words and the database, never the engine nor each other."""

FLOOR_OF = {module: floor for floor, modules in FLOORS.items() for module in modules.split()}
PART_NAMES = set(PARTS.split())
FILE_LINES_MAX = 350
FUNCTION_LINES_MAX = 60

MODULES = sorted(PACKAGE.glob("*.py"))
SOURCES = [*MODULES, *sorted((ROOT / "tests").rglob("*.py")), *sorted((ROOT / "benchmarks").rglob("*.py"))]


@functools.cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _imports(path: Path) -> set[str]:
    """Modules of the package that this one imports, wherever in the file; lazy imports count too."""
    found: set[str] = set()
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.ImportFrom) and (node.level == 1 or (node.module or "").split(".")[0] == "pgworkd"):
            module = (node.module or "").removeprefix("pgworkd").strip(".")
            found |= {module.split(".")[0]} if module else {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {a.name.split(".")[1] for a in node.names if a.name.startswith("pgworkd.")}
    return found


def _foreign(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.ImportFrom) and node.level == 0:
            found.add((node.module or "").split(".")[0])
        elif isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
    return found


def _wrong_import(name: str, imported: str) -> str | None:
    if name in PART_NAMES:
        return f"the part {name} imports {imported}" if FLOOR_OF.get(imported, 9) > 1 else None
    if imported in PART_NAMES:
        return f"{name} imports the part {imported}: only doors open parts" if FLOOR_OF[name] != 3 else None
    return f"{name} imports {imported} from a floor above" if FLOOR_OF[imported] > FLOOR_OF[name] else None


def test_imports_go_down_only() -> None:
    known = FLOOR_OF.keys() | PART_NAMES
    homeless = [path.stem for path in MODULES if path.stem not in known]
    assert not homeless, "give them a floor above"
    pairs = [(path.stem, imported) for path in MODULES for imported in sorted(_imports(path) & known)]
    assert not [wrong for pair in pairs if (wrong := _wrong_import(*pair))]


def test_every_floor_is_inhabited() -> None:
    named = set(FLOOR_OF) | PART_NAMES
    assert {path.stem for path in MODULES} == named, "the table of floors and the package differ"


def test_files_and_functions_stay_small() -> None:
    large = []
    for path in SOURCES:
        name, lines = path.relative_to(ROOT), len(path.read_text(encoding="utf-8").splitlines())
        large += [f"{name}: {lines} lines"] if lines > FILE_LINES_MAX else []
        for node in ast.walk(_tree(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or 0) - node.lineno + 1
                large += [f"{name}: {node.name} has {lines} lines"] if lines > FUNCTION_LINES_MAX else []
    assert not large


def test_only_the_link_speaks_to_the_driver() -> None:
    drivers = {"asyncpg", "psycopg", "sqlalchemy", "django"}
    others = [path for path in MODULES if path.stem not in ("link", "driver_errors")]
    assert not [path.stem for path in others if _foreign(path) & drivers]


def test_structured_concurrency_only() -> None:
    banned = {"create_task", "ensure_future", "wait_for", "gather", "run_in_executor"}
    used = []
    for path in MODULES:
        used += [(path.stem, node.attr) for node in ast.walk(_tree(path)) if isinstance(node, ast.Attribute)]
    assert not [pair for pair in used if pair[1] in banned]


def test_no_f_string_builds_a_statement() -> None:
    statement = re.compile(r"\b(SELECT|INSERT INTO|UPDATE|DELETE FROM)\b.*\b(pgworkd|FROM|SET|VALUES)\b", re.S)
    found = []
    for path in MODULES:
        for node in ast.walk(_tree(path)):
            if isinstance(node, ast.JoinedStr):
                text = "".join(v.value for v in node.values if isinstance(v, ast.Constant) and isinstance(v.value, str))
                found += [f"{path.stem}:{node.lineno}"] if statement.search(text) else []
    assert not found


def test_every_exception_from_a_security_rule_is_for_one_rule_and_says_why() -> None:
    wrong = []
    for path in MODULES:
        for line in path.read_text(encoding="utf-8").splitlines():
            bare = "nosec" in line and not re.search(r"# nosec B\d{3} # \w", line)
            wrong += [f"{path.stem}: {line}"] if bare or "noqa: S608" in line else []
    assert not wrong


def test_every_function_of_the_schema_says_what_it_does() -> None:
    lines = (ROOT / "schema.sql").read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines):
        if line.startswith(("CREATE FUNCTION", "CREATE OR REPLACE FUNCTION", "CREATE OR REPLACE VIEW")):
            assert lines[number - 1].startswith("-- "), f"schema.sql:{number + 1} says nothing about itself"


def test_the_schema_tells_its_story_in_forty_lines() -> None:
    lines = (ROOT / "schema.sql").read_text(encoding="utf-8").splitlines()
    header = next(number for number, line in enumerate(lines) if not line.startswith("--"))
    assert 10 < header <= 40


def test_the_top_level_holds_only_what_was_agreed() -> None:
    git = shutil.which("git")
    if git is None or not (ROOT / ".git").exists():  # an unpacked archive: everything in it was agreed
        names = {path.name for path in ROOT.iterdir() if not path.name.endswith(".egg-info")}
    else:
        tracked = subprocess.run([git, "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        names = {line.split("/")[0] for line in tracked.splitlines()}
    agreed = {
        "pyproject.toml",
        "README.md",
        "pgworkd",
        "schema.sql",
        "tests",
        "systemd",
        "benchmarks",
        "docs",
        "LICENSE",
        "SECURITY.md",
        "CHANGELOG.md",
    }
    assert {name for name in names if not name.startswith(".")} <= agreed
