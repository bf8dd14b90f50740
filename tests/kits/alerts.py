"""Deaths, groups of errors and alerts in SQL; and a mail server."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import ssl
import uuid
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from email import message_from_bytes, policy
from email.message import EmailMessage
from typing import Any, cast

import asyncpg

from pgworkd.alerts.alert import Alert, AlertedGroup
from pgworkd.alerts.recipient import MessageOrigin
from tests.kits.verbs import Db, complete, fail, insert_running

RULE = {
    "name": "a",
    "queue": "alerts",
    "kind": "pgworkd.alert.a",
    "on_new": True,
    "within_s": 600,
    "cooldown_s": 3600,
    "bundle_s": 300,
}


async def die(db: Db, message: str = "it broke", jobs: int = 1, **columns: Any) -> list[uuid.UUID]:
    """Inserts jobs that die at once with this error; their ids."""
    ids = await insert_running(db, jobs, **columns)
    assert set((await fail(db, ids, permanent=True, message=message)).values()) == {"dead"}
    return ids


async def count(db: Db, limit: int = 1000) -> int | None:
    """count_deaths."""
    found: int | None = await db.fetchval("SELECT pgworkd.count_deaths($1)", limit)
    return found


async def dead(db: Db, *args: Any) -> list[asyncpg.Record]:
    """dead_groups."""
    marks = ", ".join(f"${number}" for number in range(1, len(args) + 1))
    return await db.fetch(f"SELECT * FROM pgworkd.dead_groups({marks})", *args)  # noqa: S608 - marks only


async def group_of(db: Db, pattern: str) -> int:
    """The id of the group of errors."""
    return int(await db.fetchval("SELECT id FROM pgworkd.error_groups WHERE pattern = $1", pattern))


async def mute(db: Db, group: int, until: Any) -> bool:
    """mute_errors, by ann."""
    return bool(await db.fetchval("SELECT pgworkd.mute_errors($1, $2, 'ann')", group, until))


async def declare(db: Db, *rules: dict[str, Any]) -> None:
    """declare_alerts, of rules that differ from RULE in this."""
    await db.execute("SELECT pgworkd.declare_alerts($1)", json.dumps([RULE | rule for rule in rules]))


async def due(db: Db, *, later: bool = False) -> list[tuple[str, str, int]]:
    """Rule, reason and untold deaths of all groups that are to be told of now, or also later."""
    rows = await db.fetch(
        """SELECT a.rule, a.reason, g.deaths - a.told AS untold
           FROM pgworkd.alerts a JOIN pgworkd.alert_rules r ON r.name = a.rule
           LEFT JOIN pgworkd.error_groups g ON g.id = a.group_id
           WHERE a.due_at IS NOT NULL AND (NOT pgworkd.is_later(a.due_at, r.cooldown_s) OR $1)
           ORDER BY a.rule, a.due_at, a.group_id""",
        later,
    )
    return [(row["rule"], row["reason"], row["untold"]) for row in rows]


async def messages(db: Db) -> list[str]:
    """The rules whose messages are on their way."""
    rows = await db.fetch("SELECT payload ->> 'rule' FROM pgworkd.jobs WHERE queue = 'alerts' ORDER BY id")
    return [row[0] for row in rows]


async def tell(db: Db) -> list[tuple[str, str, int]]:
    """Ends the jobs of all messages, as their handlers do; what they have told."""
    found = []
    worker_id = await db.fetchval("SELECT pgworkd.register('teller', 1, 'v', 30)")
    for job in await db.fetch("SELECT id, payload FROM pgworkd.claim($1, 'alerts', 9, '{}', '{}')", worker_id):
        rule = json.loads(job["payload"])["rule"]
        found += [told for told in await due(db, later=True) if told[0] == rule]
        await db.execute(
            """SELECT pgworkd.told(r.name, array_agg(a.group_id), array_agg(coalesce(g.deaths, 0)))
               FROM pgworkd.alert_rules r JOIN pgworkd.alerts a ON a.rule = r.name
               LEFT JOIN pgworkd.error_groups g ON g.id = a.group_id
               WHERE r.name = $1 AND a.due_at IS NOT NULL
               GROUP BY r.name""",
            rule,
        )
        await complete(db, [job["id"]])
    return found


def alert_of(error: str = "it broke", **columns: Any) -> Alert:
    """An alert about one new group of errors."""
    facts = {
        "reason": "new",
        "deaths": 1,
        "group": 7,
        "queue": "q",
        "kind": "send",
        "error_type": "E",
        "pattern": error,
        "place": "jobs.py, send",
        "error": error,
        "dead": 3,
        "sample": uuid.UUID(int=7),
        "first_at": datetime(2026, 1, 1, tzinfo=UTC),
        "last_at": datetime(2026, 1, 2, tzinfo=UTC),
    }
    return Alert(
        id=uuid.UUID(int=8),
        rule="default",
        origin=MessageOrigin("shop", "production", None),
        at=datetime(2026, 1, 2, tzinfo=UTC),
        since=datetime(2026, 1, 1, tzinfo=UTC),
        groups=1,
        new=1,
        deaths=1,
        errors=[AlertedGroup(**facts | columns)],
    )


# Mail


class MailHost:
    """A mail server: keeps what it accepts, and refuses as told. STARTTLS, or TLS at once, with a certificate."""

    def __init__(
        self, *, tls: ssl.SSLContext | None = None, at_once: bool = False, login: tuple[str, str] | None = None
    ) -> None:
        """`tls`: offers STARTTLS; with `at_once` it speaks TLS from the first byte. `login`: user and password."""
        self.tls, self.at_once, self.login = tls, at_once, login
        self.refuses: dict[str, str] = {}
        """By command (MAIL, RCPT, DATA), the reply."""
        self.mails: list[tuple[str, list[str], EmailMessage]] = []
        self.said: list[str] = []
        self.encrypted = False
        self.port = 0

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[MailHost]:
        server = await asyncio.start_server(self._talk, "127.0.0.1", 0, ssl=self.tls if self.at_once else None)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, ssl.SSLError):
            await self._session(reader, writer)
        writer.close()

    async def _session(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        sender, recipients, secure = "", list[str](), self.at_once
        writer.write(b"220 here\r\n")
        while line := (await reader.readline()).decode().rstrip("\r\n"):
            self.said.append(line)
            verb, _, rest = line.partition(" ")
            reply = self.refuses.get(verb.upper())
            if reply is None and verb.upper() == "EHLO":
                features = ["STARTTLS"] if self.tls and not secure else []
                features += ["AUTH PLAIN"] if self.login else []
                reply = "\r\n".join([f"250-{each}" for each in ("here", *features)] + ["250 8BITMIME"])
            elif verb.upper() == "STARTTLS" and self.tls:
                writer.write(b"220 go\r\n")
                await writer.start_tls(self.tls)
                secure = self.encrypted = True
                continue
            elif reply is None and verb.upper() == "AUTH":
                given = base64.b64decode(rest.split()[1]).decode().split("\0")[1:]
                reply = "235 ok" if tuple(given) == self.login else "535 wrong password"
            elif reply is None and verb.upper() == "MAIL":
                sender = rest
            elif reply is None and verb.upper() == "RCPT":
                recipients.append(rest)
            elif reply is None and verb.upper() == "DATA":
                writer.write(b"354 go on\r\n")
                text = (await reader.readuntil(b"\r\n.\r\n")).removesuffix(b".\r\n")
                parsed = message_from_bytes(text, policy=policy.default)
                self.mails.append((sender, recipients, cast("EmailMessage", parsed)))
                sender, recipients = "", []
            writer.write(f"{reply or ('221 bye' if verb.upper() == 'QUIT' else '250 ok')}\r\n".encode())
