"""Tokens: who may call the gateway, and for what."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import NamedTuple

from pgworkd.admin.queries import read
from pgworkd.core import validation
from pgworkd.core.access import Access, TokenText
from pgworkd.database.connection import Connection
from pgworkd.errors import UsageError

# Each change and its entry in the audit are one statement. The secret is in neither.
_ADD = """WITH added AS (
        INSERT INTO pgworkd.tokens (id, name, sha256, scopes, created_by, expires_at)
        SELECT $1::text, $2::text, $3::bytea, $4::text::jsonb, pgworkd.who(NULL), u.at
        FROM (SELECT $5::text::timestamptz AS at) u WHERE coalesce(u.at > pgworkd.clock(), true)
        RETURNING id, name, scopes, expires_at), noted AS (
        INSERT INTO pgworkd.audit (who, what, queue, before, after)
        SELECT pgworkd.who(NULL), 'token', '', '{}', jsonb_build_object('token', a.id, 'name', a.name,
            'scopes', a.scopes, 'expires_at', a.expires_at) FROM added a)
    SELECT id FROM added"""
_REVOKE = """WITH revoked AS (
        UPDATE pgworkd.tokens t SET revoked_at = pgworkd.clock() WHERE t.id = $1::text AND t.revoked_at IS NULL
        RETURNING t.id, t.name), noted AS (
        INSERT INTO pgworkd.audit (who, what, queue, before, after)
        SELECT pgworkd.who(NULL), 'token', '', jsonb_build_object('token', r.id, 'name', r.name),
            jsonb_build_object('token', r.id, 'revoked', true) FROM revoked r)
    SELECT id FROM revoked"""
_COLUMNS = """SELECT t.id, t.name, t.scopes::text, extract(epoch FROM t.created_at)::float8, t.created_by,
        extract(epoch FROM t.expires_at)::float8, extract(epoch FROM t.revoked_at)::float8,
        CASE WHEN t.revoked_at IS NOT NULL THEN 'revoked' WHEN t.expires_at <= pgworkd.clock() THEN 'expired'
             ELSE 'live' END
    FROM pgworkd.tokens t"""
_FIND = _COLUMNS + " ORDER BY t.created_at DESC, t.id LIMIT $1"
_CHECK = """SELECT t.id, t.name, t.sha256, t.scopes::text FROM pgworkd.tokens t
    WHERE t.id = ANY ($1::text[]) AND t.revoked_at IS NULL AND coalesce(t.expires_at > pgworkd.clock(), true)"""
_ANY_LIVE = """SELECT EXISTS (SELECT FROM pgworkd.tokens t
    WHERE t.revoked_at IS NULL AND coalesce(t.expires_at > pgworkd.clock(), true))"""


class TokenRow(NamedTuple):
    """A token. `scopes`: with their queues, None for all; `state`: live, expired or revoked."""

    id: str
    name: str
    scopes: dict[str, list[str] | None]
    created_at: datetime | None
    created_by: str
    expires_at: datetime | None
    revoked_at: datetime | None
    state: str


class Known(NamedTuple):
    """What a live token's secret must match, and what its holder may do."""

    sha256: bytes
    access: Access


class TokenOperations:
    """`admin.tokens`. Raises the errors of `Admin`."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def add(
        self, name: str, scopes: Mapping[str, Sequence[str] | None], expires_at: datetime | None = None
    ) -> TokenText:
        """Adds a token for `name` (1 to 200 characters), and returns it: its secret is not stored anywhere.

        `scopes` as of `Access`, at least one. UsageError for an unknown scope, or an `expires_at` that has passed.
        """
        access = Access(name, scopes)
        if not scopes:
            raise UsageError("a token without scopes allows nothing: give at least one")
        at = None if expires_at is None else validation.instant(expires_at, "expires_at")
        token = TokenText.new()
        wanted = json.dumps({scope: None if queues is None else list(queues) for scope, queues in scopes.items()})
        if not await self._connection.fetch(_ADD, token.id, access.name, token.sha256, wanted, at):
            raise UsageError("this token would already have expired by the database's clock: give a later expires_at")
        return token

    async def find(self, limit: int = 100) -> list[TokenRow]:
        """The newest tokens, at most `limit` (1 to ROWS_MAX), revoked and expired ones until they are forgotten."""
        validation.bounded(limit)
        return [read(TokenRow, row) for row in await self._connection.fetch(_FIND, limit)]

    async def revoke(self, token_id: str) -> bool:
        """Revokes a token, by its id; gateways follow within ten seconds. False if there is no live one of that id."""
        return bool(await self._connection.fetch(_REVOKE, validation.name(token_id)))

    async def known(self, token_ids: Iterable[str]) -> dict[str, Known]:
        """What the gateway checks tokens by; without those that are unknown, expired or revoked."""
        rows = await self._connection.fetch(_CHECK, list(token_ids))
        return {
            token_id: Known(bytes(sha256), Access(f"{name[:170]} (token {token_id})", json.loads(scopes)))
            for token_id, name, sha256, scopes in rows
        }

    async def is_any_live(self) -> bool:
        """Whether there is a token that is neither expired nor revoked."""
        return bool(await self._connection.value(_ANY_LIVE))
