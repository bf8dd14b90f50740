"""The statements with which application code inserts jobs and manages batches, in each driver's parameter style.

Those that insert jobs are made from `new_job.FIELDS`, in whose order their parameters stand.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from re import sub
from typing import NamedTuple

from pgworkd.client.new_job import FIELDS


class Statement(NamedTuple):
    """A statement in each style of parameters: $1, %s and :p1."""

    numbered: str
    format: str
    named: str


def styles(sql: str, **parts: str) -> Statement:
    """A statement whose parameters $1, $2, ... occur once each, in order; `parts`: what words in it stand for."""
    for word, part in parts.items():
        sql = sql.replace(word, part)
    return Statement(sql, sub(r"\$\d+", "%s", sql), sub(r"\$(\d+)", r":p\1", sql))


_TYPES = {field.parameter: field.type for field in FIELDS}
_SENT = {name: "text" if kind in ("timestamptz", "jsonb") else kind for name, kind in _TYPES.items()}
"""All values are sent as text or numbers: no codec or adapter of the caller for jsonb or uuid interferes."""
# By parameter, in the order of the inserts, which send payloads apart from the rest.
_INSERTED = ["payload", *(name for name in _TYPES if name != "payload")]
_COMPUTED = {
    "run_at": "coalesce({run_at}, pgworkd.clock() + make_interval(secs => coalesce({delay_s}, 0)))",
    "on_retry": "coalesce({on_retry} = 'yield', false)",
    "dedupe_key": "CASE WHEN {dedupe_by} IS NULL THEN {dedupe_key}"
    " ELSE pgworkd.payload_key(coalesce({kind}, {queue}), {payload}) END",
    "dedupe_until": "coalesce({dedupe_until}, pgworkd.clock() + make_interval(secs => {dedupe_for_s}))",
}
"""What is stored for a field that is not stored as it is."""
_COLUMNS = {name: name for name in _INSERTED if name not in ("delay_s", "dedupe_for_s", "dedupe_by")}
_COLUMNS |= {"on_retry": "yields"}
"""By field, the column that it is stored in."""


def _sent(first: int, names: Iterable[str], array: str = "") -> dict[str, str]:
    """By field, its parameter as drivers send it; the first has the number `first`."""
    return {name: f"CAST(${number} AS {_SENT[name]}{array})" for number, name in enumerate(names, first)}


def _typed(values: Mapping[str, str]) -> dict[str, str]:
    return {
        name: sent if _SENT[name] == _TYPES[name] else f"CAST({sent} AS {_TYPES[name]})"
        for name, sent in values.items()
    }


def _stored() -> str:
    """What is stored in each column, by the names of the fields as they were sent."""
    typed = _typed({name: name for name in _INSERTED})
    return ", ".join(_COMPUTED.get(name, typed[name]).format_map(typed) for name in _COLUMNS)


def _arguments(first: int, names: Iterable[str] = _TYPES) -> str:
    """The arguments of a function in SQL that takes these fields, from parameter `first` on."""
    return ", ".join(f"p_{name} => {value}" for name, value in _typed(_sent(first, names)).items())


# The client draws the ids: RETURNING guarantees no order, and a server without OpenSSL opens /dev/urandom for each.
# Drivers are slow for each element of a list: ids and payloads are one text each, which the server splits, and a value
# common to all jobs of the statement is sent once, beside an empty list, which unnest() fills with NULLs.
INSERT_ONE = styles(
    "INSERT INTO pgworkd.jobs (id, COLUMNS) SELECT CAST(id AS uuid), STORED"
    " FROM (VALUES (CAST($1 AS text), VALUES_SENT)) AS new (id, NAMES) RETURNING 1",
    COLUMNS=", ".join(_COLUMNS.values()),
    STORED=_stored(),
    VALUES_SENT=", ".join(_sent(2, _INSERTED).values()),
    NAMES=", ".join(_INSERTED),
)
_ALIKE = _sent(1, _INSERTED[1:])
INSERT = styles(
    """
