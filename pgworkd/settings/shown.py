"""Every setting as text, without secrets."""

from __future__ import annotations

from pgworkd.process.redaction import redact, redacted
from pgworkd.settings.config import Settings


def describe(settings: Settings) -> list[tuple[str, str, str]]:
    """(name, value with secrets hidden, origin) of every setting, for `pgworkd config show`."""
    shown = {name: "" if (value := getattr(settings, name)) is None else str(value) for name in Settings.model_fields}
    shown["dsn"] = settings.dsn_redacted or ""
    shown["token"] = "" if settings.token is None else "***"
    shown["smtp_url"] = "" if settings.smtp_url is None else redacted(settings.smtp_url.get_secret_value())
    queues = settings.queues.items()
    shown["queues"] = ", ".join(name if most is None else f"{name}={most}" for name, most in queues) or "all"
    # An address may have been given for another setting by mistake.
    return [(name, redact(value), settings.origin(name)) for name, value in shown.items()]
