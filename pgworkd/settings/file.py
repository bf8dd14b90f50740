"""The TOML file of settings, unknown names in it and in the environment, and the list of queues as text."""

from __future__ import annotations

import json
import os
import re
import stat
import tomllib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import AfterValidator
from pydantic_core import PydanticCustomError

from pgworkd.core.validation import closest
from pgworkd.errors import UsageError

PREFIX = "PGWORKD_"
SECRET_PREFIX = f"{PREFIX}SECRET_"
"""Before the name of a secret that signs pushed jobs. Any name may follow, also one like that of a setting."""
DATABASE_URL = "DATABASE_URL"
"""The variable of many platforms and frameworks that has the address of an application's database."""
FILE_DEFAULT = "pgworkd.toml"
FILE_BYTES_MAX = 1024 * 1024
CONCURRENCY_MAX = 10_000
NAME_CHARS_MAX = 200


def _there(path: Path) -> Path:
    if not os.path.isdir(path):  # noqa: PTH112 - which is False, and no error, for a name that is too long
        raise PydanticCustomError("path_not_directory", "it is no directory")
    return path


Directory = Annotated[Path, AfterValidator(_there)]
"""A directory that is there."""


class SettingsFile(NamedTuple):
    """The TOML file: its path, its table ({} if there is no file), and whether every user may read it."""

    path: str
    table: dict[str, Any]
    is_public: bool = False


def read_file() -> SettingsFile:
    """Reads the file named by PGWORKD_CONFIG, or pgworkd.toml in the working directory if there is one.

    UsageError if PGWORKD_CONFIG names a file that does not exist, or if it is not a regular file, unreadable, larger
    than 1 MiB or not TOML. (The TOML source of pydantic passes over the first two in silence.)
    """
    given = os.environ.get(f"{PREFIX}CONFIG")
    path = Path(given or FILE_DEFAULT)
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):  # reading a FIFO would block
            problem = "is not a regular file: name a TOML file"
        elif found.st_size > FILE_BYTES_MAX:
            problem = f"is larger than {FILE_BYTES_MAX:,} bytes: name a TOML file"
        else:
            table = tomllib.loads(path.read_bytes().decode("utf-8-sig"))
            return SettingsFile(str(path), table, bool(found.st_mode & stat.S_IROTH))
    except FileNotFoundError:
        if not given:
            return SettingsFile(str(path), {})
        problem = f"does not exist: correct or unset {PREFIX}CONFIG"
    except OSError as error:
        problem = f"cannot be read ({error.strerror}): check the path and its permissions"
    except UnicodeDecodeError:
        problem = "is not UTF-8 text: save it as UTF-8"
    except (ValueError, RecursionError) as error:
        problem = f"is not valid TOML: {error}"
    raise UsageError(f"{path} {problem}")


def unknown_names(given: Collection[str], known: Collection[str], origin: str) -> list[str]:
    """An error for each of the `given` names that is not `known`, with the closest known one."""
    return [
        f"{origin}: unknown setting {name[:NAME_CHARS_MAX]!r}" + _meant(name, known, 0.6)
        for name in given
        if name not in known
    ]


def misspelt_environment(known: Collection[str]) -> list[str]:
    """An error for each variable PGWORKD_... whose name is close to a setting's.

    Others are ignored: service managers and Kubernetes set variables with that prefix, and each secret has its own.
    """
    names = [name for name, value in os.environ.items() if value and name.upper().startswith(PREFIX)]
    found = []
    for name in (each for each in names if not each.startswith(SECRET_PREFIX)):
        field = name[len(PREFIX) :].lower()
        if field not in known and field != "config" and (hint := _meant(field, known, 0.8, PREFIX)):
            found.append(f"environment: unknown variable {name}{hint}")
    return found


def database_url() -> str | None:
    """What DATABASE_URL says, if that is an address of Postgres: it may be one of another database."""
    value = os.environ.get(DATABASE_URL, "").strip()
    scheme = value.lstrip("'\"").partition("://")[0]
    return value if scheme.partition("+")[0] in ("postgresql", "postgres") else None


def parse_queues(value: object) -> dict[str, int | None]:
    """Queue name -> concurrency, or None for the queue's own.

    Accepts a list of "name" or "name=concurrency", such a list as text (separated by commas or line breaks, or JSON),
    or a mapping. ValueError for a name that occurs twice or does not have 1 to 200 printable characters, or a
    concurrency outside 1 to 10,000.
    """
    if isinstance(value, str):
        value = _json(value) if value.lstrip().startswith("[") else re.split(r"[,\n]", value)
    if isinstance(value, Mapping):
        pairs = list(value.items())
    elif isinstance(value, (list, tuple)) and all(isinstance(item, str) for item in value):
        pairs = [_split(item) for item in value if item.strip()]
    else:
        raise ValueError('must be a list like ["mail", "ocr=4"]')
    queues: dict[str, int | None] = {}
    for name, most in pairs:
        if not isinstance(name, str) or not 1 <= len(name) <= NAME_CHARS_MAX or not name.isprintable():
            raise ValueError(f"queue names must be 1 to {NAME_CHARS_MAX} printable characters")
        if name in queues:
            raise ValueError(f"queue {quoted(name)} is named twice: name it once")
        if most is not None and (type(most) is not int or not 1 <= most <= CONCURRENCY_MAX):
            limits = f"a whole number from 1 to {CONCURRENCY_MAX}"
            raise ValueError(f"the concurrency of queue {quoted(name)} must be {limits}, as in name=4")
        queues[name] = most
    return queues


def quoted(value: object) -> str:
    """`value` for an error message: shortened, escaped, and hidden if it might be an address with a password."""
    text = "a number of that size" if isinstance(value, int) and value.bit_length() > 1000 else str(value)
    return "(not shown)" if "://" in text or "@" in text else repr(text[:40])


def _json(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _split(item: str) -> tuple[str, object]:
    name, sign, most = item.rpartition("=")
    if not sign:
        return most.strip(), None
    most = most.strip()
    is_number = most.isascii() and most.isdecimal() and len(most) <= 5
    return name.strip(), int(most) if is_number else most


def _meant(name: str, known: Collection[str], likeness: float, prefix: str = "") -> str:
    found = closest(name.lower(), known, likeness=likeness)
    return f", did you mean {prefix}{found.upper() if prefix else found}?" if found else ""
