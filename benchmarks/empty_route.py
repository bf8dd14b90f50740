"""A FastAPI route that does nothing, served as the gateway is: python -m benchmarks.empty_route PORT"""

from __future__ import annotations

import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import uvloop
from fastapi import FastAPI

from pgworkd.gateway.api.server import server


@asynccontextmanager
async def lifespan(_: Any) -> AsyncIterator[None]:
    """Nothing to start."""
    yield


app = FastAPI(lifespan=lifespan)


@app.get("/")
async def nothing() -> dict[str, str]:
    """Does nothing."""
    return {}


if __name__ == "__main__":
    listener = socket.create_server(("127.0.0.1", int(sys.argv[1])), backlog=1024)
    uvloop.run(server(app, 1.0).serve([listener]))
