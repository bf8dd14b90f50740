"""Bugs planted into the small parts of the dashboard: forms that are sent twice, filters, masks, frames."""

from __future__ import annotations

from tests.chaos.bug import Bug, python
from tests.kits.planting import Planted

_NAMES = ("once", "browser", "filters", "masks", "frame", "audit", "acts")
_ONCE, _BROWSER, _FILTERS, _MASKS, _FRAME, _AUDIT, _ACTS = (f"tests/dashboard/test_{name}.py" for name in _NAMES)

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
    python(
        "who may not see payloads learns of them by a filter",
        "dashboard/pages/jobs",
        '        need(request, "payload", queue)',
        "        pass",
        tests=_FILTERS,
    ),
    python(
        "what is done to all that match ignores a filter",
        "dashboard/pages/jobs",
        "for name in LISTED_ONLY if form.one(name)]",
        "for name in () if form.one(name)]",
        tests=_FILTERS,
    ),
    python(
        "a filter reads the payloads of a long list",
        "admin/listing",
        "is_broad = self.payload is not None or all(",
        "is_broad = all(",
        tests=_FILTERS,
    ),
    python(
        "a filter takes a text for a number",
        "admin/payload_filter",
        "found = json.loads(text) if text.startswith",
        "found = json.loads(text) if False and text.startswith",
        tests=_FILTERS,
    ),
    python(
        "a form writes stars into a payload",
        "dashboard/pages/forms",
        "has_payload=seen(request, job).payload == job.payload)",
        "has_payload=True)",
        tests=_MASKS,
    ),
    python(
        "the audit shows what is masked",
        "dashboard/pages/fleet",
        "masks.members(each[side])",
        "each[side]",
        tests=_MASKS,
    ),
    python(
        "a filter asks for what is masked",
        "dashboard/pages/jobs",
        "masks.hides(f",
        "masks.hides('x' f",
        tests=_MASKS,
    ),
    python(
        "a name that is there twice is not masked",
        "core/masks",
        ", object_pairs_hook=_object)",
        ")",
        tests=_MASKS,
    ),
    python(
        "the policy lets pages have frames of anywhere",
        "dashboard/render",
        "; frame-src {context['frame'][1]}",
        "; frame-src https:",
        tests=_FRAME,
    ),
    python(
        "an address of a frame adds to the policy",
        "core/address",
        "or not _URL.fullmatch(url):",
        "or False:",
        tests=_FRAME,
    ),
    python(
        "the audit shows a payload of any length",
        "dashboard/changes",
        "return text if len(text) <= CHARS_MAX else",
        "return text if True else",
        tests=_AUDIT,
    ),
    python(
        "who may act on jobs of some queues gives those of all a priority",
        "dashboard/pages/jobs",
        '        if not access.allows("operate"):',
        '        if operation != "prioritize" and not access.allows("operate"):',
        tests=_ACTS,
    ),
    python(
        "a job that runs keeps all others from another priority",
        "admin/queries",
        "AND j.status IN ('pending', 'blocked', 'failed')\n        ORDER BY j.id FOR UPDATE",
        "ORDER BY j.id FOR UPDATE",
        tests=_ACTS,
    ),
)
