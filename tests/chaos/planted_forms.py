"""Bugs planted into the forms of the dashboard, and into its script: what is sent, and what an open page says."""

from __future__ import annotations

from tests.chaos.bug import Bug, python
from tests.kits.planting import Planted

_NAMES = ("pages", "acts", "forms", "stale", "browser")
_PAGES, _ACTS, _FORMS, _STALE, _BROWSER = (f"tests/dashboard/test_{name}.py" for name in _NAMES)


def script(name: str, old: str, new: str, test: str) -> Bug:
    """A bug in the script of the pages."""
    return Bug(Planted(name, "pgworkd/dashboard/static/dashboard.js", old, new), tests=f"{_STALE} -k {test}")


BUGS = (
    python(
        "a page that has just been opened goes back to what was before it",
        "gateway/api/request/live_lists",
        "            while newer and self._began_s < came_s:",
        "            while newer and self._rows is None:",
        tests="tests/http/test_events.py",
    ),
    python(
        "news make another act of a button that is being pressed",
        "dashboard/render",
        "repr(value).encode()",
        "b''",
        tests=f"{_BROWSER} -k pressed",
    ),
    script(
        "an open page says nothing of a database that has gone",
        "      stale(message.data);",
        '      stale("");',
        "database",
    ),
    script(
        "an open page says nothing of a gateway that has gone",
        "    else stale(status ?",
        "    else heard(status ?",
        "gone",
    ),
    script(
        "an open page says nothing of a gateway that is silent",
        "    silence = setTimeout(",
        "    silence = (() => 0)(",
        "silent",
    ),
    script(
        "an open page of a revoked token stays as it is",
        "    if (status === 401) window.location.reload();",
        "    if (status === 0) window.location.reload();",
        "signed_out",
    ),
    script(
        "a page becomes what the gateway answers in place of the news",
        "    event.preventDefault();\n    again(",
        "    again(",
        "refused",
    ),
    script(
        "a page does not try again to follow",
        "      if (!main._htmx?.sse) htmx.ajax(",
        "      if (false) htmx.ajax(",
        "refused",
    ),
    script("an open page stays grey", '      stale("");\n      if', "      if", "database"),
    python(
        "who may only look may enqueue",
        "dashboard/pages/forms",
        '    access = need(request, "enqueue", queue)\n',
        '    access = need(request, "read", queue)\n',
        tests=_ACTS,
    ),
    python(
        "who may edit jobs of some queues may edit those of all",
        "dashboard/pages/forms",
        '            await visible(request, admin, job_id, "operate")\n            changed',
        '            await visible(request, admin, job_id, "read")\n            changed',
        tests=_ACTS,
    ),
    python(
        "who may replay jobs of some queues may replay those of all",
        "dashboard/pages/forms",
        'admin.jobs.replay(await visible(request, admin, job_id, "operate"))',
        'admin.jobs.replay(await visible(request, admin, job_id, "read"))',
        tests=_ACTS,
    ),
    python(
        "a form shows a payload that one may not see",
        "dashboard/pages/forms",
        '        if access_of(request).allows("payload", job.queue):',
        "        if True:",
        tests=_FORMS,
    ),
    python(
        "a form sets what nobody has changed",
        "dashboard/forms",
        'if _lines(each.value) != _lines(each.was or "")]',
        "if each.value or each.was]",
        tests=_FORMS,
    ),
    python(
        "a new schedule replaces another one",
        "dashboard/pages/forms",
        "        if is_new and found is not None and",
        "        if False and found is not None and",
        tests=_FORMS,
    ),
    python(
        "a browser takes the name of a queue for a step",
        "dashboard/names",
        '"~" * bool(_STEP.fullmatch(name))',
        '""',
        tests=_FORMS,
    ),
    python(
        "a preview uses up the one-time address",
        "dashboard/pages/sign_in",
        "    if IS_HEAD in request.scope:",
        "    if False:",
        tests=_PAGES,
    ),
    python(
        "nobody says who has locked a job",
        "dashboard/pages/jobs",
        "        if not (error.locked or error.timed_out):",
        "        if True:",
        tests=_PAGES,
    ),
    python(
        "a database without the schema is only called unavailable",
        "gateway/api/request/problems",
        "if isinstance(error, DatabaseUnavailable) else said)",
        "if isinstance(error, DatabaseUnavailable | SchemaError) else said)",
        tests=_PAGES,
    ),
)
