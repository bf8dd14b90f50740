"""The house: imports go down the floors only, rooms stay small, and some doors stay shut."""

from __future__ import annotations

import ast
import functools
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "pgworkd"

BELOW = {
    "process": "",
    "errors": "",
    "core": "process errors",
    "log": "process core",
    "settings": "process errors core",
    "database": "process errors core settings",
    "embedded": "process errors",
    "client": "errors core database",
    "results": "client",
    "engine": "process errors core log database client",
    "engine/settle": "errors core database engine",
    "engine/run": "process errors core log database engine engine/settle",
    "engine/claim": "errors core database engine engine/settle engine/run",
    "engine/wake": "errors core database engine engine/claim",
    "engine/life": """process errors core log settings database engine engine/settle engine/run engine/claim
                      engine/wake""",
    "admin": "errors core settings database client",
    "metrics": "process errors core log settings database client admin engine engine/life",
    "alerts": "process errors core settings database client admin engine",
    "gateway": "",
    "gateway/workers": """errors core settings database engine engine/settle engine/run engine/claim engine/wake
                 engine/life""",
    "push": "process errors core log settings",
    "gateway/api/models": "errors core settings client admin",
    "gateway/api/request": """process errors core log database client admin engine/life metrics gateway/workers
                       gateway/api/models""",
    "gateway/api/routes": """errors core settings database client admin metrics gateway/workers push gateway/api/models
                      gateway/api/request""",
    "dashboard": "errors core database admin gateway/api/request",
    "dashboard/draw": "core admin",
    "dashboard/pages": """errors core settings client admin gateway/api/models gateway/api/request gateway/api/routes
                       dashboard dashboard/draw""",
    "options": "errors core settings database engine/life gateway/api/request",
    "gateway/api": """process errors core settings database options gateway/api/request gateway/api/routes dashboard
                   dashboard/pages""",
    "remote": "process errors core database engine engine/claim engine/life",
    "push/daemon": "errors core database engine engine/run engine/life push",
    "http": "gateway/api",
    "app": "errors core engine alerts push",
    "processes": "process errors core log settings database admin engine/run engine/life metrics",
    "tracing": "errors core",
    "bench": "process errors core database client admin engine/life app remote",
    "cli": """process errors core log settings database options embedded client admin engine engine/run engine/life
              metrics bench alerts processes tracing gateway/api gateway/api/request remote push push/daemon""",
    "__init__": "errors core database engine engine/life app",
    "demo": "process errors core database embedded client engine/life __init__",
    "conformance": "process errors core database embedded admin",
}
"""What each folder, and each file beside them, may import: what stands above it, never the other way round."""

CONTRACT = ROOT / "schema.sql"
CHAPTERS = sorted(path for path in (PACKAGE / "sql").rglob("*.sql") if path.name != "grants.sql")
FILE_LINES_MAX = 350
FUNCTION_LINES_MAX = 60
PARAMETERS_MAX = 8
OPTIONS_OF = ("cli/", "gateway/api/routes/", "dashboard/pages/", "engine/registry.py", "app.py")
"""Where parameters are what a user writes: options of commands, members of queries, keywords of `App`'s methods."""
LEANING = re.compile(
    r"(the )?same\b|(those|these|they|them|their|it|its|of|and|also|such|until|never|nothing)\b"
    r"|(all|none|one|each) of (it|them|those|these)\b|as (of )?`|\w+ (it|them)\.$|\.\.\.",
    re.IGNORECASE,
)
"""How a docstring begins that cannot be read without what stands beside it."""

MODULES = sorted(PACKAGE.rglob("*.py"))
SOURCES = [
    *MODULES,
    *sorted(path for path in (ROOT / "tests").rglob("*.py") if "node_modules" not in path.parts),
    *sorted((ROOT / "benchmarks").rglob("*.py")),
]


@functools.cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _folder(module: str) -> str:
    """The folder that a dotted name below `pgworkd` belongs to, or the file beside the folders."""
    path = PACKAGE.joinpath(*module.split("."))
    while path != PACKAGE and not path.is_dir():
        if path.parent == PACKAGE:
            return path.name if path.with_suffix(".py").is_file() else "__init__"  # a public name, such as App
        path = path.parent
    return path.relative_to(PACKAGE).as_posix() if path != PACKAGE else "__init__"


def _imports(path: Path) -> set[str]:
    """Folders of the package that this file imports from, wherever in the file; lazy imports count too."""
    modules: set[str] = set()
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            modules |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
    return {_folder(module.removeprefix("pgworkd.")) for module in modules if module.startswith("pgworkd.")}


def _foreign(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.ImportFrom) and node.level == 0:
            found.add((node.module or "").split(".")[0])
        elif isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
    return found


def test_imports_go_down_only() -> None:
    wrong = []
    for path in MODULES:
        here = _folder(".".join(path.relative_to(PACKAGE).with_suffix("").parts))
        allowed = {here, *BELOW.get(here, "").split()}
        wrong += [f"{path.relative_to(ROOT)} imports from {each}" for each in sorted(_imports(path) - allowed)]
    assert not wrong


