"""Objects of others on our tables: triggers, constraints, indexes, foreign keys, policies, made up by combination.

Each refuses, keeps, changes or delays the rows that contain MARK, in an id or in a text, and no others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID, uuid4

# ruff: noqa: S608 - all SQL is written here

MARK = "badbadbadbad"
"""Also the end of an id."""
EVENTS = ("INSERT", "UPDATE", "DELETE")
_ACTIONS = {
    "raises": "RAISE EXCEPTION 'not this one';",
    "returns null": "RETURN NULL;",
    "waits": "PERFORM pg_sleep(0.25);",
}
"""`waits`: for longer than a settle, and maintenance, wait for a lock."""
_FUNCTION = """
    CREATE FUNCTION public.others() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $$
    BEGIN
        IF to_jsonb(CASE TG_OP WHEN 'INSERT' THEN NEW ELSE OLD END)::text LIKE '%{mark}%' THEN
            {action}
        END IF;
        RETURN CASE TG_OP WHEN 'DELETE' THEN OLD ELSE NEW END;
    END $$;
    CREATE TRIGGER {name} {timing} {event} ON pgworkd.{table} FOR EACH ROW EXECUTE FUNCTION public.others()"""
_TRANSITION = """
    CREATE FUNCTION public.others() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $$
    BEGIN
        IF EXISTS (SELECT FROM rows r WHERE to_jsonb(r)::text LIKE '%{mark}%') THEN
            RAISE EXCEPTION 'not this one';
        END IF;
        RETURN NULL;
    END $$;
    CREATE TRIGGER {name} AFTER {event} ON pgworkd.{table} REFERENCING {side} TABLE AS rows
        FOR EACH STATEMENT EXECUTE FUNCTION public.others()"""
_DEFERRED = _FUNCTION.replace("CREATE TRIGGER", "CREATE CONSTRAINT TRIGGER").replace(
    "FOR EACH ROW", "DEFERRABLE INITIALLY DEFERRED FOR EACH ROW"
)


@dataclass(frozen=True)
class Thing:
    """One object; `keeps`: it silently keeps rows as they are; `hides`: no claim can see them."""

    name: str
    table: str
    create: str
    drop: str
    event: str
    keeps: bool = False
    hides: bool = False

    def __repr__(self) -> str:
        return self.name


def marked() -> UUID:
    """An id that the objects act on."""
    return UUID(str(uuid4())[:24] + MARK)


def _trigger(
    table: str, event: str, timing: str, action: str, body: str | None = None, sql: str = _FUNCTION, mark: str = MARK
) -> Thing:
    code = body or _ACTIONS[action]
    create = sql.format(mark=mark, action=code, name="zz_others", timing=timing, event=event, table=table)
    drop = f"DROP TRIGGER zz_others ON pgworkd.{table}; DROP FUNCTION public.others()"
    return Thing(f"{table}: {timing} {event} {action}".lower(), table, create, drop, event, action == "returns null")


def of_table(table: str) -> Iterator[Thing]:
    """Triggers for rows on a table: each event, before it, refused and kept."""
    for event in EVENTS:
        yield _trigger(table, event, "BEFORE", "raises")
        yield _trigger(table, event, "BEFORE", "returns null")


def of_statistics(table: str) -> Iterator[Thing]:
    """Triggers that refuse all rows of a table, without which jobs run all the same."""
    for event in EVENTS:
        yield _trigger(table, event, "BEFORE", "raises", mark="")


def policies() -> Iterator[Thing]:
    """Policies for rows that may not be changed."""
    refused = f"id::text NOT LIKE '%{MARK}'"
    for what, sql in {
        "that refuses": f"FOR UPDATE USING (true) WITH CHECK ({refused})",
        "that keeps": f"FOR UPDATE USING ({refused})",
        "that keeps from deletion": f"FOR DELETE USING ({refused})",
    }.items():
        create = f"""ALTER TABLE pgworkd.jobs ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY;
            CREATE POLICY theirs ON pgworkd.jobs USING (true);
            CREATE POLICY others ON pgworkd.jobs AS RESTRICTIVE {sql}"""
        drop = """DROP POLICY theirs ON pgworkd.jobs; DROP POLICY others ON pgworkd.jobs;
            ALTER TABLE pgworkd.jobs DISABLE ROW LEVEL SECURITY, NO FORCE ROW LEVEL SECURITY"""
        yield Thing(
            f"jobs: a policy {what}", "jobs", create, drop, "UPDATE", what != "that refuses", what == "that keeps"
        )


def of_jobs() -> Iterator[Thing]:
    """All sorts of objects on `jobs`."""
    yield from of_table("jobs")
    for event, side in zip(EVENTS, ("NEW", "NEW", "OLD"), strict=True):
        yield _trigger("jobs", event, "BEFORE", "waits")
        yield _trigger("jobs", event, "AFTER", "raises")
        yield _trigger("jobs", event, "AFTER", "raises late", _ACTIONS["raises"], _DEFERRED)
        create = _TRANSITION.format(mark=MARK, name="zz_others", event=event, table="jobs", side=side)
        drop = "DROP TRIGGER zz_others ON pgworkd.jobs; DROP FUNCTION public.others()"
        yield Thing(f"jobs: after {event} of a statement raises".lower(), "jobs", create, drop, event)
    for what, change in {
        "status": "NEW.status := OLD.status; NEW.worker_id := OLD.worker_id;",
        "worker": "NEW.worker_id := CASE WHEN NEW.worker_id IS NOT NULL THEN 77 END;",
        "attempts": "NEW.attempts := 0;",
        "id": "NEW.id := gen_random_uuid();",
        "pending": "NEW.status := 'pending'; NEW.worker_id := NULL; NEW.lease_until := NULL;",
    }.items():
        yield _trigger("jobs", "UPDATE", "BEFORE", f"changes {what}", change)
    for status in ("running", "failed", "dead", "pending"):
        sql = f"status <> '{status}' OR updated OR id::text NOT LIKE '%{MARK}'"
        yield _check("jobs", f"is never {status}", sql.replace("updated OR ", ""))
    yield Thing(
        "jobs: a unique index",
        "jobs",
        f"CREATE UNIQUE INDEX others ON pgworkd.jobs ((true)) WHERE worker_id IS NOT NULL AND id::text LIKE '%{MARK}'",
        "DROP INDEX pgworkd.others",
        "UPDATE",
    )
    for late in ("", " DEFERRABLE INITIALLY DEFERRED"):
        create = f"""CREATE TABLE public.others (job uuid REFERENCES pgworkd.jobs (id){late});
            INSERT INTO public.others SELECT id FROM pgworkd.jobs WHERE id::text LIKE '%{MARK}'"""
        yield Thing(f"jobs: a foreign key{late.lower()}", "jobs", create, "DROP TABLE public.others", "DELETE")


def _check(table: str, what: str, sql: str) -> Thing:
    create = f"ALTER TABLE pgworkd.{table} ADD CONSTRAINT others CHECK ({sql}) NOT VALID"
    return Thing(
        f"{table}: a check {what}", table, create, f"ALTER TABLE pgworkd.{table} DROP CONSTRAINT others", "UPDATE"
    )


def things(tables: Sequence[str], statistics: Sequence[str]) -> list[Thing]:
    """All of them."""
    found = [*of_jobs(), *policies()]
    found.append(_check("finished_jobs", "of no such job", f"id::text NOT LIKE '%{MARK}'"))
    for table in tables:
        found += of_table(table)
    for table in statistics:
        found += of_statistics(table)
    return found


async def tables_of(db: Any) -> list[str]:
    """All tables of the schema, but the days of the history."""
    rows = await db.fetch(
        "SELECT c.relname FROM pg_class c WHERE c.relnamespace = 'pgworkd'::regnamespace AND c.relkind IN ('r', 'p')"
        " AND c.relname !~ '^finished_jobs_' ORDER BY 1"
    )
    return [row[0] for row in rows]
