"""Every setting as text, without secrets."""

from __future__ import annotations

from pgworkd.process.redaction import redact, redacted
from pgworkd.settings.config import Settings


def describe(settings: Settings) -> list[tuple[str, str, str]]:
    """(name, value with secrets hidden, origin) of every setting, for `pgworkd config show`."""
    shown = {name: "" if (value := getattr(settings, name)) is None else str(value) for name in Settings.model_fields}
    for name in ("dsn", "http_dashboard_dsn", "smtp_url"):
        shown[name] = "" if (secret := getattr(settings, name)) is None else redacted(secret.get_secret_value())
    shown["token"] = "" if settings.token is None else "***"
    queues = settings.queues.items()
    shown["queues"] = ", ".join(name if most is None else f"{name}={most}" for name, most in queues) or "all"
    # An address may have been given for another setting by mistake.
    return [(name, redact(value), settings.origin(name)) for name, value in shown.items()]
