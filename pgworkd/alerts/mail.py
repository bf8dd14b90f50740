"""Sends a text by mail: through the server of the setting `smtp_url`, with TLS unless that says otherwise.

What went wrong is an exception that says what to do: the job that sends fails with it, and is retried.
"""

from __future__ import annotations

import contextlib
import smtplib
import ssl
from email.message import EmailMessage
from email.utils import formatdate

import anyio

from pgworkd.core.mail_url import MailServer, is_mail_address, mail_server
from pgworkd.errors import PermanentError, UsageError
from pgworkd.process.redaction import escaped, redact
from pgworkd.settings.config import Settings, load

STEP_S = 20.0
"""Time limit of each answer of the server, in seconds; that of a whole delivery is the job's."""
SUBJECT_CHARS_MAX = 150
PERMANENT = 500
"""Replies of the server from this code on are final."""


class MailError(Exception):
    """A mail was not accepted; another attempt may help, after what the message says was done."""


async def send_mail(to: str, subject: str, text: str, key: str) -> None:
    """Sends a mail. `key` identifies it: one that is sent twice has the same Message-ID both times.

    Raises UsageError (settings are missing), PermanentError (the recipient is refused) and MailError.
    """
    await anyio.to_thread.run_sync(_send, to, subject, text, key, abandon_on_cancel=True)


def mail(sender: str, to: str, subject: str, text: str, key: str) -> EmailMessage:
    """Composes a mail. No text can add a header, or a line that a terminal or a mail program would not show."""
    message = EmailMessage()
    line = escaped(redact(subject)).encode("utf-8", "backslashreplace").decode()
    message["Subject"] = line if len(line) <= SUBJECT_CHARS_MAX else line[: SUBJECT_CHARS_MAX - 1] + "\u2026"
    message["From"], message["To"] = sender, to
    message["Date"] = formatdate()
    message["Message-ID"] = f"<{key}@pgworkd.{sender.rpartition('@')[2]}>"
    message["Auto-Submitted"] = "auto-generated"
    message.set_content(escaped(redact(text), keep="\n"), charset="utf-8")
    return message


def _send(to: str, subject: str, text: str, key: str) -> None:
    server, sender = _server(load())
    message = mail(sender, to, subject, text, key)
    where = f"mail server {server.host}:{server.port}"
    try:
        _deliver(server, sender, to, message)
    except smtplib.SMTPRecipientsRefused as error:
        code, reply = error.recipients[to]
        what = f"{where} refuses the recipient {to}: {_reply(code, reply)}"
        if code >= PERMANENT:
            raise PermanentError(f"{what}: correct the address in to=") from None
        raise MailError(what) from None
    except smtplib.SMTPNotSupportedError as error:
        remedy = "turn it on there, use smtps://, or, in a trusted network, smtp+insecure://"
        raise MailError(f"{where}: {error} {remedy}" if "STARTTLS" in str(error) else f"{where}: {error}") from None
    except smtplib.SMTPResponseException as error:
        remedy = "see the log of the mail server"
        if isinstance(error, smtplib.SMTPAuthenticationError):  # its text may repeat what was sent
            answer = f"{where} refuses the login ({error.smtp_code})"
            raise MailError(f"{answer}: correct user and password in smtp_url") from None
        if isinstance(error, smtplib.SMTPSenderRefused):
            remedy = f"it refuses the sender {sender}: set smtp_from"
        raise MailError(f"{where} answers {_reply(error.smtp_code, error.smtp_error)}: {remedy}") from None
    except ssl.SSLCertVerificationError as error:
        remedy = "connect by a name in the certificate, or name its CA with ?cafile=FILE in smtp_url"
        raise MailError(
            f"the certificate of {where} could not be verified ({error.verify_message}): {remedy}"
        ) from None
    except (OSError, smtplib.SMTPException) as error:  # the latter: it hung up
        remedy = "check smtp_url, and that this host may connect to it"
        raise MailError(f"{where} gives no answer ({str(error) or type(error).__name__}): {remedy}") from None


def _deliver(server: MailServer, sender: str, to: str, message: EmailMessage) -> None:
    context = None if server.tls == "none" else ssl.create_default_context(cafile=server.ca_file)
    if server.tls == "tls":
        session: smtplib.SMTP = smtplib.SMTP_SSL(server.host, server.port, timeout=STEP_S, context=context)
    else:
        session = smtplib.SMTP(server.host, server.port, timeout=STEP_S)
    try:
        if server.tls == "starttls":
            session.starttls(context=context)
        if server.user:
            session.login(server.user, server.password)
        session.send_message(message, sender, [to])
    finally:
        # The mail was accepted, or not: how the session ends changes nothing about that.
        with contextlib.suppress(OSError, smtplib.SMTPException):
            session.quit()
        session.close()


def _server(settings: Settings) -> tuple[MailServer, str]:
    if settings.smtp_url is None:
        raise UsageError("no mail server given: set PGWORKD_SMTP_URL=smtp://user:password@host:587")
    server = mail_server(settings.smtp_url.get_secret_value())
    sender = settings.smtp_from or server.user
    if not is_mail_address(sender):
        raise UsageError("no sender given: set PGWORKD_SMTP_FROM=jobs@example.com")
    return server, sender


def _reply(code: int, reply: bytes | str) -> str:
    text = reply.decode("utf-8", "replace") if isinstance(reply, bytes) else reply
    return escaped(f"{code} {' '.join(text.split())[:300]}")