def test_the_table_of_folders_is_in_order_and_complete() -> None:
    found = {path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*") if (path / "__init__.py").exists()}
    found |= {path.stem for path in PACKAGE.glob("*.py")}
    assert set(BELOW) == found
    seen: set[str] = set()
    for folder, below in BELOW.items():
        assert set(below.split()) <= seen, f"{folder} may import only what stands above it"
        seen.add(folder)


def test_no_class_name_stands_for_two_classes() -> None:
    found: dict[str, list[str]] = {}
    for path in MODULES:
        for node in ast.walk(_tree(path)):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(path.relative_to(PACKAGE).as_posix())
    assert not {name: places for name, places in found.items() if len(places) > 1}


def test_files_and_functions_stay_small() -> None:
    large = []
    for path in SOURCES:
        name, lines = path.relative_to(ROOT), len(path.read_text(encoding="utf-8").splitlines())
        large += [f"{name}: {lines} lines"] if lines > FILE_LINES_MAX else []
        for function in _functions(_tree(path)):
            lines = (function.end_lineno or 0) - function.lineno + 1
            large += [f"{name}: {function.name} has {lines} lines"] if lines > FUNCTION_LINES_MAX else []
    assert not large


def _functions(node: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """All functions below; expressions hold none, and to walk them, too, takes most of the time."""
    for block in ("body", "orelse", "finalbody", "handlers", "cases"):
        for each in getattr(node, block, ()):
            if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef):
                yield each
            yield from _functions(each)


def test_no_tuple_is_unpacked_to_save_lines() -> None:
    found = []
    for path in SOURCES:
        if re.search(r"(?<![\w)\]*])\*[(\[{]", path.read_text(encoding="utf-8")):  # else it need not be walked
            starred = [node for node in ast.walk(_tree(path)) if isinstance(node, ast.Starred)]
            literal = [node for node in starred if isinstance(node.value, ast.Tuple | ast.List | ast.Set)]
            found += [f"{path.relative_to(ROOT)}:{node.lineno}" for node in literal]
    assert not found


def test_parameter_lists_stay_short() -> None:
    long = []
    for path in MODULES:
        name = path.relative_to(PACKAGE).as_posix()
        for function in _functions(_tree(path)) if not name.startswith(OPTIONS_OF) else ():
            given = function.args
            parameters = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
            count = len([each for each in parameters if each is not None and each.arg not in ("self", "cls")])
            long += [f"{name}: {function.name} has {count} parameters"] if count > PARAMETERS_MAX else []
    assert not long


def _docstrings(node: ast.AST) -> Iterator[ast.Constant]:
    """All docstrings below, and the texts that follow assignments."""
    for block in ("body", "orelse", "finalbody", "handlers", "cases"):
        for each in getattr(node, block, ()):
            value = each.value if isinstance(each, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield value
            yield from _docstrings(each)


def test_docstrings_stand_alone() -> None:
    leaning = []
    for path in MODULES:
        for text in _docstrings(_tree(path)):
            if LEANING.match(text.value.strip()):
                leaning += [f"{path.relative_to(ROOT)}:{text.lineno}: {text.value.splitlines()[0]}"]
    assert not leaning


def test_only_database_imports_a_driver() -> None:
    drivers = {"asyncpg", "psycopg", "sqlalchemy", "django"}
    others = [path for path in MODULES if path.parent.name != "database"]
    assert not [path.stem for path in others if _foreign(path) & drivers]


def test_our_own_lines_are_written_by_our_own_logger() -> None:
    """An application may have configured structlog: `log.logger()` is ours all the same."""
    callers = [path for path in MODULES if "structlog.get_logger" in path.read_text(encoding="utf-8")]
    assert [path.relative_to(PACKAGE).as_posix() for path in callers] == ["log/__init__.py"]


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


def test_every_function_and_view_of_the_schema_says_what_it_does() -> None:
    silent = []
    for path in [CONTRACT, *CHAPTERS]:
        lines = path.read_text(encoding="utf-8").splitlines()
        for number, line in enumerate(lines):
            if line.startswith(("CREATE FUNCTION", "CREATE OR REPLACE FUNCTION", "CREATE OR REPLACE VIEW")):
                silent += [] if lines[number - 1].startswith("-- ") else [f"{path.name}:{number + 1}"]
    assert not silent


def test_the_contract_can_be_read_in_twenty_minutes_and_no_chapter_is_long() -> None:
    large = []
    for path in [CONTRACT, *CHAPTERS]:
        lines = path.read_text(encoding="utf-8").splitlines()
        large += [f"{path.name}: {len(lines)} lines"] if len(lines) > (650 if path == CONTRACT else 400) else []
        large += [
            f"{path.name}:{number}: {len(line)} columns" for number, line in enumerate(lines, 1) if len(line) > 100
        ]
        header = next(number for number, line in enumerate(lines) if not line.startswith("--"))
        large += [] if 1 <= header <= 40 else [f"{path.name}: a header of {header} lines"]
    assert not large


def test_the_contract_includes_every_chapter_once_in_the_order_of_their_numbers() -> None:
    text = CONTRACT.read_text(encoding="utf-8")
    included = re.findall(r"^\\ir pgworkd/sql/(\S+)$", text, re.M)
    assert sorted(included) == [path.relative_to(PACKAGE / "sql").as_posix() for path in CHAPTERS]
    assert [name for name in included if "/" not in name] == sorted(name for name in included if "/" not in name)
    commands = [line for line in text.splitlines() if line.startswith("\\") or line in ("BEGIN;", "COMMIT;")]
    assert commands[:2] == ["\\set ON_ERROR_STOP on", "BEGIN;"], "psql commits what stands before a missing file"
    assert commands[-1] == "COMMIT;"


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
        "CONTRIBUTING.md",
        "CHANGELOG.md",
    }
    assert {name for name in names if not name.startswith(".")} <= agreed
