"""What the text of a setting, or each text of a list, must be."""

from __future__ import annotations

import re
from collections.abc import Callable

from pgworkd.core import masks
from pgworkd.core.access import SCOPES
from pgworkd.core.address import is_host, is_network
from pgworkd.core.mail_url import is_mail_address

_APP = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")
_ENVIRONMENT = re.compile(r"[\w.-]{1,200}")  # it is stored, and an address may hold a password
TEXTS: dict[str, tuple[Callable[[str], object], str]] = {
    "app": (_APP.fullmatch, "module:attribute, for example notes.jobs:app"),
    "environment": (_ENVIRONMENT.fullmatch, "a word, such as production: letters, digits, _ . and -, at most 200"),
    "smtp_from": (is_mail_address, "a mail address, for example jobs@example.com"),
    "http_hosts": (is_host, "names of hosts without ports, or *"),
    "http_proxies": (is_network, "addresses or networks, such as 10.0.0.0/8"),
    "http_with": (re.compile("api|dashboard|workers").fullmatch, "one or more of api, dashboard, workers"),
    "http_user_scopes": (SCOPES.__contains__, f"scopes: {', '.join(SCOPES)}"),
    "http_user_header": (re.compile("[A-Za-z0-9-]{1,100}").fullmatch, "the name of a header, such as X-Forwarded-User"),
    "http_mask": (masks.is_mask, masks.GIVE),
}
"""By setting, what says whether a text fits, and what to give."""
