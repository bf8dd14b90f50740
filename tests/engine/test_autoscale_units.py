"""`pgworkd autoscale --unit`: instances of a systemd unit, with a fake systemctl that keeps its state in files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import asyncpg
import pytest

from tests.kits.cli import clean, run_bare
from tests.kits.commands import Command, Play, Start, ended, events, logged, start
from tests.kits.daemon import until

__all__ = ["clean", "start"]  # fixtures

# units/NAME holds "ActiveState ExecMainCode ExecMainStatus"; without the file the unit is inactive.
SYSTEMCTL = """#!/bin/sh
for unit; do :; done
put() {  # moved into place, so that nobody reads half of it
    echo "$@" > "new.$$" && mv "new.$$" "units/$unit"
}
while_() {
    turns=0
    while "$@" && [ $turns -lt 500 ]; do turns=$((turns + 1)); sleep 0.02; done
}
starting() { read -r state _ < "units/$unit"; [ "$state" = activating ]; }
untouched() { [ ! -e "units/$unit" ]; }
echo "$@" >> calls
[ -e no-systemd ] && exit 1
case $1 in
is-active)
    shift
    for unit; do
        read -r state _ 2>/dev/null < "units/$unit" || state=inactive
        echo "$state"
    done ;;
start)
    [ -e refuses ] && { echo "Unit $unit not found." >&2; exit 5; }
    if [ -e late ]; then while_ untouched; fi  # systemd hears of the stop first
    if [ -e begins ]; then  # it has not said yet that it is ready
        put activating 0 0
        while_ starting
        echo "Job for $unit canceled." >&2
        exit 1
    fi
    put active 0 0 ;;
stop)
    if [ -e slow ]; then put deactivating 0 0; else put inactive 1 0; fi ;;
kill)
    case $2 in
    *KILL) put failed 2 9 ;;
    *) put inactive 1 0 ;;
    esac ;;
show)
    load=loaded
    [ -e refuses ] && load=not-found
    read -r state code status 2>/dev/null < "units/$unit" || { state=inactive code=0 status=0; }
    printf 'LoadState=%s\\nActiveState=%s\\nExecMainCode=%s\\nExecMainStatus=%s\\n' $load $state $code $status ;;
esac
"""


class Systemd:
    """The state of the fake systemctl above."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        (directory / "units").mkdir()
        (directory / "bin").mkdir()
        script = directory / "bin" / "systemctl"
        script.write_text(SYSTEMCTL)
        script.chmod(0o755)

    def set(self, number: int, state: str) -> None:
        (self.directory / "new").write_text(f"{state}\n")
        (self.directory / "new").rename(self.directory / "units" / name(number))

    def active(self) -> set[int]:
        files = (self.directory / "units").iterdir()
        return {int(file.name[5:-8]) for file in files if file.read_text().startswith("active")}

    def calls(self, verb: str) -> list[str]:
        """The arguments of all calls of this verb."""
        file = self.directory / "calls"
        lines = file.read_text().splitlines() if file.exists() else []
        return [line.removeprefix(f"{verb} ") for line in lines if line.startswith(f"{verb} ")]


def name(number: int) -> str:
    return f"pg@q-{number}.service"


@pytest.fixture
def systemd(tmp_path: Path) -> Systemd:
    return Systemd(tmp_path)


@pytest.fixture
def play(start: Start, tmp_path: Path, dsn: str, db: asyncpg.Connection[Any], systemd: Systemd) -> Any:
    play = Play(start, tmp_path, dsn, db)

    def play_(*args: str) -> Command:
        return play("--unit", "pg@q-%d.service", *args, command=(), PATH=f"{systemd.directory}/bin:/usr/bin:/bin")

    play_.depth = play.depth  # type: ignore[attr-defined]
    return play_


async def test_units_are_started_and_stopped_by_queue_depth(play: Any, systemd: Systemd) -> None:
    run = play()
    await until(lambda: systemd.active() == {1})
    await play.depth(5)
    await until(lambda: systemd.active() == {1, 2, 3, 4})
    await play.depth(0)
    await until(lambda: systemd.active() == {1})
    stops = systemd.calls("stop")
    assert stops[0] == f"--no-block {name(4)}" or stops[1] == f"--no-block {name(4)}", "the newest first"
    assert [facts["after"] for facts in await logged(run, "autoscale.decided", 4)] == [3, 4, 2, 1]
    run.stop()
    assert await ended(run) == 0
    assert systemd.active() == set()
    assert not systemd.calls("kill")


