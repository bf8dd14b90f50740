"""Rows that refuse to be changed, as with a trigger of another application, and what is recorded of them."""

from __future__ import annotations

from tests.kits.verbs import Db

REFUSE = """
    CREATE TABLE public.kept (id text PRIMARY KEY);
    CREATE FUNCTION public.refuse() RETURNS trigger LANGUAGE plpgsql AS $$
    DECLARE
        v_id text := to_jsonb(CASE TG_OP WHEN 'INSERT' THEN NEW ELSE OLD END) ->> TG_ARGV[0];
    BEGIN
        IF EXISTS (SELECT FROM public.kept k WHERE k.id = v_id) THEN
            RAISE EXCEPTION 'this one stays as it is';
        END IF;
        RETURN CASE TG_OP WHEN 'DELETE' THEN OLD ELSE NEW END;
    END $$
"""


async def refuse(db: Db, *ids: object, table: str = "jobs", column: str = "id", when: str = "UPDATE OR DELETE") -> None:
    """Makes these rows refuse every change from now on."""
    if await db.fetchval("SELECT to_regproc('public.refuse') IS NULL"):
        await db.execute(REFUSE)
    await db.execute(
        f"CREATE OR REPLACE TRIGGER a_refuse BEFORE {when} ON pgworkd.{table} "
        f"FOR EACH ROW EXECUTE FUNCTION public.refuse('{column}')"
    )
    await db.executemany("INSERT INTO public.kept VALUES ($1)", [(str(each),) for each in ids])


async def refused(db: Db) -> dict[str, set[str]]:
    """The rows recorded as refused: keys by function."""
    rows = await db.fetch("SELECT what, array_agg(key) FROM pgworkd.refused_rows GROUP BY what")
    return {row[0]: set(row[1]) for row in rows}
