"""Text that may be shown or kept: without the secrets of our database addresses, without what steers a terminal.

A password is hidden wherever it turns up, as it stands in the address, decoded, or as JSON, repr() or a URL would
write it; and so is that of any other address (`scheme://user:password@host`). Not one that is too short, or a part of
the rest of the address (user postgres, password postgres): to blot that out everywhere would tell it.
"""

from __future__ import annotations

import json
import os
import re
import unicodedata
from urllib.parse import quote, quote_plus, unquote, unquote_plus

from pgworkd.words.dsn import passwords, redacted

SECRET_CHARS_MIN = 6
# The categories: control, surrogate, unassigned, private and "format", which turns the direction of text around.
_HIDDEN = {"Cc", "Cs", "Cn", "Co", "Cf", "Zl", "Zp"}
# In our own kind of address a password may hold a raw / or @ by mistake; elsewhere a port and a path look like that.
_OURS = re.compile(r"(postgres(?:ql)?://[^\s:]{0,200}:)\S{0,1000}@", re.IGNORECASE)
_OTHERS = re.compile(r"(://[^\s:/?#@]{0,200}:)[^\s/?#*]{1,1000}@")
_secrets: tuple[str, ...] = ()


def hide(dsn: str) -> None:
    """From now on `redact` knows the secrets of this address, and the PGPASSWORD that the driver falls back on."""
    global _secrets  # noqa: PLW0603 - what a process must not say is a matter of the whole process
    shown = redacted(dsn)
    secrets = [*passwords(dsn), os.environ.get("PGPASSWORD", "")]
    forms = {form for secret in secrets for form in _forms(secret)}
    fresh = {form for form in forms if len(form) >= SECRET_CHARS_MIN and form not in shown}
    _secrets = tuple(sorted(fresh.union(_secrets), key=len, reverse=True))  # the longest first: one may hold another


def redact(text: str) -> str:
    """`text` with *** for every password that is known here, and for those in addresses."""
    for secret in _secrets:
        if secret in text:
            text = text.replace(secret, "***")
    if "://" in text:
        text = _OTHERS.sub(r"\1***@", _OURS.sub(r"\1***@", text))
    return text


def escaped(text: str, keep: str = "") -> str:
    """`text` without anything that could steer a terminal (CWE-150) or end a line, but for characters in `keep`."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        c if c in keep or c.isprintable() or unicodedata.category(c) not in _HIDDEN else _code(c) for c in text
    )


def _code(character: str) -> str:
    return character.encode("unicode_escape", "surrogatepass").decode()


def _forms(secret: str) -> set[str]:
    """How it may be written."""
    plain = {secret, unquote(secret), unquote_plus(secret)}
    plain |= {write(text) for text in tuple(plain) for write in (_quoted, quote_plus, _quoted_but_slash)}
    return plain | {write(text) for text in plain for write in (_as_json, _as_repr, _as_ascii, escaped)}


def _quoted(text: str) -> str:
    return quote(text, safe="", errors="replace")


def _quoted_but_slash(text: str) -> str:
    return quote(text, errors="replace")


def _as_json(text: str) -> str:
    return json.dumps(text)[1:-1]


def _as_ascii(text: str) -> str:
    return ascii(text)[1:-1]


def _as_repr(text: str) -> str:
    return repr(text)[1:-1]
