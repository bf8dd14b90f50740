"""Loading the application: "notes.jobs:app" to the `App` it names, and one clear line when that fails.

The name comes from the command line or the settings, never from a row.
"""

from __future__ import annotations

import importlib
import inspect
import os
import pkgutil
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from pgworkd.core.validation import closest
from pgworkd.engine.registry import Registry
from pgworkd.errors import UsageError

REASON_CHARS_MAX = 300
_OURS = str(Path(__file__).parents[1]) + os.sep


def load_app(reference: str) -> Registry:
    """The `App` that `reference` names as "module:attribute"; the attribute may also be a function that returns one.

    The working directory is searched first, as `python -m` does. Raises UsageError, in one line, if the module is
    missing or raises, or if the attribute is missing or not an App.
    """
    module_name, colon, path = reference.partition(":")
    parts = [*module_name.split("."), *path.split(".")]
    if not colon or not all(part.isidentifier() for part in parts):
        raise UsageError(f"the app {reference[:200]!r} must be module:attribute, for example notes.jobs:app")
    directory = str(Path.cwd())
    if sys.path[:1] != [directory]:
        sys.path.insert(0, directory)
    module = _import(module_name)
    return _app(_attribute(module, path), reference, module)


def _import(name: str) -> ModuleType:
    problem = ""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # The module itself, or a package on the way to it; anything else is an import inside it that failed.
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            hint = _meant(error.name.rpartition(".")[2], _neighbours(error.name))
            problem = f"{error.msg} (searched {Path.cwd()} first){hint}"
        else:
            problem = _raised("on import", error)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a module may raise anything, also by sys.exit()
        problem = _raised("on import", error)
    raise UsageError(f"module {name!r}: {problem}")  # out here, so that it carries no context


def _attribute(module: ModuleType, path: str) -> Any:
    value: Any = module
    for name in path.split("."):
        problem = ""
        try:
            value = getattr(value, name)
            continue
        except AttributeError:
            apps = _apps(module) if value is module else []
            hint = _meant(name, apps or [n for n in dir(value) if not n.startswith("_")])
            problem = f"has no attribute {name!r}" + (hint or _listed(apps))
        except Exception as error:  # noqa: BLE001 - a module's __getattr__ may raise anything
            problem = f"attribute {name!r}: " + _raised("when looked up", error)
        raise UsageError(f"module {module.__name__!r} {problem}")
    return value


def _app(value: Any, reference: str, module: ModuleType) -> Registry:
    if isinstance(value, Registry):
        return value
    hint = _listed(_apps(module))
    if not inspect.isroutine(value):
        raise UsageError(f"{reference!r} is {_what(value)}, not a pgworkd.App{hint}")
    if inspect.iscoroutinefunction(value):
        raise UsageError(f"{reference!r} is an async function: name an App, or a plain function that returns one")
    try:
        inspect.signature(value).bind()
    except (TypeError, ValueError) as error:
        problem = f"is a function that cannot be called without arguments ({_reason(error)}){hint}"
    else:
        try:
            made = value()
        except (Exception, SystemExit) as error:  # noqa: BLE001 - as on import
            problem = _raised("when called", error)
        else:
            if isinstance(made, Registry):
                return made
            problem = f"returned {_what(made)}, not a pgworkd.App{hint}"
    raise UsageError(f"{reference!r} {problem}")


def _apps(module: ModuleType) -> list[str]:
    return [name for name, value in vars(module).items() if isinstance(value, Registry)]


def _listed(apps: list[str]) -> str:
    return f"; apps in this module: {', '.join(apps)}" if apps else ""


def _what(value: object) -> str:
    if value is None:
        return "None"
    if inspect.isclass(value):
        return f"the class {value.__name__} (name an instance)"
    if inspect.ismodule(value):
        return f"the module {value.__name__!r}"
    return f"of type {type(value).__name__}"


def _raised(when: str, error: BaseException) -> str:
    frames = _frames(error)
    place = ""
    if isinstance(error, SyntaxError) and error.filename:
        place = f" ({_shown(error.filename)}:{error.lineno})"
    elif frames:
        place = f" ({_shown(frames[-1].filename)}:{frames[-1].lineno})"
    return f"raised {when}: {_reason(error)}{place}"


def _reason(error: BaseException) -> str:
    """The last line of the traceback, on one line."""
    text = " ".join("".join(traceback.format_exception_only(error)[-1:]).split())
    return text if len(text) <= REASON_CHARS_MAX else text[: REASON_CHARS_MAX - 1] + "…"


def _frames(error: BaseException) -> list[traceback.FrameSummary]:
    """The frames of an error, outermost first: those in the user's own code if there are any, else all."""
    summary = traceback.extract_tb(error.__traceback__)
    frames = [f for f in summary if not f.filename.startswith(("<", _OURS))]
    own = [f for f in frames if _is_below_here(f.filename)]
    return own or frames


def _is_below_here(filename: str) -> bool:
    path = Path(filename)
    return path.is_relative_to(Path.cwd()) and "site-packages" not in path.parts


def _shown(filename: str) -> str:
    return str(Path(filename).relative_to(Path.cwd())) if _is_below_here(filename) else filename


def _neighbours(name: str) -> list[str]:
    """The modules beside the missing one."""
    package = name.rpartition(".")[0]
    places = getattr(sys.modules.get(package), "__path__", []) if package else [str(Path.cwd())]
    return [module.name for module in pkgutil.iter_modules(list(places))]


def _meant(name: str, known: Iterable[str]) -> str:
    found = closest(name, known)
    return f", did you mean {found!r}?" if found else ""
