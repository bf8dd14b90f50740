"""The driver is told the types of arrays, and no connection of a daemon asks for them."""

from __future__ import annotations

from typing import Any

import asyncpg
import pytest

from pgworkd import App, PermanentError
from pgworkd.database.array_types import ARRAYS, register
from tests.kits.daemon import insert, running

SAMPLES = {
    "bool": "{t,f,NULL}",
    "int2": "{1,-32768,NULL}",
    "int4": "{1,-2147483648,NULL}",
    "int8": "{1,-9223372036854775808,NULL}",
    "float4": "{0.5,Infinity,NULL}",
    "float8": "{0.1,-Infinity,NULL}",
    "timestamptz": "{2027-01-31T07:00Z,infinity,NULL}",
    "uuid": "{00000000-0000-0000-0000-000000000007,NULL}",
    "jsonb": '{1,null,NULL,"{}"}',
}


async def test_they_are_those_of_the_server(db: asyncpg.Connection[Any]) -> None:
    rows = await db.fetch(
        """SELECT a.oid, a.typname, e.typname AS element, e.oid AS element_oid
           FROM pg_type a JOIN pg_type e ON e.oid = a.typelem WHERE a.oid = ANY ($1::text::oid[])""",
        f"{{{','.join(map(str, ARRAYS))}}}",
    )
    found = {row["oid"]: (row["typname"], row["element"], row["element_oid"]) for row in rows}
    assert found == {oid: (f"_{name}", name, element) for oid, (name, element) in ARRAYS.items()}


@pytest.mark.parametrize("name", [name for name, _ in ARRAYS.values()])
async def test_values_travel_as_if_the_driver_had_asked(dsn: str, name: str) -> None:
    asking, told = await asyncpg.connect(dsn), await asyncpg.connect(dsn)
    register(told)
    values = await asking.fetchval(f"SELECT '{SAMPLES[name]}'::{name}[]")
    assert await told.fetchval(f"SELECT '{SAMPLES[name]}'::{name}[]") == values
    assert await told.fetchval(f"SELECT $1::{name}[] = '{SAMPLES[name]}'", values) is True
    assert await told.fetchval(f"SELECT $1::{name}[] = '{{}}'", []) is True
    await asking.close()
    await told.close()


@pytest.mark.parametrize(
    ("event", "error"), [("job.completed", None), ("job.failed", ValueError), ("job.dead", PermanentError)]
)
async def test_no_connection_of_a_daemon_asks(
    dsn: str,
    db: asyncpg.Connection[Any],
    monkeypatch: pytest.MonkeyPatch,
    event: str,
    error: type[Exception] | None,
) -> None:
    asking: list[Any] = []
    ask = asyncpg.Connection._introspect_types  # type: ignore[attr-defined]

    async def asked(self: Any, oids: Any, limit_s: Any) -> Any:
        asking.extend(oids if self is not db else [])
        return await ask(self, oids, limit_s)

    monkeypatch.setattr(asyncpg.Connection, "_introspect_types", asked)
    app = App()

    @app.handler("q")
    async def q(payload: dict[str, Any]) -> None:
        if error is not None:
            raise error

    async with running(app, dsn) as (_, recorder):
        await insert(db, "q")
        await recorder.wait(event)
    assert asking == []
