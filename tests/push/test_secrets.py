"""Secrets come from the environment or a file that is nobody else's, and never show up anywhere."""

from __future__ import annotations

import base64
import os
from pathlib import Path

import pytest

from pgworkd.errors import UsageError
from pgworkd.process import redaction
from pgworkd.process.redaction import redact
from pgworkd.push.secrets import check_name, read

RAW = bytes(range(100, 132))
ENCODED = "whsec_" + base64.b64encode(RAW).decode()
TEXT = "c4n4ry-of-at-least-24-bytes"


@pytest.fixture(autouse=True)
def nothing_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redaction, "_secrets", ())


def written(directory: Path, content: str, mode: int = 0o600, name: str = "shop") -> Path:
    path = directory / name
    path.write_text(content)
    path.chmod(mode)
    return path


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (ENCODED, [RAW]),
        (TEXT, [TEXT.encode()]),
        (f" {ENCODED}\n{TEXT}\n", [RAW, TEXT.encode()]),
        (f"{TEXT} {ENCODED}", [TEXT.encode(), RAW]),
    ],
)
def test_a_secret_is_found_in_both_places(tmp_path: Path, text: str, found: list[bytes]) -> None:
    written(tmp_path, text)
    assert read("shop", tmp_path, {}) == found
    written(tmp_path, "another-one-of-at-least-24-bytes")
    assert read("shop", tmp_path, {"PGWORKD_SECRET_SHOP": text}) == found, "the environment comes first"
    assert read("my-shop", None, {"PGWORKD_SECRET_MY_SHOP": text}) == found
    assert all(each not in redact(f"it is {text}") for each in text.split())


WRONG = {
    "": "has 0 secrets",
    " \n": "has 0 secrets",
    f"{TEXT} {TEXT}2 {TEXT}3": "has 3 secrets",
    "short": "has 5 bytes: 24 to 64 are needed",
    "whsec_c2hvcnQ=": "has 5 bytes",
    "whsec_!!!": "no base64",
    f"whsec_{base64.b64encode(bytes(65)).decode()}": "has 65 bytes",
}


@pytest.mark.parametrize("text", WRONG)
def test_a_wrong_secret_is_refused_and_not_quoted(tmp_path: Path, text: str) -> None:
    written(tmp_path, text)
    with pytest.raises(UsageError, match=WRONG[text]) as error:
        read("shop", tmp_path, {})
    assert not text.strip() or all(each not in str(error.value) for each in text.split())


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o610, 0o660, 0o666, 0o777])
def test_a_file_that_others_may_read_or_write_is_refused(tmp_path: Path, mode: int) -> None:
    path = written(tmp_path, TEXT, mode)
    with pytest.raises(UsageError, match=f"others may read .*: chmod 600 {path}"):
        read("shop", tmp_path, {})


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"'shop' is missing: set PGWORKD_SECRET_SHOP, or write .*/shop"):
        read("shop", tmp_path, {})
    with pytest.raises(UsageError, match=r"'shop' is missing: set PGWORKD_SECRET_SHOP, or secrets_dir"):
        read("shop", None, {})
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe", 0o600)
    for name in ("folder", "pipe"):
        with pytest.raises(UsageError, match=r"is no file|cannot be read"):
            read(name, tmp_path, {})
    (tmp_path / "binary").write_bytes(b"\xff" * 30)
    (tmp_path / "binary").chmod(0o600)
    with pytest.raises(UsageError, match="is no text"):
        read("binary", tmp_path, {})


@pytest.mark.parametrize("name", ["", "../etc/passwd", "a/b", "1a", "-a", "a b", "ä", "a" * 65, "a\n", "a.b", "\0"])
def test_a_wrong_name_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="the name of a secret"):
        check_name(name)
    with pytest.raises(UsageError, match="the name of a secret"):
        read(name, Path("/"), {})
