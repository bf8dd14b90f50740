"""All commands, and how errors are shown: one line on standard error, without a traceback and without secrets."""

from __future__ import annotations

import os
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command_name

from pgworkd.cli import (
    autoscale,
    batches,
    bench,
    boards,
    dead,
    doctor,
    endpoints,
    fleet,
    gateway,
    job_operations,
    jobs,
    keys,
    operations,
    queues,
    run,
    schedules,
    stacks,
    watching,
)
from pgworkd.cli.output import note, out
from pgworkd.cli.wrong_values import reworded
from pgworkd.core.validation import closest
from pgworkd.errors import PgworkdError, SchemaError, UsageError

# typer raises subclasses of this for a wrong command line; of these only BadParameter is public in all versions.
_WRONG_USAGE: type[Any] = typer.BadParameter.__mro__[1]


class _Commands(TyperGroup):
    """The group of all commands: shows every error in one line and maps it to an exit code."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,  # noqa: FBT001 - typer's signature
        windows_expand_args: bool = True,  # noqa: FBT001
        **extra: Any,
    ) -> Any:
        if sys.stdout is not None and hasattr(sys.stdout, "reconfigure"):
            sys.stdout.reconfigure(errors="backslashreplace")  # a terminal without UTF-8
        try:
            code = super().main(
                args=args,
                prog_name=prog_name or "pgworkd",
                complete_var=complete_var,
                standalone_mode=False,
                windows_expand_args=windows_expand_args,
                **extra,
            )
        except Exception as error:  # noqa: BLE001 - the outermost handler
            code = _show(error)
        code = code if isinstance(code, int) else 0
        if standalone_mode:
            sys.exit(code)
        return code


def _show(error: BaseException) -> int:
    """Prints an error in one line; returns the exit code."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, _WRONG_USAGE):
        return _show_usage(error)
    if isinstance(error, PgworkdError):
        note(str(error), "error")
        return 2 if isinstance(error, (UsageError, SchemaError)) else 1
    if isinstance(error, typer.Abort):
        note("nothing done")
    elif isinstance(error, OSError):
        note(f"{error.filename}: {error.strerror}" if error.filename else str(error), "error")
    else:
        _show_bug(error)
    return 1


def _show_usage(error: Any) -> int:
    text = reworded(error)
    context = getattr(error, "ctx", None)
    if text:  # an empty one means that the help has been printed
        path = context.command_path if context is not None else "pgworkd"
        if context is not None and text.startswith("No such command") and "Did you mean" not in text:
            name = text.split("'")[1] if text.count("'") > 1 else ""
            if found := closest(name, getattr(context.command, "commands", {}), likeness=0.5):
                text += f" Did you mean {found!r}?"
        note(f"{text} (see {path} --help)", "error")
    return 2


def _show_bug(error: BaseException) -> None:
    frames = traceback.extract_tb(error.__traceback__)
    ours = [f for f in frames if Path(__file__).parents[1] in Path(f.filename).parents] or frames
    place = f" ({Path(ours[-1].filename).name}:{ours[-1].lineno})" if ours else ""
    note(f"internal error, please report it: {type(error).__name__}: {error}{place}", "error")
    if os.environ.get("PGWORKD_LOG_LEVEL", "").lower() == "debug":
        for line in "".join(traceback.format_exception(error)).splitlines():
            note(line)


class _Command(TyperCommand):
    """A command that refuses two values for one option: it would follow the last and ignore the others."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        _, _, given = self.make_parser(ctx).parse_args(args=list(args))
        option: Any
        for option, times in Counter(given).items():
            if times > 1 and option.param_type_name == "option" and not (option.multiple or option.is_flag):
                raise typer.BadParameter("given more than once, of which only the last would count", ctx, option)
        return super().parse_args(ctx, args)


app = typer.Typer(
    name="pgworkd",
    cls=_Commands,
    help="Run background jobs from Postgres: insert a row, and it runs.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
config_app = typer.Typer(help="Show the settings.", no_args_is_help=True)


def _version(value: bool) -> None:  # noqa: FBT001 - typer calls it
    if value:
        from importlib.metadata import version

        out(f"pgworkd {version('pgworkd')}")
        raise typer.Exit


@app.callback()
def _root(
    *,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    del version


_PANELS: dict[str, tuple[Callable[..., Any], ...]] = {
    "Run": (
        run.run,
        run.migrate,
        fleet.adopt,
        run.grants,
        run.dev,
        run.demo,
        bench.bench,
        watching.exporter,
        watching.health,
        gateway.serve,
        endpoints.push,
    ),
    "Jobs": (
        jobs.enqueue,
        jobs.jobs,
        jobs.job,
        jobs.explain,
        stacks.stack,
        jobs.replay,
        dead.dead,
        dead.mute,
        job_operations.retry,
        job_operations.cancel,
        job_operations.discard,
        job_operations.undepend,
        job_operations.edit,
        job_operations.audit,
    ),
    "Fleet": (
        queues.pause,
        queues.resume,
        fleet.workers,
        fleet.stats,
        doctor.doctor,
        boards.grafana,
        boards.alerts,
    ),
}
for _panel, _commands in _PANELS.items():
    for _command in _commands:
        app.command(rich_help_panel=_panel)(_command)
# Options behind the worker's command belong to that command, with or without -- before it.
for _command in (autoscale.autoscale, run.conformance):
    app.command(rich_help_panel="Run", context_settings={"allow_interspersed_args": False})(_command)
app.add_typer(queues.group, name="queues", rich_help_panel="Fleet")
app.add_typer(endpoints.group, name="endpoints", rich_help_panel="Fleet")
app.add_typer(schedules.group, name="schedules", rich_help_panel="Fleet")
app.add_typer(batches.group, name="batches", rich_help_panel="Jobs")
app.add_typer(keys.group, name="keys", rich_help_panel="Jobs")
app.add_typer(operations.group, name="operations", rich_help_panel="Jobs")
app.add_typer(gateway.tokens, name="token", rich_help_panel="Run")
config_app.command("show")(fleet.config_show)
app.add_typer(config_app, name="config", rich_help_panel="Run")
for _group in (app, *(added.typer_instance for added in app.registered_groups)):
    for _registered in _group.registered_commands if _group is not None else ():
        if _registered.callback not in (run.run, autoscale.autoscale):  # scripts add to the options of these
            _registered.cls = _Command


def called(arguments: Sequence[str]) -> typer.Typer:
    """The command line with the command or group alone that these arguments name, if they do.

    To build all takes longer than most commands: 0.15 s of CPU.
    """
    name = arguments[0] if arguments else ""
    commands = [
        each for each in app.registered_commands if each.callback and get_command_name(each.callback.__name__) == name
    ]
    groups = [each for each in app.registered_groups if each.name == name]
    if commands or groups:
        app.registered_commands, app.registered_groups = commands, groups
    return app
