"""The types of arrays that our statements use, told to the driver when it has connected.

asyncpg knows the types of plain values, but looks up each type of array in the catalog, once per connection: with a
query that costs the server several times what a login does, when hundreds of daemons come back after a failover. The
OIDs are part of Postgres (src/include/catalog/pg_type.dat), the same in every database of every version.
"""

from __future__ import annotations

from typing import Any

ARRAYS = {
    1000: ("bool", 16),
    1005: ("int2", 21),
    1007: ("int4", 23),
    1016: ("int8", 20),
    1021: ("float4", 700),
    1022: ("float8", 701),
    1185: ("timestamptz", 1184),
    2951: ("uuid", 2950),
    3807: ("jsonb", 3802),
}
"""Types of arrays by OID: the name and the OID of the type of the elements."""
_OTHERS = ("basetype", "range_subtype", "attrtypoids", "attrnames", "basetype_name", "range_subtype_name")
_ROWS = [
    {"oid": oid, "ns": "pg_catalog", "name": f"_{name}", "kind": b"b", "elemtype": element, "elemtype_name": name}
    | {"elemdelim": ",", "depth": 0}
    | dict.fromkeys(_OTHERS)
    for oid, (name, element) in ARRAYS.items()
]
"""The types of arrays, as the driver's own query returns them (`asyncpg.introspection`)."""


def register(connection: Any) -> None:
    """Tells a connection of asyncpg the types. One whose settings cannot be told asks for them, as it would anyway."""
    if (tell := getattr(connection.get_settings(), "register_data_types", None)) is not None:
        tell(_ROWS)
