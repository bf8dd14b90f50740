"""The commands on endpoints."""

from __future__ import annotations

import asyncio
import json
import stat
from pathlib import Path

import pytest

from tests.kits.cli import Shell, clean, shell
from tests.kits.downstream import Downstream, answer_of, headers_of, message_of, serving
from tests.kits.verbs import Db

__all__ = ["clean", "shell"]  # fixtures
URL = "https://billing.example.com/jobs"


def test_the_life_of_an_endpoint(shell: Shell) -> None:
    assert shell("endpoints", "--json").stdout == "[]\n"
    said = shell("endpoints", "add", "billing", URL, "--secret", "billing", "--queue", "a", "-q", "b").stdout
    assert said == "endpoint billing is added; sent there: a, b\n"
    shell("endpoints", "set", "billing", "--timeout-s", "5", "--header", "X-Team: billing", "--mode", "callback")
    (row,) = json.loads(shell("endpoints", "--json").stdout)
    shown = {"url": URL, "timeout_s": 5, "headers": {"X-Team": "billing"}, "mode": "callback", "secret_name": "billing"}
    assert shown.items() <= row.items()
    assert (row["state"], row["queues"]) == ("live", ["a", "b"])
    assert URL in shell("endpoints", "show", "billing").stdout
    assert shell("endpoints", "disable", "billing").stdout == "endpoint billing is disabled\n"
    assert shell("endpoints", "disable", "billing").stdout == "endpoint billing was disabled already\n"
    assert "disabled" in shell("endpoints").stdout
    assert json.loads(shell("queues", "show", "a", "--json").stdout)["paused"]["value"] == "until resumed"
    assert shell("endpoints", "enable", "billing").stdout == "endpoint billing is enabled\n"
    assert "queues set QUEUE --unset endpoint" in shell.refused("endpoints", "remove", "billing")
    for queue in ("a", "b"):
        shell("queues", "set", queue, "--unset", "endpoint")
    assert shell("endpoints", "remove", "billing").stdout == "endpoint billing is removed\n"
    what = [entry["what"] for entry in json.loads(shell("audit", "--json").stdout)]
    assert what.count("endpoint") == 5


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["add", "e", URL], "give the name of a secret, or say unsigned"),
        (["add", "e", "gopher://x/", "--unsigned"], "https:// is needed"),
        (["add", "e", "https://x/#y", "--unsigned"], "fragment"),
        (["add", "e", URL, "--unsigned", "--secret", "s"], "--secret and --unsigned: give one of them"),
        (["add", "e", URL, "--secret", "../s"], "the name of a secret"),
        (["add", "e", URL, "--unsigned", "--header", "X"], "write NAME:VALUE"),
        (["add", "e", URL, "--unsigned", "--header", "Content-Length: 7"], "set by pgworkd"),
        (["add", "e", URL, "--unsigned", "--mode", "later"], "give sync or callback"),
        (["add", "e", URL, "--unsigned", "--timeout-s", "0"], "give 0.1 to 3,600 seconds"),
        (["add", "e", URL, "--unsigned", "--callback-timeout-s", "421"], "give 10 to 420 seconds"),
        (["set", "known"], "nothing to change"),
        (["set", "known", "--url", "ftp://x/"], "https:// is needed"),
        (["add", "known", URL, "--unsigned"], "change it with pgworkd endpoints set"),
    ],
)
def test_what_is_wrong_is_refused_with_the_remedy(shell: Shell, args: list[str], said: str) -> None:
    shell("endpoints", "add", "known", URL, "--unsigned")
    before = shell("endpoints", "--json").stdout
    assert said in shell.refused("endpoints", *args)
    assert shell("endpoints", "--json").stdout == before


@pytest.mark.parametrize("how", ["show", "set", "test", "disable", "enable", "remove"])
def test_an_unknown_one_is_said_to_be_unknown(shell: Shell, how: str) -> None:
    more = ["--timeout-s", "5"] if how == "set" else []
    assert "there is no endpoint 'none'" in shell.refused("endpoints", how, "none", *more, code=1)


async def test_a_test_message_is_signed_and_its_answer_is_shown(shell: Shell, tmp_path: Path) -> None:
    secret = tmp_path / "billing"
    secret.write_text("whsec_c3RhbmRhcmQgd2ViaG9va3MsIGluIGEgZmlsZQ==")
    secret.chmod(0o600)
    async with serving(Downstream()) as down:
        add = ("endpoints", "add", "billing", down.url, "--secret", "billing", "--allow-private")
        await asyncio.to_thread(shell, *add)
        test = ("endpoints", "test", "billing", "--secrets-dir", str(tmp_path))
        assert (await asyncio.to_thread(shell, *test)).stdout == "endpoint billing: HTTP 200: {}\n"
        assert message_of(down.requests[0])["type"] == "endpoint.test"
        assert headers_of(down.requests[0])["webhook-signature"].startswith("v1,")
        down.answer = answer_of(503, b"closed")
        assert (await asyncio.to_thread(shell, *test, code=1)).stdout == "endpoint billing: HTTP 503: closed\n"
    assert "NotDelivered" in (await asyncio.to_thread(shell, *test, code=1)).stdout
    secret.chmod(0o600 | stat.S_IROTH)
    assert f"chmod 600 {secret}" in await asyncio.to_thread(shell.refused, *test)
    secret.unlink()
    assert "set PGWORKD_SECRET_BILLING" in await asyncio.to_thread(shell.refused, *test)


async def test_a_private_address_is_refused_when_it_is_written_and_when_it_is_called(shell: Shell, db: Db) -> None:
    said = await asyncio.to_thread(shell.refused, "endpoints", "add", "e", "http://127.0.0.1:9099/", "--unsigned")
    assert "127.0.0.1 is not of the public internet: give another host, or say allow_private" in said
    await db.execute("""SELECT pgworkd.set_endpoint('e', '{"url": "http://127.0.0.1:9099/", "unsigned": true}')""")
    assert "127.0.0.1 is not of the public internet" in await asyncio.to_thread(shell.refused, "endpoints", "test", "e")
