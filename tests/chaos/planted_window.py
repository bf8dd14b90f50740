"""Bugs in what users and operators see: README, the commands, the unit."""

from __future__ import annotations

from tests.chaos.bug import Bug, python
from tests.planting import Planted

BUGS = (
    Bug(
        Planted("README's tour names a queue that the app lacks", "README.md", "thumbnail=4", "ocr=4"),
        tests="tests/stories/test_12_readme.py",
    ),
    python(
        "systemd ends a start that waits for the database",
        "systemd",
        "                    if not told_ready:\n",
        "                    if False:\n",
        tests="tests/engine/test_systemd.py",
    ),
    Bug(
        Planted("the unit keeps its capabilities", "systemd/pgworkd.service", "CapabilityBoundingSet=\n", "\n"),
        tests="tests/unit/test_units.py",
    ),
    python(
        "a paused queue is not called paused where its settings are shown",
        "queue_acts",
        " || jsonb_build_object('paused', q.paused_until > pgworkd.clock())",
        "",
        tests="tests/engine/test_settings_cli.py",
    ),
    python(
        "one job is called jobs",
        "bounds",
        "noun if count == 1 else plural",
        "plural",
        tests="tests/unit/test_words.py",
    ),
    python(
        "doctor takes dead workers for live ones",
        "doctor_sql",
        " AND w.lost_at IS NULL AND w.lease_until >= pgworkd.clock()) fleet",
        ") fleet",
        tests="tests/engine/test_cli_health.py",
    ),
    python(
        "doctor does not see jobs behind dead ones",
        "cli_health",
        "_behind(health), ",
        "[], ",
        tests="tests/engine/test_cli_health.py",
    ),
    python(
        "nobody is warned of a stop that its container cuts short",
        "cli_serve",
        '    if settings.origin("shutdown_s") != "default":',
        "    if True:",
        tests="tests/engine/test_cli_serve.py",
    ),
)
