"""`pgworkd serve` for workers whose leases last only seconds: python -m tests.kits.quick_gateway FLAGS...

Beats are sent, and lists compared, more often: so often that leases of a second or two are renewed in time.
"""

from __future__ import annotations

import sys

from pgworkd.cli.main import main
from pgworkd.engine.life.maintenance import Periods
from pgworkd.gateway.workers import beats, service, watch


def hurry() -> None:
    """Shortens all periods of this process."""
    beats.PERIOD_S, watch.PERIOD_S = 0.1, 1.0
    service.LEASE_S, service.HEARTBEAT_S = 2.0, 0.4
    Periods.__init__.__defaults__ = tuple(  # type: ignore[misc]
        {"rescue_s": 0.1, "expire_s": 0.1}.get(name, default)
        for name, default in zip(Periods.__slots__, Periods.__init__.__defaults__ or (), strict=True)
    )


if __name__ == "__main__":
    hurry()
    sys.argv.insert(1, "serve")
    main()
