"""Bugs planted into the small parts of the dashboard: forms that are sent twice, filters, masks, frames."""

from __future__ import annotations

from tests.chaos.bug import Bug, python
from tests.kits.planting import Planted

_ONCE, _BROWSER = (f"tests/dashboard/test_{name}.py" for name in ("once", "browser"))

BUGS = (
    python(
        "a form that is sent twice makes two",
        "dashboard/once",
        "once(request, key or None, access_of(request).name)",
        "once(request, None, access_of(request).name)",
        tests=_ONCE,
    ),
    python(
        "a form that was sent before cannot be sent for more",
        "dashboard/forms",
        'form=page._replace(once=str(uuid4())) if page.once and problem.slug == "conflict" else page,',
        "form=page,",
        tests=_ONCE,
    ),
    Bug(
        Planted(
            "a double press hides a new token",
            "pgworkd/dashboard/static/dashboard.js",
            "    if (sent.has(form) || (question",
            "    if (false || (question",
        ),
        tests=f"{_BROWSER} -k double",
    ),
)