async def test_running_units_are_kept(play: Any, systemd: Systemd) -> None:
    for number in (2, 3):
        systemd.set(number, "active 0 0")
    await play.depth(3)
    run = play()
    (begun,) = await logged(run, "autoscale.started")
    assert begun["workers"] == 2
    await logged(run, "worker.started", 2)
    run.stop()
    assert await ended(run) == 0
    assert set(systemd.calls("start")) <= {name(2), name(3)}
    assert systemd.active() == set()


async def test_stopping_a_unit_that_is_still_starting_is_no_failure(play: Any, systemd: Systemd) -> None:
    (systemd.directory / "begins").touch()
    run = play()
    await until((systemd.directory / "units" / name(1)).exists)
    run.stop()
    assert await ended(run) == 0
    assert f"Job for {name(1)} canceled." in run.lines, "systemctl start had failed"


async def test_a_stop_that_overtakes_the_start_is_repeated(play: Any, systemd: Systemd) -> None:
    (systemd.directory / "late").touch()
    run = play()
    await until(lambda: systemd.calls("start"))
    run.stop()
    assert await ended(run) == 0
    assert len(systemd.calls("stop")) == 2
    assert systemd.active() == set()


async def test_a_failed_unit_is_started_again(play: Any, systemd: Systemd) -> None:
    run = play()
    await until(lambda: systemd.active() == {1})
    systemd.set(1, "failed 2 9")
    (end,) = await logged(run, "worker.ended")
    assert (end["worker"], end["signal"], end["restart_in_s"]) == (name(1), "SIGKILL", 0)
    await until(lambda: systemd.active() == {1})
    run.stop()
    assert await ended(run) == 0


async def test_a_unit_that_systemd_restarts_is_not_touched(play: Any, systemd: Systemd) -> None:
    run = play()
    await until(lambda: systemd.active() == {1})
    systemd.set(1, "activating 1 1")
    shown = len(systemd.calls("show"))
    await until(lambda: len(systemd.calls("show")) > shown + 2)
    assert not events(run, "worker.ended")


@pytest.mark.parametrize(("state", "code"), [("failed 1 2", 2), ("failed 2 2", None)])
async def test_only_an_exit_code_of_2_is_a_wrong_configuration(
    play: Any, systemd: Systemd, state: str, code: int | None
) -> None:
    run = play()
    await until(lambda: systemd.active() == {1})
    systemd.set(1, state)
    if code is None:
        assert (await logged(run, "worker.ended"))[0]["signal"] == "SIGINT"
        await until(lambda: systemd.active() == {1})
        run.stop()
    assert await ended(run) == (code or 0)


async def test_an_unknown_unit_ends_autoscale_with_2(play: Any, systemd: Systemd) -> None:
    (systemd.directory / "refuses").touch()
    run = play()
    assert await ended(run) == 2
    assert f"Unit {name(1)} not found." in run.lines
    assert len(systemd.calls("start")) == 1


async def test_a_unit_that_does_not_stop_in_time_is_killed(play: Any, systemd: Systemd) -> None:
    (systemd.directory / "slow").touch()
    run = play("--stop-timeout-s=0.1")
    await until(lambda: systemd.active() == {1})
    run.stop()
    assert await ended(run) == 1
    assert systemd.calls("kill") == [f"--signal=SIGKILL {name(1)}"]


async def test_a_second_signal_is_forwarded_to_the_units_main_process(play: Any, systemd: Systemd) -> None:
    (systemd.directory / "slow").touch()
    run = play()
    await until(lambda: systemd.active() == {1})
    run.stop()
    await until(lambda: systemd.calls("stop"))
    run.stop()
    assert await ended(run) == 0
    assert systemd.calls("kill") == [f"--kill-who=main --signal=SIGINT {name(1)}"]


async def test_a_host_without_systemd_is_reported(play: Any, systemd: Systemd) -> None:
    (systemd.directory / "no-systemd").touch()
    run = play()
    assert await ended(run) == 2
    assert run.lines[-1].startswith("pgworkd: --unit: systemctl does not answer")


def test_without_systemctl_nothing_is_started(clean: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    result = run_bare("autoscale", "-q", "q", "--max", "2", "--up-at", "2", "--down-at", "1", "--unit", "a@%d.service")
    assert result.exit_code == 2
    assert "--unit: there is no systemctl on the PATH" in result.stderr
