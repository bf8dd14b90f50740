"""Settings: flags override the environment, which overrides pgworkd.toml and the defaults; errors fit on one line.

No secret reaches a message: errors of pydantic, which contain the values, are rewritten and dropped, and a value is
quoted only if it cannot be an address with a password.
"""

from __future__ import annotations

import socket
from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    PrivateAttr,
    SecretStr,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from pgworkd.core.address import frame_origin, is_open_to_others, listed, parse_address, url_fault
from pgworkd.core.durations import seconds_of
from pgworkd.core.mail_url import mail_server
from pgworkd.errors import UsageError
from pgworkd.process.redaction import hide, redacted
from pgworkd.settings.conninfo import conninfo
from pgworkd.settings.conninfo import notes as without_effect
from pgworkd.settings.faults import contradictions, is_duration, lines
from pgworkd.settings.file import (
    DATABASE_URL,
    NAME_CHARS_MAX,
    PREFIX,
    Directory,
    database_url,
    misspelt_environment,
    parse_queues,
    quoted,
    read_file,
    unknown_names,
)
from pgworkd.settings.texts import TEXTS
from pgworkd.settings.tls import weakness

LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["auto", "json", "console"]


class Settings(BaseSettings):
    """The settings of a daemon or command; immutable. Names end in their unit: `_s` seconds, `_days` days.

    `load` reads all sources, `Settings(...)` only its arguments.
    """

    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        env_ignore_empty=True,
        extra="forbid",
        frozen=True,
        hide_input_in_errors=True,
    )

    dsn: SecretStr | None = Field(None, description="Database: postgresql://user:password@host:5432/database")
    app: str | None = Field(None, description="The application, module:attribute")
    queues: Annotated[dict[str, int | None], NoDecode] = Field(
        default_factory=dict, description="Queues to serve, name or name=concurrency; all if none"
    )
    remote: str | None = Field(
        None, description="Gateway to work through instead of a database: https://jobs.example.com"
    )
    token: SecretStr | None = Field(None, description="Token for that gateway, with the scope work: pgw_...")
    processes: int = Field(
        1, ge=1, le=64, description="Number of daemons to run, one process each; concurrency is per process"
    )
    environment: str | None = Field(
        None, description="Name of the environment, such as production: jobs of its database and copies run in no other"
    )
    lease_s: float = Field(
        30,
        ge=5,
        le=3600,
        description="Lease duration: jobs of a worker that stops renewing are taken over after this many seconds, "
        "by a daemon that has been up for as long; more than 2 × command_timeout_s",
    )
    heartbeat_s: float = Field(
        10, ge=1, le=1200, description="Seconds between renewals of the lease; at most lease_s / 3"
    )
    loop_limit_s: float | None = Field(
        None, ge=0, le=86_400, description="Seconds until a blocked event loop ends the process; none: 3 leases; 0: off"
    )
    poll_s: float = Field(
        2, ge=0.05, le=10, description="Seconds between polls of idle queues, in case a notification is lost"
    )
    shutdown_s: float = Field(30, ge=0, le=86_400, description="Seconds that running jobs may take to finish at a stop")
    connect_timeout_s: float = Field(
        10, ge=1, le=60, description="Seconds to wait for a new connection to the database"
    )
    command_timeout_s: float = Field(
        10, ge=1, le=60, description="Seconds that one statement may take; less than lease_s / 2"
    )
    transactions_max: int = Field(20, ge=1, le=500, description="Maximum number of connections for jobs' transactions")
    keep_days: int = Field(
        7, ge=1, le=3650, description="Days for which finished jobs are kept; the fewest of all daemons and gateways"
    )
    keep_dead_days: int = Field(30, ge=1, le=3650, description="Days for which dead jobs are kept; the fewest of all")
    log_level: LogLevel = Field("info", description="Least severe level that is logged")
    log_format: LogFormat = Field("auto", description="Format; auto: console on a terminal, else json")
    statistics: Literal["on", "off"] = Field(
        "on", description="Collect samples of all queues, and what ended in each period, for boards and commands"
    )
    stacks: Literal["on", "off"] = Field(
        "on", description="Tell operators who ask where a running job is: files, lines and functions, never values"
    )
    slow_min_s: float = Field(
        1, ge=0, le=86_400, description="Runs shorter than this many seconds are never reported as slow"
    )
    slow_factor: float = Field(
        5, ge=1, le=1000, description="Runs that take this many times their usual length are reported as slow"
    )
    metrics_listen: str | None = Field(
        None, description="Address of metrics and health over HTTP, host:port; port 0: any free one; off if none"
    )
    http_listen: str = Field(
        "127.0.0.1:7433", description="Address of the gateway (pgworkd serve), host:port; port 0: any free one"
    )
    http_auth: Literal["tokens", "none"] = Field(
        "tokens", description="Callers of the gateway: holders of a token, or with none every program on this host"
    )
    http_with: str = Field(
        "api,workers",
        description="Parts of the gateway: api (producers and operators), workers (remote workers), dashboard (pages)",
    )
    http_dashboard_dsn: SecretStr | None = Field(None, description="Database of the pages, such as a standby")
    http_user_header: str | None = Field(
        None, description="Header in which a proxy of http_proxies names who looks at the dashboard: X-Forwarded-User"
    )
    http_user_scopes: str = Field("read", description="What those may do: scopes as of tokens, comma-separated")
    http_mask: str = Field(
        "", description="Members that no page shows, comma-separated: payload.*.email, result.**.token"
    )
    http_frame_url: str | None = Field(None, description="A page of yours, such as metrics, to embed in the overview")
    http_hosts: str = Field(
        "", description="Accepted Host headers, comma-separated; the gateway's own names are always accepted"
    )
    http_proxies: str = Field(
        "", description="Addresses or networks of proxies whose X-Forwarded-For is trusted, comma-separated"
    )
    http_connections_max: int = Field(20, ge=1, le=500, description="Maximum number of connections for requests")
    http_waiters_max: int = Field(2000, ge=1, le=10_000, description="Maximum number of waiting claims, and of others")
    http_requests_per_s: float = Field(
        1000, ge=0.1, le=1_000_000, description="Requests per second that one token may make"
    )
    secrets_dir: Directory | None = Field(
        None, description="Directory of the secrets that sign pushed jobs; default: systemd's credentials"
    )
    callback_url: str | None = Field(
        None, description="Address at which callbacks of pushed jobs reach a gateway: https://jobs.example.com"
    )
    worker_name: str = Field(default_factory=socket.gethostname, description="Name of this worker in logs and lists")
    smtp_url: SecretStr | None = Field(
        None, description="Mail server for alerts and digests: smtp://user:password@host:587"
    )
    smtp_from: str | None = Field(None, description="Sender of alerts and digests; default: the user in smtp_url")

    _origins: dict[str, str] = PrivateAttr(default_factory=dict)
    _notes: tuple[str, ...] = PrivateAttr(())

    @classmethod
    def settings_customise_sources(cls, *_: Any, **sources: Any) -> tuple[PydanticBaseSettingsSource, ...]:
        """Arguments only: `load` merges the sources itself, to record the origin of each value.

        pydantic merges tables of several sources key by key, so that a flag would add to the queues of the file.
        """
        return (sources["init_settings"],)

    @field_validator("*", mode="before")
    @classmethod
    def _tidy(cls, value: object, info: ValidationInfo) -> object:
        if isinstance(value, bool):  # pydantic would read it as the number 1 or 0
            raise PydanticCustomError("boolean", "no setting is a boolean")
        if not isinstance(value, str):
            return value
        length_s = seconds_of(value) if is_duration(info.field_name or "") else None
        return value.strip() if length_s is None else length_s

    @field_validator("dsn", "http_dashboard_dsn")
    @classmethod
    def _check_dsn(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None:
            conninfo(value.get_secret_value())
        return value

    @field_validator("remote", "callback_url")
    @classmethod
    def _check_url(cls, value: str | None) -> str | None:
        if value is not None and (fault := url_fault(value)):
            raise ValueError(fault)
        return value

    @field_validator("token")
    @classmethod
    def _check_token(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None:
            if not value.get_secret_value().startswith("pgw_") or not value.get_secret_value().isascii():
                raise ValueError("must be a token as pgworkd token add prints it: pgw_...")
            hide(value.get_secret_value())
        return value

    @field_validator("smtp_url")
    @classmethod
    def _check_smtp_url(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None:
            mail_server(value.get_secret_value())
            hide(value.get_secret_value())
        return value

    @field_validator("app", "environment", "smtp_from", "http_user_header")
    @classmethod
    def _check_text(cls, value: str | None, info: ValidationInfo) -> str | None:
        fits, what = TEXTS[info.field_name or ""]
        if value is not None and not fits(value):
            raise ValueError(f"must be {what}")
        return value

    @field_validator("queues", mode="before")
    @classmethod
    def _parse_queues(cls, value: object) -> object:
        return parse_queues(value)

    @field_validator("log_level", "log_format", mode="before")
    @classmethod
    def _lower(cls, value: object) -> object:
        return value.lower() if isinstance(value, str) else value

    @field_validator("metrics_listen", "http_listen")
    @classmethod
    def _check_listen(cls, value: str | None) -> str | None:
        if value is not None:
            parse_address(value)
        return value

    @field_validator("http_frame_url")
    @classmethod
    def _check_frame(cls, value: str | None) -> str | None:
        if value is not None:
            frame_origin(value)
        return value

    @field_validator("http_hosts", "http_proxies", "http_with", "http_user_scopes", "http_mask")
    @classmethod
    def _check_listed(cls, value: str, info: ValidationInfo) -> str:
        fits, what = TEXTS[info.field_name or ""]
        given = listed(value) or [value] * (info.field_name == "http_with")
        if wrong := [each for each in given if not fits(each)]:
            raise ValueError(f"must be {what}; {quoted(wrong[0])} is none")
        return value

    @field_validator("worker_name")
    @classmethod
    def _check_worker_name(cls, value: str) -> str:
        if not 1 <= len(value) <= NAME_CHARS_MAX or not value.isprintable():
            raise ValueError(f"must be 1 to {NAME_CHARS_MAX} printable characters")
        return value

    @model_validator(mode="after")
    def _check_relations(self) -> Settings:
        if problems := contradictions(self.lease_s, self.heartbeat_s, self.command_timeout_s):
            raise PydanticCustomError("relation", "settings contradict each other", {"problems": problems})
        return self

    @property
    def dsn_redacted(self) -> str | None:
        """The DSN with passwords and other secrets replaced by ***."""
        return None if self.dsn is None else redacted(self.dsn.get_secret_value())

    @property
    def database(self) -> str:
        """The database for messages: its address without secrets, and what gave it."""
        return f"{self.dsn_redacted} ({self.origin('dsn')})"

    @property
    def notes(self) -> tuple[str, ...]:
        """Warnings of `load` for the log, one line each."""
        return self._notes

    def dsn_required(self) -> str:
        """The DSN with its secrets, to connect with; UsageError if none is set."""
        if self.dsn is None:
            raise UsageError(f"no database given: set {PREFIX}DSN, or pass --dsn postgresql://user@host/database")
        return self.dsn.get_secret_value()

    def token_required(self) -> str:
        """The token for the gateway; UsageError if none is set."""
        if self.token is None:
            raise UsageError(f"no token given for {self.remote}: set {PREFIX}TOKEN; pgworkd token add prints one")
        return self.token.get_secret_value()

    def origin(self, name: str) -> str:
        """The source of the value of `name`: flag, environment PGWORKD_..., the file's path, or default."""
        return self._origins.get(name, "flag" if name in self.model_fields_set else "default")


def load(**overrides: object) -> Settings:
    """Settings from `overrides` (flags; None and [] mean not given), environment, TOML file and defaults.

    The file is the one named by PGWORKD_CONFIG, or pgworkd.toml in the working directory, if it exists.
    UsageError, in one line that names the setting, its source and the remedy, for an invalid value.
    """
    flags = {name: value for name, value in overrides.items() if value is not None and value != []}
    path, table, is_public = read_file()
    environment = EnvSettingsSource(Settings)()
    origins = dict.fromkeys(table, path)
    origins |= {name: f"environment {PREFIX}{name.upper()}" for name in environment}
    origins |= dict.fromkeys(flags, "flag")
    if not {"dsn", "remote"} & origins.keys() and (url := database_url()):
        environment["dsn"], origins["dsn"] = url, f"environment {DATABASE_URL}"
    known = list(Settings.model_fields)
    problems = unknown_names(table, known, path) + unknown_names(flags, known, "flag")
    problems += misspelt_environment(known)
    if not problems:
        try:
            settings = Settings(**{**table, **environment, **flags})
        except ValidationError as error:
            problems = [line for detail in error.errors() for line in lines(detail, origins, Settings.model_fields)]
    if problems:  # raised here, so that the error of pydantic, which contains values, is not its context
        raise UsageError("; ".join(problems))
    told = None if settings.dsn is None else conninfo(settings.dsn_required())
    if told is not None and (limit_s := told.number("connect_timeout")) and "connect_timeout_s" not in origins:
        settings = settings.model_copy(update={"connect_timeout_s": min(60.0, float(limit_s))})
        origins["connect_timeout_s"] = told.where("connect_timeout")
    settings._origins = origins  # noqa: SLF001
    notes = []
    has_secret = any(redacted(str(value)) != str(value) for value in table.values())
    if is_public and (has_secret or "token" in table):
        notes.append(f"{path} contains a secret and is readable by every user: chmod 600 {path}")
    if told is not None:
        notes += [*without_effect(told), *filter(None, [weakness(told)])]
    if settings.remote is not None and is_open_to_others(settings.remote):
        notes.append(f"remote ({origins['remote']}) is http: others on the way can read the token and all jobs")
    settings._notes = tuple(notes)  # noqa: SLF001
    return settings
