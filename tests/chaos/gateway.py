"""A gateway in a process of its own: python -m tests.chaos.gateway PORT

A line on standard input names a method of its stores and "before" or "after": it kills itself at the next such call.
"""

from __future__ import annotations

import os
import sys
import threading

from pgworkd.database.remote_store import RemoteStore
from tests.chaos.deadly import arm, make_deadly
from tests.kits import quick_gateway

POINTS = ("claim_for", "settle", "heartbeats", "news")

if __name__ == "__main__":
    os.environ["CHAOS_PID"] = str(os.getpid())
    for method in POINTS:
        make_deadly(RemoteStore, method)
    threading.Thread(target=arm, daemon=True).start()
    sys.argv[1:] = ["serve", "--listen", f"127.0.0.1:{sys.argv[1]}"]
    quick_gateway.hurry()
    quick_gateway.main()
