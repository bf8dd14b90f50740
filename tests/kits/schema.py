"""The contents of the schema `pgworkd` in a database, by name, for comparing two installations."""

from __future__ import annotations

from tests.kits.verbs import Db

Catalog = dict[str, dict[str, str]]
"""For each kind of object: its name, and everything that defines it."""

_OURS = "n.nspname = 'pgworkd'"
_DAY = r"'^finished_jobs_[0-9]{8}'"
_QUERIES = {
    "functions": """
        SELECT p.oid::regprocedure,
               concat_ws(E'\\n', pg_get_functiondef(p.oid), p.proacl, obj_description(p.oid, 'pg_proc'))
        FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace WHERE OURS""",
    "settings of functions": """
        SELECT p.oid::regprocedure, p.proconfig
        FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace WHERE OURS""",
    "relations": """
        SELECT c.relname, concat_ws(' ', c.relkind, c.relpersistence, c.reloptions, c.relreplident, c.relacl,
                                    pg_get_expr(c.relpartbound, c.oid), obj_description(c.oid, 'pg_class'))
        FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE OURS AND c.relname !~ DAY""",
    "columns": """
        SELECT c.relname || '.' || a.attname,
               concat_ws(' ', format_type(a.atttypid, a.atttypmod), a.attnotnull, a.attidentity, a.attgenerated,
                         pg_get_expr(d.adbin, d.adrelid), a.attacl, col_description(c.oid, a.attnum))
        FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid JOIN pg_namespace n ON n.oid = c.relnamespace
        LEFT JOIN pg_attrdef d ON d.adrelid = a.attrelid AND d.adnum = a.attnum
        WHERE OURS AND c.relname !~ DAY AND c.relkind NOT IN ('i', 'I') AND a.attnum > 0 AND NOT a.attisdropped""",
    "indexes": """
        SELECT c.relname, pg_get_indexdef(c.oid)
        FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
        WHERE OURS AND c.relname !~ DAY AND c.relkind IN ('i', 'I')""",
    "constraints": """
        SELECT concat_ws('.', nullif(k.conrelid, 0)::regclass, nullif(k.contypid, 0)::regtype, k.conname),
               pg_get_constraintdef(k.oid)
        FROM pg_constraint k JOIN pg_namespace n ON n.oid = k.connamespace LEFT JOIN pg_class c ON c.oid = k.conrelid
        WHERE OURS AND coalesce(c.relname, '') !~ DAY""",
    "triggers": """
        SELECT c.relname || '.' || t.tgname, pg_get_triggerdef(t.oid) || ' ' || t.tgenabled::text
        FROM pg_trigger t JOIN pg_class c ON c.oid = t.tgrelid JOIN pg_namespace n ON n.oid = c.relnamespace
        WHERE OURS AND NOT t.tgisinternal AND c.relname !~ DAY""",
    "views": """
        SELECT c.relname, pg_get_viewdef(c.oid)
        FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE OURS AND c.relkind = 'v'""",
    "types": """
        SELECT t.typname, concat_ws(' ', t.typtype, format_type(t.typbasetype, t.typtypmod), t.typnotnull, t.typacl,
               (SELECT string_agg(e.enumlabel, ',' ORDER BY e.enumsortorder) FROM pg_enum e WHERE e.enumtypid = t.oid))
        FROM pg_type t JOIN pg_namespace n ON n.oid = t.typnamespace
        WHERE OURS AND t.typname !~ '_?finished_jobs_[0-9]'""",
    "sequences": """
        SELECT s.sequencename, concat_ws(' ', s.data_type, s.min_value, s.max_value, s.increment_by, s.cycle)
        FROM pg_sequences s WHERE s.schemaname = 'pgworkd'""",
    "schema": "SELECT n.nspname, n.nspacl FROM pg_namespace n WHERE OURS",
    "days": """
        SELECT c.relname, pg_get_expr(c.relpartbound, c.oid)
        FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
        WHERE OURS AND c.relname ~ DAY AND c.relkind = 'r'""",
    "version": "SELECT 'version', v.version FROM pgworkd.schema_version v",
}


async def catalog(db: Db) -> Catalog:
    """The whole catalog."""
    found: Catalog = {}
    async with db.transaction():
        await db.execute("SET LOCAL search_path = pg_catalog")  # names are printed with their schema
        for kind, query in _QUERIES.items():
            rows = await db.fetch(query.replace("OURS", _OURS).replace("DAY", _DAY))
            found[kind] = {str(row[0]): str(row[1]) for row in rows}
    return found


def differences(ours: Catalog, theirs: Catalog) -> list[str]:
    """Objects that exist in only one of the two or are not the same in both."""
    return [
        f"{kind}: {name}\n  {ours[kind].get(name)}\n  {theirs[kind].get(name)}"
        for kind in ours
        for name in sorted(ours[kind].keys() | theirs[kind].keys())
        if ours[kind].get(name) != theirs[kind].get(name)
    ]
