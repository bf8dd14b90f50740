"""Settings from any bytes, text or object: they are accepted, or rejected in one line that names the field."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pgworkd.errors import UsageError
from pgworkd.settings.config import Settings, load
from pgworkd.settings.file import parse_queues
from pgworkd.settings.shown import describe
from tests.kits.models import FUZZ, in_time, nowhere

__all__ = ["nowhere"]  # a fixture

RELATED = ("heartbeat_s (", "command_timeout_s (")
"""These are validated against lease_s, wherever that comes from."""
FIELDS = sorted(Settings.model_fields)
WORDS = st.one_of(
    st.text(),
    st.sampled_from(["1", "0", "-1", "1e400", "nan", "inf", "1_000", "٣", " 5 ", "10s", "true", "[]", "a=1,a=2"]),
    st.sampled_from(["postgresql://u:c4n4ry@h/db", "postgresql://", "a:b", "module:attribute", "debug", "JSON"]),
    st.just("[" * 9000),
    st.floats().map(str),
    st.integers().map(str),
)
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.one_of(WORDS, st.integers(), st.floats(), st.booleans(), st.dates(), st.binary(max_size=20)),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(), inner, max_size=4)),
    max_leaves=8,
)


def outcome(**flags: object) -> str | None:
    """The error line; None if the settings are valid, and then all of them can be shown."""
    with in_time():
        try:
            settings = load(**flags)
        except UsageError as error:
            assert error.__context__ is None
            assert "ydantic" not in str(error)
            assert "u:c4n4ry" not in str(error)
            return str(error)
        assert len(describe(settings)) == len(FIELDS)
        assert "u:c4n4ry" not in str(describe(settings))
        return None


@FUZZ
@given(st.one_of(st.binary(max_size=300), st.text().map(lambda text: text.encode("utf-8", "surrogatepass"))))
def test_any_file_is_accepted_or_rejected_in_one_line(data: bytes) -> None:
    Path("pgworkd.toml").write_bytes(data)
    try:
        line = outcome()
    finally:
        Path("pgworkd.toml").unlink()
    assert line is None or "pgworkd.toml" in line


@FUZZ
@given(st.dictionaries(st.one_of(st.sampled_from(FIELDS), st.text()), VALUES, min_size=1, max_size=4))
def test_any_toml_table_is_accepted_or_rejected_in_one_line(table: dict[str, Any]) -> None:
    lines = [f"{json.dumps(name)} = {toml(value)}" for name, value in table.items()]
    Path("pgworkd.toml").write_text("\n".join(lines), encoding="utf-8", errors="surrogatepass")
    try:
        line = outcome()
    finally:
        Path("pgworkd.toml").unlink()
    assert line is None or "pgworkd.toml" in line or line.startswith(RELATED)


def toml(value: object) -> str:
    """Nearly valid TOML, which must be rejected cleanly as well."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {toml(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    return json.dumps(value) if isinstance(value, (str, bool)) else str(value)


@FUZZ
@given(st.sampled_from(FIELDS), WORDS)
def test_any_environment_variable_is_accepted_or_rejected_in_one_line(name: str, text: str) -> None:
    value = os.fsdecode(text.replace("\0", "").encode("utf-8", "surrogatepass"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(f"PGWORKD_{name.upper()}", value)
        line = outcome()
    named = f"{name} (environment PGWORKD_{name.upper()}): "
    assert line is None or named in line or line.startswith(RELATED)


@FUZZ
@given(st.sampled_from(FIELDS), VALUES)
def test_any_flag_is_accepted_or_rejected_in_one_line(name: str, value: object) -> None:
    line = outcome(**{name: value})
    assert line is None or line.startswith((f"{name} (", *RELATED))


@FUZZ
@given(VALUES)
def test_any_queue_list_is_accepted_or_rejected_in_one_line(value: object) -> None:
    with in_time():
        try:
            queues = parse_queues(value)
        except ValueError as error:
            assert str(error)
            return
    assert parse_queues(queues) == queues
    assert parse_queues([name if most is None else f"{name}={most}" for name, most in queues.items()]) == queues or any(
        "=" in name or name.strip() != name or "," in name for name in queues
    )
