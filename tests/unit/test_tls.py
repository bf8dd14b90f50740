"""When the server's certificate is verified: by host, mode and their source. No connection is made."""

from __future__ import annotations

import os
import ssl
from pathlib import Path

import pytest

from pgworkd.errors import UsageError
from pgworkd.settings import tls
from pgworkd.settings.config import load
from pgworkd.settings.conninfo import conninfo

LOCAL = [
    "postgresql://u:p@localhost/d",
    "postgresql://u:p@127.0.0.1:5433/d",
    "postgresql://u:p@127.8.9.10/d",
    "postgresql://[::1]:5432/d",
    "postgresql://u:p@%2Frun%2Fpg/d",
    "postgresql:///d",
    "postgresql:///d?host=/run/pg",
    "postgresql://localhost,127.0.0.1:1,[::1]/d",
]
REMOTE = [
    "postgresql://u:p@db.example/d",
    "postgresql://u:p@10.0.0.7:5432/d",
    "postgresql://[fe80::1]/d",
    "postgresql://localhost.db.example/d",
    "postgresql://127.0.0.1.db.example/d",
    "postgresql://%64b.example/d",
    "postgresql:///d?host=db.example",
    "postgresql:///d?host=/run/pg,db.example",
    "postgresql://localhost,db.example:5433/d",
    "postgresql://db.example,localhost/d",
]


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty home directory, and no PG* or SSL_* variables."""
    for name in [name for name in os.environ if name.startswith(("PG", "SSL_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".postgresql").mkdir()
    return tmp_path


def verified(dsn: str) -> str:
    """The mode passed to the driver, and the kind of CAs."""
    found = tls.verification(conninfo(dsn))
    if isinstance(found, ssl.SSLContext):
        assert found.verify_mode == ssl.CERT_REQUIRED
        return "full, system" if found.check_hostname else "ca, system"
    return "as it says" if found is None else found


@pytest.mark.parametrize("dsn", LOCAL)
def test_on_the_local_host_the_dsns_sslmode_applies(dsn: str) -> None:
    assert verified(dsn) == "as it says"
    assert tls.weakness(conninfo(dsn + ("&" if "?" in dsn else "?") + "sslmode=disable")) is None


@pytest.mark.parametrize("dsn", REMOTE)
def test_a_remote_host_is_verified_even_beside_a_local_one(dsn: str, home: Path) -> None:
    assert verified(dsn) == "full, system"
    assert tls.weakness(conninfo(dsn)) is None
    (home / ".postgresql" / "root.crt").touch()
    assert verified(dsn) == "verify-full", "by the CA that the driver finds there"


@pytest.mark.parametrize("mode", ["disable", "allow", "prefer", "require", "verify-ca", "verify_ca"])
@pytest.mark.parametrize("where", ["address", "environment", "service"])
def test_an_explicit_weaker_mode_is_used_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, home: Path, mode: str, where: str
) -> None:
    (home / ".postgresql" / "root.crt").touch()
    dsn = "postgresql://u:canary@db.example/d"
    if where == "address":
        dsn += f"?sslmode={mode}"
    elif where == "environment":
        monkeypatch.setenv("PGSSLMODE", mode)
    else:
        (home / ".pg_service.conf").write_text(f"[s]\nsslmode={mode}\n")
        dsn += "?service=s"
    assert verified(dsn) == "as it says"
    (note,) = load(dsn=dsn).notes
    assert f"sslmode={mode.replace('_', '-')} to db.example" in note
    assert "sslmode=verify-full" in note
    assert "canary" not in note


ACCEPTED = "must be one of disable, allow, prefer, require, verify-ca, verify-full, not 'bogus'"


@pytest.mark.parametrize(
    ("where", "named"),
    [
        ("flag", "dsn (flag): sslmode (in the DSN)"),
        ("variable", "dsn (environment PGWORKD_DSN): sslmode (in the DSN)"),
        ("file", "dsn (pgworkd.toml): sslmode (in the DSN)"),
        ("environment", "dsn (flag): sslmode (environment PGSSLMODE)"),
        ("service", "dsn (flag): sslmode (service 's')"),
    ],
)
@pytest.mark.parametrize("host", ["localhost", "db.example"])
def test_an_unknown_sslmode_is_refused_and_its_source_named(
    monkeypatch: pytest.MonkeyPatch, home: Path, host: str, where: str, named: str
) -> None:
    dsn = f"postgresql://u:canary@{host}/d"
    if where == "environment":
        monkeypatch.setenv("PGSSLMODE", "bogus")
    elif where == "service":
        (home / ".pg_service.conf").write_text("[s]\nsslmode=bogus\n")
        dsn += "?service=s"
    else:
        dsn += "?sslmode=bogus"
    flags = {"dsn": dsn}
    if where == "variable":
        monkeypatch.setenv("PGWORKD_DSN", flags.pop("dsn"))
    elif where == "file":
        (home / "pgworkd.toml").write_text(f'dsn = "{flags.pop("dsn")}"\n')
    with pytest.raises(UsageError) as caught:
        load(**flags)
    assert str(caught.value) == f"{named}: {ACCEPTED}"
    with pytest.raises(UsageError, match=r"sslmode.*: must be one of disable"):  # of programs that read no settings
        tls.verification(conninfo(dsn))


def test_the_host_is_taken_from_the_environment_or_a_service_file(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    monkeypatch.setenv("PGHOST", "db.example")
    assert verified("postgresql:///d") == "full, system"
    assert verified("postgresql://localhost/d") == "as it says"
    monkeypatch.delenv("PGHOST")
    services = home / "services"
    services.write_text("[far]\nhost=db.example\n[near]\nhost=localhost\n")
    monkeypatch.setenv("PGSERVICEFILE", str(services))
    assert verified("postgresql:///d?service=far") == "full, system"
    assert verified("postgresql:///d?service=near") == "as it says"
    monkeypatch.setenv("PGSERVICE", "far")
    assert verified("postgresql:///d") == "full, system"
    for text in ("password=canary", "[far]\npassword=x%canary", "[far]\npassword=%(canary)s"):
        services.write_text(text)
        with pytest.raises(UsageError, match="services cannot be read") as caught:
            verified("postgresql:///d")
        assert "canary" not in str(caught.value)


@pytest.mark.parametrize(
    ("query", "told"),
    [
        ("sslmode=verify-full", "full, system"),
        ("sslmode=verify_full", "full, system"),
        ("sslmode=verify-ca", "ca, system"),
        ("sslrootcert=system", "full, system"),
        ("sslmode=verify-full&sslrootcert=system", "full, system"),
        ("sslrootcert=/ca.pem", "verify-full"),
        ("sslmode=verify-full&sslrootcert=/ca.pem", "as it says"),
        ("sslmode=verify-ca&sslrootcert=/ca.pem", "as it says"),
    ],
)
def test_which_certificate_authorities_are_trusted(query: str, told: str) -> None:
    assert verified(f"postgresql://db.example/d?{query}") == told


@pytest.mark.parametrize("mode", ["disable", "require", "verify-ca"])
def test_with_the_systems_authorities_the_host_name_is_always_verified(mode: str) -> None:
    with pytest.raises(UsageError, match=f"sslrootcert=system requires sslmode=verify-full, not {mode}"):
        tls.verification(conninfo(f"postgresql://db.example/d?sslmode={mode}&sslrootcert=system"))


def test_tls_version_limits_apply_with_the_systems_authorities() -> None:
    dsn = "postgresql://db.example/d?ssl_min_protocol_version=TLSv1.3&ssl_max_protocol_version=TLSv1.3"
    context = tls.verification(conninfo(dsn))
    assert isinstance(context, ssl.SSLContext)
    assert context.minimum_version == context.maximum_version == ssl.TLSVersion.TLSv1_3
    with pytest.raises(UsageError, match="ssl_min_protocol_version must be"):
        tls.verification(conninfo("postgresql://db.example/d?ssl_min_protocol_version=9"))


@pytest.mark.parametrize("query", ["sslcert=/no/such", "sslcrl=/no/such"])
def test_a_missing_certificate_file_is_an_error(query: str) -> None:
    with pytest.raises(FileNotFoundError):
        tls.verification(conninfo(f"postgresql://db.example/d?{query}"))


def test_the_systems_authorities_are_cached_and_reloaded_periodically(
    monkeypatch: pytest.MonkeyPatch, home: Path
) -> None:
    dsn, now_s = "postgresql://db.example/d", 10_000.0
    monkeypatch.setattr(tls.time, "monotonic", lambda: now_s)
    first = tls.verification(conninfo(dsn))
    assert tls.verification(conninfo("postgresql://u:p@db2.example/other")) is first
    assert tls.verification(conninfo(f"{dsn}?ssl_min_protocol_version=TLSv1.3")) is not first
    now_s += tls.KEPT_S
    renewed = tls.verification(conninfo(dsn))
    assert renewed is not first
    (home / ".postgresql" / "postgresql.crt").write_text("no certificate")
    with pytest.raises(ssl.SSLError):
        tls.verification(conninfo(dsn))
