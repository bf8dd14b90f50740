"""`pgworkd grants` without a database."""

from __future__ import annotations

import pytest

from pgworkd.database import grants
from tests.kits.cli import clean, run_bare

__all__ = ["clean"]  # a fixture


def test_grants_prints_the_sql_for_the_default_roles_without_a_database() -> None:
    result = run_bare("grants")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == grants.text({role: f"pgworkd_{role}" for role in grants.ROLES})


@pytest.mark.parametrize("role", grants.ROLES)
def test_each_role_can_be_renamed(role: str) -> None:
    result = run_bare("grants", f"--{role}", 'My "Role"')
    assert f'SET LOCAL pgworkd.{role} = "My ""Role""";' in result.stdout
    assert f"pgworkd_{role}" not in result.stdout


@pytest.mark.parametrize("name", ["", "a" * 64, "a\0b", "public", "pgworkd_worker"])
def test_an_invalid_role_name_is_refused_in_one_line(name: str) -> None:
    result = run_bare("grants", "--reader", name)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("pgworkd: ")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("role", grants.ROLES)
def test_a_dsn_given_as_a_role_is_refused_without_showing_its_password(role: str) -> None:
    result = run_bare("grants", f"--{role}", "postgresql://u:c4n4ry@db.example.com/app")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == (
        f"pgworkd: the {role}'s name looks like the address of a database: give the role's name alone\n"
    )
