"""Makes text safe to show or store: redacts passwords of database addresses, escapes terminal control sequences.

A password is redacted wherever it occurs: as in the DSN, decoded, or as written by JSON, repr() or a URL; and so is
that of any other address (`scheme://user:password@host`). Exceptions: one that is too short, or part of the rest of
the DSN (user postgres, password postgres), as redacting that everywhere would reveal it.
"""

from __future__ import annotations

import json
import os
import re
import unicodedata
from collections.abc import Iterable
from urllib.parse import quote, quote_plus, unquote, unquote_plus

SECRET_CHARS_MIN = 6
# Unicode categories: control, surrogate, unassigned, private use, separators, and "format" (bidirectional overrides).
_HIDDEN = {"Cc", "Cs", "Cn", "Co", "Cf", "Zl", "Zp"}
# In a Postgres DSN a password may contain a raw / or @ by mistake; in other URLs that looks like a port and a path.
_OURS = re.compile(r"(postgres(?:ql)?://[^\s:]{0,200}:)\S{0,1000}@", re.IGNORECASE)
_OTHERS = re.compile(r"(://[^\s:/?#@]{0,200}:)[^\s/?#*]{1,1000}@")
_SECRET_NAME = re.compile(r"pass(?!file)|secret|token|scram_", re.IGNORECASE)
_secrets: tuple[str, ...] = ()


def hide(dsn: str) -> None:
    """Makes `redact` hide the secrets of this DSN, and of PGPASSWORD, which the driver falls back on."""
    _hide([*passwords(dsn), os.environ.get("PGPASSWORD", "")], shown=redacted(dsn))


def hide_secret(secret: str) -> None:
    """Makes `redact` hide a secret that is no DSN: a token, a key."""
    _hide([secret], shown="")


def _hide(secrets: Iterable[str], shown: str) -> None:
    global _secrets  # noqa: PLW0603 - secrets are hidden in the whole process
    forms = {form for secret in secrets for form in _forms(secret)}
    fresh = {form for form in forms if len(form) >= SECRET_CHARS_MIN and form not in shown}
    _secrets = tuple(sorted(fresh.union(_secrets), key=len, reverse=True))  # the longest first: one may contain another


def redact(text: str) -> str:
    """`text` with *** for every known password, and for those in URLs."""
    for secret in _secrets:
        if secret in text:
            text = text.replace(secret, "***")
    if "://" in text:
        text = _OTHERS.sub(r"\1***@", _OURS.sub(r"\1***@", text))
    return text


def redacted(dsn: str) -> str:
    """`dsn` with *** for its password, and for query parameters with names like a secret's."""
    location, mark, query = dsn.partition("?")
    scheme, slashes, rest = location.partition("://")
    authority, slash, path = rest.partition("/")
    login, at, hosts = authority.rpartition("@")
    user, colon, _ = login.partition(":")
    pairs = [pair.partition("=") for pair in query.split("&")]
    shown = "&".join(name + sign + ("***" if _is_secret(name) else value) for name, sign, value in pairs)
    password = ":***" if colon else ""
    return f"{scheme}{slashes}{user}{password}{at}{hosts}{slash}{path}{mark}{shown}"


def passwords(dsn: str) -> list[str]:
    """The secrets that `redacted` hides, as spelled in the DSN."""
    location, _, query = dsn.partition("?")
    login = location.partition("://")[2].partition("/")[0].rpartition("@")[0]
    pairs = [pair.partition("=") for pair in query.split("&")]
    return [login.partition(":")[2], *(value for name, _, value in pairs if _is_secret(name))]


def escaped(text: str, keep: str = "") -> str:
    """`text` with control sequences (CWE-150) and line ends escaped, except characters in `keep`."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        c if c in keep or c.isprintable() or unicodedata.category(c) not in _HIDDEN else _code(c) for c in text
    )


def _code(character: str) -> str:
    return character.encode("unicode_escape", "surrogatepass").decode()


def _forms(secret: str) -> set[str]:
    """The ways in which a secret may be written."""
    plain = {secret, unquote(secret), unquote_plus(secret)}
    plain |= {write(text) for text in tuple(plain) for write in (_quoted, quote_plus, _quoted_except_slash)}
    return plain | {write(text) for text in plain for write in (_as_json, _as_repr, _as_ascii, escaped)}


def _quoted(text: str) -> str:
    return quote(text, safe="", errors="replace")


def _quoted_except_slash(text: str) -> str:
    return quote(text, errors="replace")


def _as_json(text: str) -> str:
    return json.dumps(text)[1:-1]


def _as_ascii(text: str) -> str:
    return ascii(text)[1:-1]


def _as_repr(text: str) -> str:
    return repr(text)[1:-1]


def _is_secret(name: str) -> bool:
    return _SECRET_NAME.search(unquote(name)) is not None
