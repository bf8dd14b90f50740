"""Build and test dependencies: pinned by hash, in step with pyproject.toml, audited for known vulnerabilities."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent.parent
LOCK = (ROOT / ".ci" / "requirements.txt").read_text(encoding="utf-8")
HASHES = r"(?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+"
PIN = re.compile(r"^([a-z0-9._-]+)==(\S+)(?: ; .+)? \\\n" + HASHES, re.MULTILINE)


def pins() -> dict[str, list[str]]:
    """Versions by package: more than one if they depend on the Python version."""
    found: dict[str, list[str]] = {}
    for name, version in PIN.findall(LOCK):
        found.setdefault(canonicalize_name(name), []).append(version)
    return found


def wanted() -> list[Requirement]:
    """All packages that pyproject.toml names."""
    table = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    project = table["project"]
    extras = [each for extra in project["optional-dependencies"].values() for each in extra]
    named = [Requirement(each) for each in (*project["dependencies"], *extras, *table["build-system"]["requires"])]
    return [each for each in named if each.name != project["name"]]


@pytest.mark.parametrize("requirement", wanted(), ids=str)
def test_the_lock_file_matches_pyproject(requirement: Requirement) -> None:
    versions = pins().get(canonicalize_name(requirement.name), [])
    assert versions, "not in .ci/requirements.txt: make it anew by the command at its top"
    assert all(requirement.specifier.contains(version) for version in versions), versions


def test_every_requirement_in_the_lock_file_is_pinned_with_hashes() -> None:
    rest = PIN.sub("", LOCK)
    assert all(not line or line.lstrip().startswith("#") for line in rest.splitlines()), rest
    assert "editables" in pins(), "an editable install without build isolation needs it"


def test_the_lock_file_documents_its_command_without_local_paths() -> None:
    assert "uv pip compile --universal" in LOCK.splitlines()[1]
    assert "://" not in LOCK
    assert "index" not in LOCK.lower()


@pytest.fixture(scope="module")
def audit() -> Any:
    """.ci/audit as a module."""
    loader = importlib.machinery.SourceFileLoader("audit", str(ROOT / ".ci" / "audit"))
    spec = importlib.util.spec_from_loader("audit", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


CLEAN = {"name": "a", "version": "1", "vulns": []}
BAD = {"name": "b", "version": "2", "vulns": [{"id": "PYSEC-1"}, {"id": "GHSA-2"}]}
SKIPPED = {"name": "c", "skip_reason": "Dependency not found on PyPI and could not be audited"}


@pytest.mark.parametrize(
    ("packages", "code", "line"),
    [
        ([CLEAN], 0, "no known vulnerability in 1 packages"),
        ([CLEAN, BAD], 1, "b 2: PYSEC-1\nb 2: GHSA-2"),
        ([SKIPPED, BAD], 1, "b 2: PYSEC-1\nb 2: GHSA-2"),
        ([SKIPPED, CLEAN], 1, "not audited: c"),
        ([], 1, "not audited: an empty lock"),
    ],
)
def test_a_vulnerability_is_never_reported_as_an_outage(audit: Any, packages: list[Any], code: int, line: str) -> None:
    assert audit.verdict(json.dumps({"dependencies": packages}), "Found 2 known vulnerabilities") == (
        code,
        line.splitlines(),
    )


@pytest.mark.parametrize(
    ("said", "code"),
    [
        ("Traceback ...\nrequests.exceptions.ProxyError: Max retries exceeded", 0),
        ("requests.exceptions.ConnectionError: Failed to resolve 'pypi.org'", 0),
        ("ERROR:pip_audit._cli:requirement x does not contain a hash", 1),
        ("", 1),
    ],
)
def test_only_an_unreachable_audit_service_is_tolerated(audit: Any, said: str, code: int) -> None:
    found, lines = audit.verdict("", said)
    assert found == code
    assert len(lines) == 1


RECORDS = {"a": ("1", []), "b": ("2", ["PYSEC-1"]), "c": ("9", ["GHSA-3"])}


@pytest.mark.parametrize(
    ("lock", "code", "line"),
    [
        ("a==1 \\\n    --hash=sha256:0\n", 0, "no known vulnerability in 1 packages, each the newest"),
        ("a==1 \\\nb==2 ; python_version < '3.12' \\\n", 1, "b 2: PYSEC-1"),
        (
            "a==1 \\\nc==8 \\\n",
            0,
            "no known vulnerability in 1 packages, each the newest; not audited, as there is a newer one: c 8",
        ),
        ("a==1 \\\ngone==1 \\\n", 0, "not audited: gone cannot be looked up (no such host)"),
        ("b==2 \\\ngone==1 \\\n", 1, "b 2: PYSEC-1"),
    ],
)
def test_the_newest_releases_are_audited_through_a_mirror(audit: Any, lock: str, code: int, line: str) -> None:
    def record(name: str) -> dict[str, Any]:
        if name not in RECORDS:
            raise OSError("no such host")
        version, bugs = RECORDS[name]
        return {"info": {"version": version}, "vulnerabilities": [{"id": bug} for bug in bugs]}

    assert audit.of_newest(lock, record) == (code, [line])
