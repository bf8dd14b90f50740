"""Clients that generators make from the description, each with a program that uses it; and redocly's lint."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import httpx
import pytest
from anyio.to_thread import run_sync

from tests.kits.gateway import served, token
from tests.kits.node import CLIENTS, compiled, needs_packages, program_of, run_package

pytestmark = [needs_packages, pytest.mark.slow("compilers and programs of node")]

GENERATORS = {
    "fetch": ("openapi-typescript/bin/cli.js", "openapi.json", "-o", "schema.d.ts"),
    "sdk": ("@hey-api/openapi-ts/bin/run.js", "-f", "config.mjs"),
}
CONFIG = 'export default { input: "openapi.json", output: { path: "sdk", module: { extension: ".js" } } };'


def described(url: str, folder: Path) -> None:
    """Writes the description that a gateway serves."""
    program_of(folder)
    (folder / "config.mjs").write_text(CONFIG)
    (folder / "openapi.json").write_text(httpx.get(f"{url}/v1/openapi.json", timeout=60).text)


@pytest.mark.parametrize("name", GENERATORS)
async def test_a_program_with_a_generated_client_creates_and_reads_a_job(dsn: str, tmp_path: Path, name: str) -> None:
    secret = await token(dsn)

    def play() -> str:
        with served(dsn) as (_, url):
            described(url, tmp_path)
            run_package(tmp_path, *GENERATORS[name])
            shutil.copy(CLIENTS / f"{name}.ts", tmp_path)
            env = os.environ | {"PGWORKD_URL": url, "PGWORKD_TOKEN": secret}
            command = ["node", str(compiled(tmp_path) / f"{name}.js")]
            done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr
            return done.stdout

    assert await run_sync(play) == "pending 3 0 422 The request is invalid\n"


async def test_the_description_has_no_warning(dsn: str, tmp_path: Path) -> None:
    def lint() -> str:
        with served(dsn) as (_, url):
            described(url, tmp_path)
            return run_package(tmp_path, "@redocly/cli/bin/cli.js", "lint", "openapi.json", "--format", "json")

    said = await run_sync(lint)
    totals = json.loads(said[said.index("{") : said.rindex("}") + 1])["totals"]
    assert (totals["errors"], totals["warnings"]) == (0, 0), said
