"""`pgworkd grants`, typed without a database."""

from __future__ import annotations

import pytest

from pgworkd.database import grants
from tests.engine.test_cli import clean, run_bare

__all__ = ["clean"]  # a fixture


def test_it_prints_the_sql_for_the_usual_names_and_needs_no_database() -> None:
    result = run_bare("grants")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == grants.text({role: f"pgworkd_{role}" for role in grants.ROLES})


@pytest.mark.parametrize("role", grants.ROLES)
def test_each_role_may_be_called_otherwise(role: str) -> None:
    result = run_bare("grants", f"--{role}", 'My "Role"')
    assert f'SET LOCAL pgworkd.{role} = "My ""Role""";' in result.stdout
    assert f"pgworkd_{role}" not in result.stdout


@pytest.mark.parametrize("name", ["", "a" * 64, "a\0b", "public", "pgworkd_worker"])
def test_a_name_that_cannot_be_is_refused_in_one_line(name: str) -> None:
    result = run_bare("grants", "--reader", name)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("pgworkd: ")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("role", grants.ROLES)
def test_an_address_in_a_role_s_place_is_refused_and_its_password_goes_nowhere(role: str) -> None:
    result = run_bare("grants", f"--{role}", "postgresql://u:c4n4ry@db.example.com/app")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == (
        f"pgworkd: the {role}'s name looks like the address of a database: give the role's name alone\n"
    )
