"""Where the blocks of a page run: a database, a directory and an environment of their own, as a reader has them.

- `python` whose first line names a file (`# jobs.py`) becomes that file; other `python` runs here, with `await` at the
  top level, and its names stay for the next block.
- `sql` goes through psql, and `sh` through a shell, both stopping at the first error. If the last command of a shell
  block goes on (`pgworkd run`, `push`, `dev`, `demo`, `autoscale`, `exporter`, `serve`, a receiver) it is left running,
  and stopped gracefully at the end of the page.
- `console` is a command after each `$ `, with what it prints. `toml` goes through `pgworkd config show`. `ini` and
  `yaml` are parsed; an SQL query in YAML is run.
- The gateway of a page listens on a port of its own, which stands for the default one in the blocks.
- What a block prints is compared with the block below `<!-- output -->`: `...` stands for anything, and so do ids and
  times; the width of columns does not count.
"""

from __future__ import annotations

import ast
import configparser
import contextlib
import inspect
import io
import os
import re
import signal
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import anyio
import asyncpg
import yaml

from tests.kits.daemon import until
from tests.kits.docs import Block
from tests.kits.server import binaries, free_port

COMMAND_S = 60.0
STOP_S = 30.0
SERVING = re.compile(r"(?:pgworkd (?:run|push|dev|demo|autoscale|exporter|serve)|python3 receiver\.py)\b")
SERVES = re.compile(
    r'"event": "(daemon\.ready|worker\.started|http\.listening)"|"address": "\S+:9465"|Postgres is up|sign-in\?once='
    r"|^receiving"
)
GATEWAY = "127.0.0.1:7433"
_PLAIN = {name: value for name, value in os.environ.items() if not name.startswith(("PGWORKD_", "PG"))}
_MASKS = (
    (r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}", "<id>"),
    (r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d(:\d\d(\.\d+)?)?(Z|\+\d\d(:?\d\d)?)?", "<time>"),
)


def programs(pg_bin: Path | None = None) -> list[Path]:
    """psql and pg_dump of the server's version (see `binaries`); without those, what PATH has."""
    found = [binaries(pg_bin) / name for name in ("psql", "pg_dump")]
    return found if found[0].exists() else []


class Sandbox:
    """The setting of one page."""

    def __init__(
        self,
        dsn: str,
        directory: Path,
        environ: Mapping[str, str],
        names: Mapping[str, Any],
        pg_bin: Path | None = None,
    ) -> None:
        self.directory = directory
        venv = Path(sys.executable).parent
        (directory / "bin").mkdir()
        for program in programs(pg_bin):
            (directory / "bin" / program.name).symlink_to(program)
        self.environ = {
            **_PLAIN,
            "PGWORKD_DSN": dsn,
            "DATABASE_URL": dsn,
            "PATH": f"{directory / 'bin'}:{venv}:{os.environ['PATH']}",
            "PYTHONPATH": str(directory),
            "COLUMNS": "300",
            "NO_COLOR": "1",
            "PGWORKD_WORKER_NAME": "worker-1",
            "PGWORKD_SHUTDOWN_S": "5",
            "PGWORKD_HTTP_LISTEN": f"127.0.0.1:{free_port()}",
            **environ,
        }
        self.scope: dict[str, Any] = {"__name__": "page", **names}
        self.printed = ""
        self._serving: list[tuple[subprocess.Popen[bytes], Path]] = []

    @property
    def dsn(self) -> str:
        return self.environ["PGWORKD_DSN"]

    async def run(self, block: Block) -> None:
        """Runs a block as it stands; AssertionError says what went wrong."""
        block = replace(block, text=block.text.replace(GATEWAY, self.environ["PGWORKD_HTTP_LISTEN"]))
        if block.is_output:
            assert_shown(block.text, self.printed)
            return
        run = getattr(self, f"_{block.language}", None)
        assert run is not None, f"{block.name}: no rule for a block of {block.language!r}"
        self.printed = await run(block) or ""

    async def _typescript(self, block: Block) -> str:
        """tests/push/test_node.py checks and runs it, where the packages are that it needs."""
        return self.printed

    async def _text(self, block: Block) -> str:
        """A drawing."""
        return self.printed

    async def _python(self, block: Block) -> str:
        if block.module is not None:
            path = self.directory / block.module
            path.parent.mkdir(exist_ok=True, parents=True)
            path.write_text(block.text, encoding="utf-8")
            self.scope |= await self._played(block, {"__name__": block.module.removesuffix(".py").replace("/", ".")})
            return ""
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            self.scope = await self._played(block, self.scope)
        return printed.getvalue()

    async def _played(self, block: Block, names: Mapping[str, Any]) -> dict[str, Any]:
        scope = dict(names)
        made = compile("\n" * block.line + block.text, block.page, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        sys.path.insert(0, str(self.directory))
        try:
            secrets = {name: value for name, value in self.environ.items() if name.startswith("PGWORKD_SECRET_")}
            with mock.patch.dict(os.environ, secrets), anyio.fail_after(COMMAND_S):
                result = eval(made, scope)  # noqa: S307 - our own pages
                if inspect.isawaitable(result):
                    await result
        finally:
            sys.path.remove(str(self.directory))
        return scope

    async def _sql(self, block: Block) -> str:
        command = ["psql", "-X", "-q", "-v", "ON_ERROR_STOP=1", "-d", self.dsn]
        return await self._done(block, command, stdin=block.text)

    async def _sh(self, block: Block) -> str:
        *_, last = [line for line in block.text.splitlines() if line.strip() and not line.startswith((" ", "#"))]
        if SERVING.match(last):
            await self.serve(_exec_last(block.text), block)
            self.environ |= _exported(block.text)
            return ""
        printed = await self._done(block, ["/bin/sh", "-ec", f"{block.text}\nenv -0 > .env"])
        then = dict(line.split("=", 1) for line in (self.directory / ".env").read_text().split("\0") if line)
        self.environ |= {name: then[name] for name in _exported(block.text)}
        return printed

    async def _console(self, block: Block) -> str:
        for part in re.split(r"(?m)^\$ ", block.text)[1:]:
            command, _, shown = part.partition("\n")
            assert_shown(shown, await self._done(block, ["/bin/sh", "-ec", command], statuses=(0, 1)))
        return ""

    async def _toml(self, block: Block) -> str:
        given = tomllib.loads(block.text)
        path = self.directory / "docs.toml"
        path.write_text(block.text, encoding="utf-8")
        without = [f"--unset={name}" for name in self.environ if name.startswith("PGWORKD_")]
        shown = await self._done(block, ["env", *without, f"PGWORKD_CONFIG={path}", "pgworkd", "config", "show"])
        from_file = {line.split()[0] for line in shown.splitlines() if line.rstrip().endswith(str(path))}
        assert from_file == set(given), f"{block.name}: {shown}"
        return shown

    async def _yaml(self, block: Block) -> str:
        for document in yaml.safe_load_all(block.text):
            for query in _queries(document):
                await self._done(block, ["psql", "-X", "-q", "-v", "ON_ERROR_STOP=1", "-d", self.dsn, "-c", query])
        return ""

    async def _ini(self, block: Block) -> str:
        parser = configparser.RawConfigParser(strict=False)
        parser.optionxform = str  # type: ignore[assignment,method-assign]
        parser.read_string(block.text)
        assert parser.sections(), block.name
        return ""

    async def _done(
        self, block: Block, command: list[str], *, stdin: str | None = None, statuses: tuple[int, ...] = (0,)
    ) -> str:
        with anyio.fail_after(COMMAND_S):
            done = await anyio.run_process(
                command,
                input=(stdin or "").encode(),
                cwd=self.directory,
                env=self.environ,
                check=False,
                stderr=subprocess.STDOUT,
            )
        printed = done.stdout.decode()
        assert done.returncode in statuses, f"{block.name}: {command} exited with {done.returncode}\n{printed}"
        return printed

    async def serve(self, command: str, block: Block) -> None:
        """Leaves a command running once it is ready; `block` is what wants it."""
        path = self.directory / f"serving-{len(self._serving)}.log"
        with path.open("wb") as log:
            process = subprocess.Popen(  # noqa: ASYNC220 - it starts at once, and is not waited for here
                ["/bin/sh", "-ec", command],
                cwd=self.directory, env=self.environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip
        self._serving.append((process, path))

        def ready() -> bool:
            printed = path.read_text(encoding="utf-8", errors="replace")
            assert process.poll() is None, f"{block.name}: it ended\n{printed}"
            return SERVES.search(printed) is not None

        await until(ready, COMMAND_S)

    async def stop(self) -> None:
        """Stops what was left running, the last first; each of ours must end with 0."""
        for process, path in reversed(self._serving):
            is_others = "pgworkd" not in str(process.args)
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                await until(lambda process=process: process.poll() is not None, STOP_S)
            ended = process.returncode
            assert ended == 0 or (ended == -signal.SIGTERM and is_others), path.read_text("utf-8", "replace")

    def kill(self) -> None:
        """Ends what is still there, whatever has happened, and forgets the page's modules."""
        for path in self.directory.rglob("*.py"):
            sys.modules.pop(".".join(path.relative_to(self.directory).with_suffix("").parts), None)
        for process, _ in self._serving:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    async def fact(self, query: str) -> None:
        """Waits until the query's answer is true."""
        connection = await asyncpg.connect(self.dsn, port=int(self.environ["PGPORT"]))
        try:
            await until(lambda: connection.fetchval(query))
        except AssertionError as error:
            raise AssertionError(f"{query}: {error}") from None
        finally:
            await connection.close()


def assert_shown(shown: str, printed: str) -> None:
    """What a page shows is what was printed, but for what changes each time."""
    pattern = re.escape(_plain(shown)).replace(re.escape("..."), ".*?")
    assert re.fullmatch(pattern, _plain(printed), re.DOTALL), f"shown:\n{shown}\nprinted:\n{printed}"


def _plain(printed: str) -> str:
    for mask, name in _MASKS:
        printed = re.sub(mask, name, printed)
    return "\n".join(" ".join(line.split()) for line in printed.strip().splitlines())


def _exported(script: str) -> dict[str, str]:
    """What a reader who pastes the block has in their environment from then on."""
    lines = re.findall(r"(?m)^export (.*)$", script)
    return dict(re.findall(r"(\w+)=(\S+)", " ".join(lines)))


def _exec_last(script: str) -> str:
    """The script with its last command in the shell's place, so that a signal reaches it."""
    lines = script.rstrip().split("\n")
    last = max(n for n, line in enumerate(lines) if SERVING.match(line))
    return "\n".join([*lines[:last], "exec " + lines[last].split("  #")[0], *lines[last + 1 :]])


def _queries(value: Any) -> list[str]:
    """All values named `query` in a document."""
    if isinstance(value, list):
        return [query for each in value for query in _queries(each)]
    if isinstance(value, dict):
        own = [value["query"]] if isinstance(value.get("query"), str) else []
        return own + [query for each in value.values() for query in _queries(each)]
    return []
