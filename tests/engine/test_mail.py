"""Mail: to a real server, with and without TLS; what goes wrong says what to do, and no text forges a header."""

from __future__ import annotations

import json
import re
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import asyncpg
import pytest
import trustme
from hypothesis import given
from hypothesis import strategies as st

from pgworkd import App, PermanentError
from pgworkd.alerts.mail import MailError, mail, send_mail
from pgworkd.core.mail_url import mail_server
from pgworkd.errors import UsageError
from pgworkd.settings.config import load
from pgworkd.settings.shown import describe
from tests.kits.alerts import MailHost
from tests.kits.cli import clean
from tests.kits.daemon import insert, running, until
from tests.kits.models import FUZZ

pytestmark = pytest.mark.slow("mail servers that are slow, refuse, and break off")

__all__ = ["clean"]  # a fixture

PASSWORD = "c4n4ry-s3cret/@:"
QUOTED = "c4n4ry-s3cret%2F%40%3A"
Certified = tuple[ssl.SSLContext, str]


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def certified(authority: trustme.CA, tmp_path: Path) -> Certified:
    """A server's context, for the name `localhost` and 127.0.0.1, and the path of its CA."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost", "127.0.0.1").configure_cert(context)
    path = tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(str(path))
    return context, str(path)


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Sets the mail server, with a sender."""

    def use(url: str) -> None:
        monkeypatch.setenv("PGWORKD_SMTP_URL", url)
        monkeypatch.setenv("PGWORKD_SMTP_FROM", "jobs@example.com")

    return use


Use = Callable[[str], None]


async def test_a_mail_arrives(settings: Use) -> None:
    async with MailHost().serving() as host:
        settings(f"smtp://127.0.0.1:{host.port}")
        await send_mail("ops@example.com", "h\u00e9llo", "line 1\n.\nline \u65e5\u672c\n", "key-7")
    ((sender, recipients, message),) = host.mails
    assert (sender.split()[0], recipients) == ("FROM:<jobs@example.com>", ["TO:<ops@example.com>"])
    assert (message["Subject"], message["To"], message["From"]) == ("h\u00e9llo", "ops@example.com", "jobs@example.com")
    assert message["Message-ID"] == "<key-7@pgworkd.example.com>"
    assert "line \u65e5\u672c" in message.get_content()


async def test_tls_is_required_and_the_password_goes_through_it(settings: Use, certified: Certified) -> None:
    context, path = certified
    async with MailHost(tls=context, login=("ann", PASSWORD)).serving() as host:
        settings(f"smtp://ann:{QUOTED}@127.0.0.1:{host.port}?cafile={path}")
        await _send_as_if_remote(host)
    assert host.encrypted
    assert [line.split()[0] for line in host.said][:4] == ["ehlo", "STARTTLS", "ehlo", "AUTH"]


