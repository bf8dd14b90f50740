"""A pooler in transaction mode between daemon and Postgres is reported as an error, not as an outage."""

from __future__ import annotations

import asyncpg
import pytest

from pgworkd.database.driver_errors import translate
from pgworkd.errors import UsageError


@pytest.mark.parametrize(
    "error",
    [
        asyncpg.DuplicatePreparedStatementError('prepared statement "__asyncpg_stmt_1__" already exists'),
        asyncpg.InvalidSQLStatementNameError('prepared statement "__asyncpg_stmt_1__" does not exist'),
    ],
)
def test_a_pooler_in_transaction_mode_is_recognised(error: asyncpg.PostgresError) -> None:
    said = translate(error)
    assert isinstance(said, UsageError)
    assert "the address of Postgres itself" in str(said)