WITH stored AS (
    INSERT INTO pgworkd.jobs (id, COLUMNS)
    SELECT CAST(id AS uuid), STORED
    FROM (SELECT id, payload, EACH
          FROM unnest(string_to_array(CAST($IDS AS text), chr(10)), string_to_array(CAST($PAYLOADS AS text), chr(10)),
                      LISTS) AS listed (id, payload, NAMES)) AS new
    RETURNING 1
)
SELECT count(*) FROM stored""",
    COLUMNS=", ".join(_COLUMNS.values()),
    STORED=_stored(),
    EACH=", ".join(f"coalesce({name}, {sent}) AS {name}" for name, sent in _ALIKE.items()),
    IDS=str(len(_ALIKE) + 1),
    PAYLOADS=str(len(_ALIKE) + 2),
    LISTS=", ".join(_sent(len(_ALIKE) + 3, _ALIKE, "[]").values()),
    NAMES=", ".join(_ALIKE),
)
ENQUEUE = styles(
    "SELECT CAST(id AS text), created, changed FROM pgworkd.enqueue(JOB, p_on_duplicate => CAST($LAST AS text))",
    JOB=_arguments(1),
    LAST=str(len(FIELDS) + 1),
)
ENQUEUE_ONCE = styles(
    "SELECT created, same, status, keep_s FROM pgworkd.enqueue_once(CAST(CAST($1 AS text) AS uuid), JOB)",
    JOB=_arguments(2),
)
DEPEND = styles("""
SELECT sum(pgworkd.depend(CAST(job AS uuid), CAST(after AS uuid[]), on_failed_dependency))
FROM unnest(CAST($1 AS text[]), CAST($2 AS text[]), CAST($3 AS text[])) AS new (job, after, on_failed_dependency)""")

CREATE_BATCH = styles("""
SELECT CAST(id AS text), created
FROM pgworkd.create_batch(
    p_name => CAST($1 AS text), p_parent => CAST(CAST($2 AS text) AS uuid), p_queue => CAST($3 AS text),
    p_kind => CAST($4 AS text), p_stream => CAST($5 AS boolean), p_stream_kind => CAST($6 AS text),
    p_final => CAST($7 AS boolean), p_max_failures => CAST($8 AS int), p_dedupe_key => CAST($9 AS text),
    p_dedupe_until => CAST(CAST($10 AS text) AS timestamptz), p_dedupe_for_s => CAST($11 AS float8),
    p_on_complete => CAST(CAST($12 AS text) AS jsonb), p_on_failure => CAST(CAST($13 AS text) AS jsonb),
    p_max_attempts => CAST($14 AS int), p_meta => CAST(CAST($15 AS text) AS jsonb))""")
ADD_JOBS = styles(
    """
SELECT cardinality(pgworkd.add_jobs(
    CAST(CAST($1 AS text) AS uuid), p_ids => CAST(CAST($2 AS text[]) AS uuid[]),
    p_payloads => CAST(CAST($3 AS text[]) AS jsonb[]), JOB))""",
    JOB=_arguments(4, ("queue", "kind", "priority", "run_at", "max_attempts", "timeout_s", "meta")),
)
_OF_ITEM = ("payload", "dedupe_key", "serialize_key")
"""What each job of an ENQUEUE_ITEMS has of its own."""
ENQUEUE_ITEMS = styles(
    """
SELECT CAST(job.id AS text), job.created, job.changed
FROM (SELECT * FROM unnest(CAST($1 AS text[]), CAST($2 AS text[]), CAST($3 AS text[]), CAST($4 AS text[]))
               WITH ORDINALITY AS listed (id, payload, dedupe_key, serialize_key, place)
      ORDER BY dedupe_key, place) AS item
CROSS JOIN LATERAL pgworkd.enqueue(
    p_id => CAST(item.id AS uuid), p_payload => CAST(item.payload AS jsonb), p_dedupe_key => item.dedupe_key,
    p_serialize_key => item.serialize_key, JOB, p_batch => CAST(CAST($BATCH AS text) AS uuid),
    p_on_duplicate => CAST($LAST AS text)) AS job
ORDER BY item.place""",
    JOB=_arguments(5, [name for name in _TYPES if name not in _OF_ITEM]),
    BATCH=str(5 + len(_TYPES) - len(_OF_ITEM)),
    LAST=str(6 + len(_TYPES) - len(_OF_ITEM)),
)
"""In the order of their keys: two sessions that add the same ones do not wait for each other in a circle."""
SEAL_BATCH = styles("SELECT pgworkd.seal_batch(CAST(CAST($1 AS text) AS uuid))")
CANCEL_BATCH = styles(
    "SELECT cancelled, requested, more FROM pgworkd.cancel_batch(CAST(CAST($1 AS text) AS uuid), 10000)"
)
BATCH_PROGRESS = styles("""
SELECT CAST(id AS text), name, depth, state, total, done, completed, dead, cancelled, CAST(meta AS text)
FROM pgworkd.batch_tree(CAST(CAST($1 AS text) AS uuid))""")