async def _send_as_if_remote(host: MailHost) -> None:
    """This host is exempt from TLS: so pretend that it is another."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pgworkd.core.mail_url._is_here", lambda _: False)
        await send_mail("ops@example.com", "s", "t", "k")


async def test_tls_from_the_first_byte(settings: Use, certified: Certified) -> None:
    context, path = certified
    async with MailHost(tls=context, at_once=True).serving() as host:
        settings(f"smtps://localhost:{host.port}?cafile={path}")
        await send_mail("ops@example.com", "s", "t", "k")
        settings(f"smtps://localhost:{host.port}")
        with pytest.raises(MailError, match=r"certificate of mail server localhost:\d+ could not be verified .*cafile"):
            await send_mail("ops@example.com", "s", "t", "k")
    assert len(host.mails) == 1


async def test_a_server_without_starttls_gets_nothing(settings: Use) -> None:
    async with MailHost(login=("ann", PASSWORD)).serving() as host:
        settings(f"smtp://ann:{QUOTED}@127.0.0.1:{host.port}")
        with pytest.raises(MailError, match=r"STARTTLS.* use smtps://, or, in a trusted network, smtp\+insecure://"):
            await _send_as_if_remote(host)
        assert not any("AUTH" in line for line in host.said)
        settings(f"smtp+insecure://ann:{QUOTED}@127.0.0.1:{host.port}")
        await _send_as_if_remote(host)
    assert len(host.mails) == 1


@pytest.mark.parametrize(
    ("verb", "reply", "error", "why"),
    [
        (
            "RCPT",
            "550 no such user",
            PermanentError,
            "the recipient ops@example.com: 550 no such user: correct",
        ),
        ("RCPT", "450 try later", MailError, "refuses the recipient ops@example.com: 450 try later"),
        (
            "MAIL",
            "553 not yours",
            MailError,
            "answers 553 not yours: it refuses the sender .*: set smtp_from",
        ),
        ("DATA", "554 spam", MailError, "answers 554 spam: see the log of the mail server"),
        (
            "AUTH",
            "535 wrong \x1b[31m",
            MailError,
            r"refuses the login \(535\): correct user and password in smtp_url$",  # it may repeat what was sent
        ),
        ("QUIT", "500 no", None, ""),
    ],
)
async def test_what_a_server_refuses(settings: Use, verb: str, reply: str, error: Any, why: str) -> None:
    async with MailHost(login=("ann", PASSWORD)).serving() as host:
        host.refuses[verb] = reply
        settings(f"smtp://ann:{QUOTED}@127.0.0.1:{host.port}")
        if error is None:
            await send_mail("ops@example.com", "s", "t", "k")
            return
        with pytest.raises(error, match=why) as raised:
            await send_mail("ops@example.com", "s", "t", "k")
    assert "c4n4ry" not in str(raised.value)


async def test_no_server(settings: Use, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="set PGWORKD_SMTP_URL=smtp://"):
        await send_mail("ops@example.com", "s", "t", "k")
    settings("smtp://127.0.0.1:1")
    with pytest.raises(MailError, match=r"mail server 127.0.0.1:1 gives no answer \(.*refused\): check smtp_url"):
        await send_mail("ops@example.com", "s", "t", "k")
    monkeypatch.delenv("PGWORKD_SMTP_FROM")
    with pytest.raises(UsageError, match="set PGWORKD_SMTP_FROM="):
        await send_mail("ops@example.com", "s", "t", "k")


@FUZZ
@given(st.text(), st.text())
def test_no_text_forges_a_header(subject: str, text: str) -> None:
    message = mail("jobs@example.com", "ops@example.com", f"a\r\nBcc: x@y.z {subject}", text, "k")
    raw = message.as_bytes()
    head = raw.partition(b"\n\n")[0].decode("ascii")
    names = [line.partition(":")[0] for line in head.split("\n") if line[:1] not in (" ", "\t")]
    assert sorted(set(names)) == sorted(names)
    assert set(names) == set(
        "Subject From To Date Message-ID Auto-Submitted Content-Type Content-Transfer-Encoding MIME-Version".split()
    )


async def test_an_alert_by_mail_is_retried_until_the_server_takes_it(
    dsn: str, db: asyncpg.Connection[Any], settings: Use
) -> None:
    app = App()

    @app.handler("mail\u202e", max_attempts=1)
    async def dies() -> None:
        raise PermanentError("boom\nBcc: eve@example.com")

    app.alert(to="ops@example.com")
    async with MailHost().serving() as host:
        settings(f"smtp://localhost:{host.port}")
        host.refuses["MAIL"] = "451 busy"
        async with running(app, dsn):
            await insert(db, "mail\u202e")
            await until(lambda: db.fetchval("SELECT count(*) FROM pgworkd.jobs WHERE status = 'failed'"))
            error = await db.fetchval("SELECT error FROM pgworkd.jobs WHERE status = 'failed'")
            assert "451 busy" in error
            host.refuses.clear()
            await db.execute("SELECT pgworkd.retry(ARRAY(SELECT id FROM pgworkd.jobs WHERE status = 'failed'))")
            await until(lambda: db.fetchval("SELECT count(*) FROM pgworkd.finished_jobs"))
        row = await db.fetchrow("SELECT result FROM pgworkd.finished_jobs")
        assert row is not None
        assert json.loads(row["result"]) == {"sent": True, "to": "ops@example.com", "groups": 1, "deaths": 1}
    ((_, recipients, message),) = host.mails
    assert recipients == ["TO:<ops@example.com>"]
    assert message["Bcc"] is None
    assert re.fullmatch(r"<[0-9a-f-]{36}@pgworkd\.example\.com>", message["Message-ID"])
    assert "\\u202e" in message["Subject"]


def test_the_password_is_shown_nowhere(settings: Use, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings(f"smtp://ann:{QUOTED}@mail.example.com")
    found = load()
    shown = {name: value for name, value, _ in describe(found)}
    assert shown["smtp_url"] == "smtp://ann:***@mail.example.com"
    assert "c4n4ry" not in repr(found)
    assert "c4n4ry" not in repr(mail_server(f"smtp://ann:{QUOTED}@h"))
    monkeypatch.delenv("PGWORKD_SMTP_URL")
    path = tmp_path / "pgworkd.toml"
    path.write_text(f'smtp_url = "smtp://ann:{QUOTED}@mail.example.com"\n')
    path.chmod(0o644)
    assert load().notes == ("pgworkd.toml contains a secret and is readable by every user: chmod 600 pgworkd.toml",)
    path.chmod(0o600)
    assert load().notes == ()


@pytest.mark.parametrize(
    "url",
    [
        "mail.example.com",
        "http://h",
        "smtp://",
        "smtp://h:c4n4ry",
        "smtp://h/c4n4ry",
        "smtp://h?x=c4n4ry",
        "smtp://a:c4n4ry/b@h",
    ],
)
def test_a_wrong_address_of_a_server_is_refused(settings: Use, url: str) -> None:
    settings(url)
    with pytest.raises(UsageError, match=r"^smtp_url \(environment PGWORKD_SMTP_URL\): ") as raised:
        load()
    assert "c4n4ry" not in str(raised.value)


def test_a_wrong_sender_is_refused(settings: Use, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGWORKD_SMTP_FROM", "jobs")
    with pytest.raises(UsageError, match=r"smtp_from .*must be a mail address"):
        load()
