"""`python -m pgworkd.cli`: the command `pgworkd`."""

from __future__ import annotations

from pgworkd.cli.main import main

main()
