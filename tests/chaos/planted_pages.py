"""Bugs planted into the dashboard: who sees and does what, and what a page costs."""

from __future__ import annotations

from tests.chaos.bug import python

_PAGES, _ACTS, _SIGN_IN = (f"tests/dashboard/test_{name}.py" for name in ("pages", "acts", "sign_in"))

BUGS = (
    python(
        "pages show names as they are",
        "dashboard/render",
        "        autoescape=True,",
        "        autoescape=False,",
        tests=_PAGES,
    ),
    python(
        "the groups of a page are those of some deaths, not of the newest",
        "admin/dead",
        "{since} ORDER BY at DESC LIMIT $6",
        "{since} ORDER BY at LIMIT $6",
        tests="tests/dashboard/test_many_dead.py",
    ),
    python(
        "a page counts all dead jobs however many there are",
        "admin/dead",
        "if most is not None and (await fetch(",
        "if False and (await fetch(",
        tests="tests/dashboard/test_many_dead.py",
    ),
    python(
        "a page reads all jobs for the first that is blocked in a queue",
        "admin/explained",
        "j.status = 'blocked' AND j.waiting_on = 0\n     ORDER BY j.serialize_key, j.run_at, j.id",
        "j.status = 'blocked'\n     ORDER BY j.priority, j.run_at, j.id",
        tests="tests/dashboard/test_plans.py",
    ),
    python(
        "who may only look may pause",
        "dashboard/pages/queues",
        '    access = need(request, "operate", queue)\n    form = await form_of(request)\n    for_s',
        '    access = need(request, "read", queue)\n    form = await form_of(request)\n    for_s',
        tests=_ACTS,
    ),
    python(
        "jobs of any queue may be changed by who may change some",
        "dashboard/pages/jobs",
        '        if not access.allows("operate"):',
        "        if False:",
        tests=_ACTS,
    ),
    python(
        "queues of others are shown",
        "dashboard/pages/overview",
        '[each for each in queues if access.allows("read", each.queue)]',
        "queues",
        tests=_PAGES,
    ),
    python(
        "anyone names who looks",
        "dashboard/callers",
        "        if user and request.scope.get(FROM_PROXY):",
        "        if user:",
        tests=_SIGN_IN,
    ),
    python(
        "a one-time address signs in twice",
        "dashboard/callers",
        "        until, self._once = self._once[1], None",
        "        until = self._once[1]",
        tests=_PAGES,
    ),
    python(
        "a session lasts when its holder has signed out",
        "dashboard/callers",
        '        self._sessions.pop(request.cookies.get(SESSION_COOKIE, ""), None)',
        "        pass",
        tests=_PAGES,
    ),
    python(
        "a form leads to another site",
        "dashboard/route",
        "(place if is_ours else",
        "(place if True else",
        tests=_ACTS,
    ),
    python(
        "scripts can read the token",
        "dashboard/render",
        "httponly=True",
        "httponly=False",
        tests=_PAGES,
    ),
    python(
        "a page may change the database",
        "dashboard/app",
        "only_reads=True",
        "only_reads=False",
        tests=_PAGES,
    ),
    python(
        "a part that is not read takes the page with it",
        "dashboard/reads",
        "        except DatabaseUnavailable as error:",
        "        except ZeroDivisionError as error:",
        tests=_PAGES,
    ),
    python(
        "each viewer of a page reads it",
        "gateway/api/request/live_lists",
        "        if (found := self._lists.get(key)) is None:",
        "        if (found := None) is None:",
        tests=_SIGN_IN,
    ),
    python(
        "an open page is read for ever",
        "gateway/api/request/live_lists",
        "                if once:",
        "                if False:",
        tests=_SIGN_IN,
    ),
    python(
        "a revoked token goes on looking",
        "gateway/api/request/streams",
        '                if problem.slug in ("unauthenticated", "forbidden"):',
        "                if False:",
        tests=_SIGN_IN,
    ),
)
