"""Secrets by name, from the environment or a file that nobody else can read; never from the database.

The secret NAME is the variable PGWORKD_SECRET_NAME, or the file NAME in a directory: `whsec_` and base64, as Standard
Webhooks writes it, or any text of at least 24 bytes. Two, separated by a space or a line end, sign both while the
receivers change from one to the other.
"""

from __future__ import annotations

import base64
import binascii
import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path

from pgworkd.errors import UsageError
from pgworkd.process.redaction import hide_secret
from pgworkd.settings.file import SECRET_PREFIX

ENCODED = "whsec_"
CREDENTIALS = "CREDENTIALS_DIRECTORY"
"""The variable in which systemd names the directory of a service's credentials: see systemd.exec(5), LoadCredential."""
BYTES_MIN, BYTES_MAX = 24, 64
"""Size of a secret: https://github.com/standard-webhooks/standard-webhooks, "Signature scheme"."""
SECRETS_MAX = 2
FILE_BYTES_MAX = 4096
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}")


def check_name(name: str) -> str:
    """The name of a secret. UsageError: a letter, then up to 63 letters, digits, _ and -."""
    if not _NAME.fullmatch(name):
        raise UsageError(f"the name of a secret is {name[:80]!r}: it is a letter, then letters, digits, _ and -")
    return name


def read(name: str, directory: Path | None = None, environ: Mapping[str, str] = os.environ) -> list[bytes]:
    """The secrets of that name, the first of them in use, the second still or already. UsageError says what is wrong.

    The environment comes first, then `directory` (None: that of systemd's credentials). Whatever is found is redacted
    from then on, wherever this process writes it.
    """
    variable = SECRET_PREFIX + check_name(name).upper().replace("-", "_")
    if text := environ.get(variable, ""):
        return _decoded(text, f"{variable} in the environment")
    if directory is None and (credentials := environ.get(CREDENTIALS)):
        directory = Path(credentials)
    if directory is None:
        raise UsageError(f"the secret {name!r} is missing: set {variable}, or secrets_dir and write the file {name}")
    return _decoded(_file(directory / name, variable), f"the file {directory / name}")


def _file(path: Path, variable: str) -> str:
    try:
        opened = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a FIFO must not block us
        with os.fdopen(opened, "rb") as file:
            found = os.fstat(opened)
            if not stat.S_ISREG(found.st_mode):
                raise UsageError(f"{path} is no file")
            if found.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
                raise UsageError(f"others may read {path}: chmod 600 {path}")
            return file.read(FILE_BYTES_MAX).decode()
    except FileNotFoundError:
        raise UsageError(f"the secret {path.name!r} is missing: set {variable}, or write {path}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{path} is no text") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None


def _decoded(text: str, where: str) -> list[bytes]:
    texts = text.split()
    if not 1 <= len(texts) <= SECRETS_MAX:
        raise UsageError(f"{where} has {len(texts)} secrets: one is needed, or two while you change it")
    return [_secret(each, where) for each in texts]


def _secret(text: str, where: str) -> bytes:
    hide_secret(text)
    secret = text.encode()
    if text.startswith(ENCODED):
        try:
            secret = base64.b64decode(text.removeprefix(ENCODED), validate=True)
        except binascii.Error:
            raise UsageError(f"{where} is no base64 after {ENCODED}") from None
    if not BYTES_MIN <= len(secret) <= BYTES_MAX:
        raise UsageError(f"{where} has {len(secret)} bytes: {BYTES_MIN} to {BYTES_MAX} are needed; {_EXAMPLE}")
    return secret


_EXAMPLE = f"openssl rand -base64 32 makes one, to be written as {ENCODED}..."
