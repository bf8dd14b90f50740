"""Requests of httpx, as fast as it can: python -m benchmarks.httpx_loop URL AT_ONCE REQUESTS"""

from __future__ import annotations

import asyncio
import sys

import httpx
import uvloop

BODY = b'{"type":"job.run","data":{"payload":{}}}'


async def main(url: str, at_once: int, requests: int) -> None:
    """POSTs until so many have been answered."""
    left = requests
    limits = httpx.Limits(max_connections=at_once, max_keepalive_connections=at_once)
    async with httpx.AsyncClient(limits=limits, trust_env=False, timeout=30) as client:

        async def post() -> None:
            nonlocal left
            while left > 0:
                left -= 1
                (await client.post(url, content=BODY, headers={"content-type": "application/json"})).raise_for_status()

        async with asyncio.TaskGroup() as tasks:
            for _ in range(at_once):
                tasks.create_task(post())


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
