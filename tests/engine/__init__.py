"""Tests of daemons, clients and commands."""

import pytest

# Their failing asserts are explained like those of tests.
pytest.register_assert_rewrite(
    *(f"tests.engine.bad_{name}" for name in ("kit", "rows", "relations", "calls", "places", "handlers")),
    *(f"tests.engine.{name}" for name in ("bad_usage", "bad_settings", "usage_kit")),
)
