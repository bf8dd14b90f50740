"""Pages as HTML: templates, what they can call, and what a browser may load for them."""

from __future__ import annotations

import hashlib
import json
import mimetypes
from datetime import UTC, datetime
from functools import cache
from importlib import resources
from typing import Any, NamedTuple
from urllib.parse import unquote, urlencode
from uuid import uuid4

from fastapi import Request
from fastapi.responses import HTMLResponse
from jinja2 import Environment, PackageLoader, StrictUndefined
from starlette.responses import Response

from pgworkd.core.access import Access
from pgworkd.core.validation import counted
from pgworkd.dashboard.names import part
from pgworkd.gateway.api.request.access import access_of
from pgworkd.gateway.api.request.names import as_sent

SAID_COOKIE, THEME_COOKIE = "pgworkd_said", "pgworkd_theme"
THEMES = ("auto", "light", "dark")
NAV = (
    ("", "Overview"),
    ("queues", "Queues"),
    ("jobs", "Jobs"),
    ("dead", "Dead"),
    ("operations", "Operations"),
    ("batches", "Batches"),
    ("keys", "Keys"),
    ("schedules", "Schedules"),
    ("workers", "Workers"),
    ("push", "Push"),
    ("audit", "Audit"),
    ("system", "System"),
)
"""The pages that can be reached from each, by their paths."""
OF_QUEUES = ("", "queues", "jobs", "operations", "keys", "schedules")
"""Pages for who may see some queues only."""
_UNITS = ("B", "kB", "MB", "GB", "TB")
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "same-origin",
    "X-Frame-Options": "DENY",
}


class StaticFile(NamedTuple):
    """A file that pages load, and its digest, which is part of its address: a new version has another one."""

    content: bytes
    media_type: str
    version: str


@cache
def file(name: str) -> StaticFile | None:
    """A file below static/; None if there is none of that name."""
    place = resources.files("pgworkd.dashboard") / "static"
    for step in name.split("/"):
        found = [each for each in place.iterdir() if each.name == step] if place.is_dir() else []
        if not found:
            return None
        place = found[0]
    if not place.is_file():
        return None
    content = place.read_bytes()
    media_type = mimetypes.guess_type(name)[0] or "application/octet-stream"
    return StaticFile(content, media_type, hashlib.sha256(content).hexdigest()[:12])


def moment(value: datetime | None) -> str:
    """An instant as text, in UTC."""
    return "" if value is None else value.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%SZ")


def span(seconds: float | None) -> str:
    """A length of time in one or two units: 45 s, 3 min, 2 h 5 min, 4 d."""
    if seconds is None:
        return ""
    whole = int(max(seconds, 0))
    if whole < 120:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{max(seconds, 0):.1f} s"
    if whole < 7200:
        return f"{whole // 60} min"
    if whole < 172_800:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86_400} d"


def in_bytes(count: float) -> str:
    """A size in a unit that leaves few digits: 8.0 kB, 512 MB, 1.4 GB."""
    step = 0
    while count >= 1000 and step < len(_UNITS) - 1:
        count, step = count / 1024, step + 1
    return f"{count:.1f} {_UNITS[step]}" if step and count < 10 else f"{count:,.0f} {_UNITS[step]}"


def pretty(text: str | None) -> str:
    """JSON text with one member a line; as it is where a number would lose digits."""
    if text is None:
        return ""
    try:
        return json.dumps(json.loads(text, parse_float=_exact), indent=2, ensure_ascii=False)
    except ValueError:
        return text


def _exact(text: str) -> float:
    """A number whose digits are those of the text. Raises ValueError if they would be others."""
    if repr(found := float(text)) != text:
        raise ValueError(text)
    return found


def mark(value: object) -> str:
    """An id for an element: another one for each value."""
    return "do-" + hashlib.sha256(repr(value).encode()).hexdigest()[:12]


def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("pgworkd.dashboard"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "moment": moment,
        "span": span,
        "bytes": in_bytes,
        "pretty": pretty,
        "part": part,
        "mark": mark,
    }
    environment.globals["counted"] = counted
    environment.globals["new_id"] = uuid4
    environment.globals["draw"] = environment.get_template("draw.html").module
    environment.globals["ui"] = environment.get_template("macros.html").module
    return environment


_ENVIRONMENT = cache(_environment)


def _context(request: Request, access: Access | None, more: dict[str, Any]) -> dict[str, Any]:
    root = request.scope.get("root_path", "")
    path = request.scope["path"].removeprefix(root)
    theme = request.cookies.get(THEME_COOKIE, "auto")

    def url(**changes: Any) -> str:
        """This page with other parameters; None leaves one out."""
        found = dict(request.query_params) | changes
        query = urlencode({name: value for name, value in found.items() if value not in (None, "")})
        return f"{root}{as_sent(path)}" + f"?{query}" * bool(query)

    return {
        "root": root,
        "path": path,
        "url": url,
        "here": url() if request.method == "GET" else f"{root}/",
        "nav": [each for each in NAV if access is None or access.allows("read") or each[0] in OF_QUEUES],
        "me": access,
        "may": access.allows if access is not None else lambda *_: False,
        "theme": theme if theme in THEMES else "auto",
        "static": lambda name: f"{root}/static/{name}?v={_version(name)}",
        "said": "",
        "signs_in": False,
        "failures": [],
        "faults": {},
        "others": [],
        "updated": datetime.now(UTC),
    } | more


def _version(name: str) -> str:
    found = file(name)
    return "" if found is None else found.version


def page(
    request: Request, template: str, *, access: Access | None = None, status: int = 200, **context: Any
) -> Response:
    """A whole page; `access`: of who looks, None: nobody has signed in. `frame`: address and origin of a page in it."""
    said = unquote(request.cookies.get(SAID_COOKIE, ""))
    found = _ENVIRONMENT().get_template(template)
    answer = HTMLResponse(found.render(_context(request, access, {"said": said} | context)), status, _HEADERS)
    if context.get("frame"):
        answer.headers["Content-Security-Policy"] += f"; frame-src {context['frame'][1]}"
    if said:
        answer.delete_cookie(SAID_COOKIE, path=_cookie_path(request))
    return answer


def main_of(request: Request, template: str, context: dict[str, Any]) -> str:
    """What changes on a page, for those who have it open."""
    found = _ENVIRONMENT().get_template(template)
    block = found.blocks["main"]
    return "".join(block(found.new_context(_context(request, access_of(request), context))))


def _cookie_path(request: Request) -> str:
    return request.scope.get("root_path", "") or "/"


def set_cookie(request: Request, answer: Response, name: str, value: str, for_s: int | None = None) -> None:
    """Gives the browser a cookie that no script can read, and that no other site has it send."""
    is_tls = request.url.scheme == "https"
    answer.set_cookie(
        name, value, max_age=for_s, path=_cookie_path(request), secure=is_tls, httponly=True, samesite="strict"
    )


def delete_cookie(request: Request, answer: Response, name: str) -> None:
    """Has the browser forget a cookie."""
    answer.delete_cookie(name, path=_cookie_path(request))
