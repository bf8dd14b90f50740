"""Tests of daemons, clients and commands."""

import pytest

pytest.register_assert_rewrite("tests.engine.bad_inputs")  # its failing asserts are explained like those of tests
