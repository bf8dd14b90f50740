"""The pages, by what they are about. Each asks for a scope, and calls verbs that the command line calls, too."""

from __future__ import annotations

from pgworkd.dashboard.pages import (
    batches,
    dead,
    files,
    fleet,
    forms,
    jobs,
    keys,
    operations,
    overview,
    push,
    queues,
    sign_in,
    system,
)

_MODULES = (files, sign_in, overview, queues, jobs, forms, dead, operations, batches, fleet, push, keys, system)
ROUTERS = tuple(module.router for module in _MODULES)
"""The routers of all pages."""
