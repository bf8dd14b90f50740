"""What is read from a DSN, a service and the environment: as libpq reads it, and each parameter has its answer."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import quote

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from psycopg import OperationalError
from psycopg.pq import Conninfo as Libpq

from pgworkd.core.dsn import dsn_fault
from pgworkd.errors import UsageError
from pgworkd.settings.config import load
from pgworkd.settings.conninfo import Conninfo, conninfo
from pgworkd.settings.libpq import CHOICES, DRIVER, NUMBERS, OURS, UNSAFE, VARIABLES, VERIFY_FULL, WITHOUT_EFFECT
from pgworkd.settings.tls import verification
from tests.kits.models import examples
from tests.unit.test_tls import home

__all__ = ["home"]  # an autouse fixture: no variables, no files

DOCS = Path(__file__).parents[2] / "docs" / "connecting.md"


def libpq(dsn: str) -> dict[str, str] | None:
    """What libpq reads; None if it refuses the DSN."""
    try:
        found = Libpq.parse(dsn.encode())
    except OperationalError:
        return None
    return {each.keyword.decode(): each.val.decode() for each in found if each.val}


def places(told: Conninfo) -> list[tuple[str, int]]:
    return [(host.name, host.port) for host in told.hosts]


def theirs(found: dict[str, str]) -> list[tuple[str, int]]:
    names, ports = found["host"].split(","), found.get("port", "").split(",")
    if len(ports) == 1 or not any(ports):
        ports = [ports[0]] * len(names)
    return list(zip(names, [int(port or 5432) for port in ports], strict=True))


# As libpq

TEXT = st.text(st.characters(exclude_categories=("Cs", "Cc", "Cn", "Co", "Cf", "Zl", "Zp")), min_size=1, max_size=8)
PORT = st.one_of(st.just(""), st.integers(1, 65535).map(":{}".format))
NAME = st.sampled_from(
    ["h", "db.example", "10.0.0.7", "[::1]", "[fe80::1%25eth0]", "%2Frun%2Fpg", "%2Fcloudsql%2Fa:b:c"]
)
HOST = st.tuples(NAME, PORT).map("".join).filter(lambda host: "cloudsql" not in host)
LATER = st.sampled_from(
    [
        ("host", "other"),
        ("host", "/cloudsql/project:region:instance"),
        ("host", "::1"),
        ("host", "a,b"),
        ("port", "5433"),
        ("port", "5433,5434"),
        ("user", "late"),
        ("password", "a+b c"),
        ("dbname", "x/y"),
        ("application_name", "shop's"),
        ("options", "-c geqo=off"),
        ("keepalives_idle", "30"),
        ("sslmode", "require"),
    ]
)


@st.composite
def dsns(draw: st.DrawFn) -> str:
    def encoded(text: str) -> str:
        return quote(text, safe=draw(st.sampled_from(["", "!$'()*+,;=~&", "-._"])))

    user = draw(st.one_of(st.just(""), TEXT.map(encoded)))
    password = draw(st.one_of(st.just(""), TEXT.map(lambda text: ":" + encoded(text))))
    hosts = ",".join(draw(st.lists(HOST, max_size=3)))
    database = draw(st.one_of(st.just(""), TEXT.map(lambda text: "/" + encoded(text))))
    query = "&".join(f"{name}={quote(value, safe='/:,+')}" for name, value in draw(st.lists(LATER, max_size=3)))
    login = f"{user}{password}@" if user or password else ""
    scheme = draw(st.sampled_from(["postgresql", "postgres"]))
    return f"{scheme}://{login}{hosts}{database or '/' * bool(query)}" + (f"?{query}" if query else "")


@examples(300)
@given(dsns())
def test_a_dsn_means_what_it_means_to_libpq(dsn: str) -> None:
    found = libpq(dsn)
    assert dsn_fault(dsn) is None
    try:
        told = conninfo(dsn)
    except UsageError:
        # libpq counts them only when it connects.
        assume(found is None or found["port"].count(",") == found.get("host", "").count(","))
        raise
    assert found is not None
    ours = {name: value for name, value in told.parameters.items() if name not in ("host", "port")}
    assert ours == {name: value for name, value in found.items() if name not in ("host", "port")}
    if "host" in found:
        assert places(told) == theirs(found)
    else:
        assert places(told)[-1] == ("localhost", int(found.get("port", "5432").split(",")[0] or 5432))


def test_every_parameter_of_libpq_is_known_with_its_variable_and_documented() -> None:
    known = {each.keyword.decode(): each.envvar.decode() if each.envvar else None for each in Libpq.get_defaults()}
    assert {name: VARIABLES.get(name, "unknown") for name in known} == known
    text = DOCS.read_text()
    assert [name for name in VARIABLES if f"`{name}`" not in text] == []
    parts = [DRIVER, OURS, WITHOUT_EFFECT, UNSAFE]
    assert sum(map(len, parts)) == len(VARIABLES), "each has one answer"
    assert set(CHOICES) | set(NUMBERS) <= set(VARIABLES)


@pytest.mark.parametrize("where", ["DSN", "environment", "service"])
def test_each_parameter_has_the_answer_that_is_documented(
    monkeypatch: pytest.MonkeyPatch, home: Path, where: str
) -> None:
    for name, variable in VARIABLES.items():
        value = CHOICES.get(name, ("3" if name in NUMBERS else "127.0.0.1" if name == "hostaddr" else "5433",))[0]
        dsn = "postgresql://localhost/d"
        named = f"{name} (in the DSN)"
        if name in ("service", "servicefile", "host") or (where == "environment" and variable is None):
            continue
        if where == "DSN":
            dsn += f"?{name}={value}"
        elif where == "environment":
            monkeypatch.setenv(variable or "", value)
            named = f"{name} (environment {variable})"
        else:
            (home / ".pg_service.conf").write_text(f"[s]\n{name}={value}\n")
            dsn += "?service=s"
            named = f"{name} (service 's')"
        if name in UNSAFE:
            with pytest.raises(UsageError) as caught:
                load(dsn=dsn)
            assert str(caught.value).startswith(f"dsn (flag): {named} is not supported: ")
        else:
            settings = load(dsn=dsn)
            assert [note for note in settings.notes if note.startswith(named)] == list(settings.notes)
            assert bool(settings.notes) == (name in WITHOUT_EFFECT or name == "require_auth")
        if where == "environment":
            monkeypatch.delenv(variable or "")


@pytest.mark.parametrize(
    ("query", "says"),
    [
        ("gssencmode=require", "gssencmode (in the DSN) is not supported: the driver encrypts by TLS only"),
        ("sslcertmode=require", "sslcertmode (in the DSN) is not supported: "),
        ("channel_binding=require&sslmode=disable", "channel_binding (in the DSN) needs TLS: it contradicts sslmode"),
        (
            "require_auth=scram-sha-256&sslmode=require",
            "require_auth (in the DSN) is not supported with sslmode=require",
        ),
        ("require_auth=!password&sslmode=prefer", "set sslmode=verify-full"),
        ("sslmode=no-verify", "sslmode (in the DSN): must be one of disable, allow"),
        ("load_balance_hosts=yes", "load_balance_hosts (in the DSN): must be one of disable, random, not 'yes'"),
        ("connect_timeout=soon", "connect_timeout (in the DSN): must be a whole number, not 'soon'"),
        ("target_session_attrs=master", "target_session_attrs (in the DSN): must be one of any, read-write"),
        ("pgbouncer=true", "pgbouncer (in the DSN) is no parameter of Postgres (libpq): remove it"),
        ("schema=public", "schema (in the DSN) is no parameter of Postgres (libpq): remove it"),
        ("connection_limit=5", "connection_limit (in the DSN) is no parameter"),
        ("search_path=x", "a setting of the server is options=-c%20NAME=VALUE"),
        ("ssl=require", "ssl (in the DSN) is no parameter of Postgres (libpq): did you mean sslmode?"),
        ("sslMode=require", "did you mean sslmode?"),
        ("sslca=x", "did you mean sslrootcert?"),
        ("database=x", "did you mean dbname?"),
        ("%00=x", "contains %00"),
        ("a%20b=x", "the DSN has a parameter whose name is malformed"),
        ("password=a&b=c", "the DSN has an unknown parameter: if it is part of a password"),
        ("hostaddr=db.example", "hostaddr (in the DSN): 'db.example' is no IP address: a name is a host"),
        ("hostaddr=127.0.0.1,127.0.0.2", "hostaddr (in the DSN): there are 2 for 1 hosts"),
        ("port=0", "port (in the DSN): a port must be a number from 1 to 65535"),
    ],
)
def test_what_is_wrong_is_named_with_its_remedy(query: str, says: str) -> None:
    for dsn in (f"postgresql://u:c4n4ry@db.example/d?{query}", f"postgres://db.example/?{query}"):
        with pytest.raises(UsageError) as caught:
            load(dsn=dsn)
        assert says in str(caught.value)
        assert str(caught.value).startswith("dsn (flag): ")
        assert "c4n4ry" not in str(caught.value)


@pytest.mark.parametrize("quote_", ["'", '"'])
@pytest.mark.parametrize(
    ("name", "value"),
    [("dsn", "postgresql://u:c4n4ry@h/d"), ("app", "notes:app"), ("lease_s", "60"), ("log_level", "info")],
)
def test_quotes_that_an_env_file_keeps_are_named(
    monkeypatch: pytest.MonkeyPatch, quote_: str, name: str, value: str
) -> None:
    variable = f"PGWORKD_{name.upper()}"
    monkeypatch.setenv(variable, f"{quote_}{value}{quote_}")
    with pytest.raises(UsageError, match=rf"^{name} \(environment {variable}\): is in quotes: remove them; docker's"):
        load()


# As providers and other programs write them

CORPUS = {
    "Neon": "postgresql://alex:AbC123dEf@ep-cool-darkness-a1b2c3d4-pooler.us-east-2.aws.neon.tech/dbname"
    "?sslmode=require&channel_binding=require",
    "Neon, cold start": "postgresql://alex:p@ep-x.eu-central-1.aws.neon.tech/d?sslmode=require&connect_timeout=15",
    "Neon, no SNI": "postgresql://alex:p@ep-x.neon.tech/d?options=endpoint%3Dep-x&sslmode=require",
    "Supabase": "postgresql://postgres:[YOUR-PASSWORD]@db.abcdefghijklmnopqrst.supabase.co:5432/postgres",
    "Supabase, session pooler": "postgres://postgres.abcdef:p@aws-0-eu-west-1.pooler.supabase.com:5432/postgres",
    "RDS": "postgresql://master:p@mydb.123456789012.us-east-1.rds.amazonaws.com:5432/app?sslmode=verify-full",
    "Aurora": "postgresql://u:p@c.cluster-abc.eu-west-1.rds.amazonaws.com:5432/d?target_session_attrs=read-write",
    "Azure": "postgresql://user%40server:p%40ss@server.postgres.database.azure.com:5432/postgres?sslmode=require",
    "Cloud SQL": "postgresql://u:p@/db?host=/cloudsql/project:region:instance",
    "Cloud SQL, encoded": "postgresql://u:p@/db?host=%2Fcloudsql%2Fproject%3Aregion%3Ainstance",
    "Cloud SQL, in the authority": "postgresql://u:p@%2Fcloudsql%2Fproject%3Aregion%3Ainstance/db",
    "Heroku": "postgres://abcdefgh:0123456789abcdef@ec2-1-2-3-4.compute-1.amazonaws.com:5432/d1abcdef",
    "Render": "postgresql://user:p@dpg-abc123-a.oregon-postgres.render.com/db_x",
    "Fly": "postgres://app:p@app-db.flycast:5432/app?sslmode=disable",
    "Railway": "postgresql://postgres:p@containers-us-west-1.railway.app:7777/railway",
    "CockroachDB": "postgresql://u:p@free-tier.gcp-us-central1.cockroachlabs.cloud:26257/c.defaultdb?sslmode=verify-full"
    "&options=--cluster%3Dc",
    "Crunchy": "postgres://application:p@p.abcdef.db.postgresbridge.com:5432/postgres",
    "Timescale": "postgres://tsdbadmin:p@abc.def.tsdb.cloud.timescale.com:30000/tsdb?sslmode=require",
    "DigitalOcean": "postgresql://doadmin:p@db-postgresql-nyc3-1-do-user-1-0.b.db.ondigitalocean.com:25060/defaultdb"
    "?sslmode=require",
    "Aiven": "postgres://avnadmin:p@pg-1.aivencloud.com:12345/defaultdb?sslmode=require",
    "Patroni": "postgresql://u:p@pg1:5432,pg2:5432,pg3:5432/app?target_session_attrs=primary&load_balance_hosts=random",
    "keepalives": "postgresql://u:p@h/d?keepalives=1&keepalives_idle=30&keepalives_interval=10&keepalives_count=3"
    "&tcp_user_timeout=20000&connect_timeout=5",
    "psql on a Mac": "postgresql://u:p@h/d?gssencmode=disable&sslcompression=0",
    "pgx": "postgres://u:p@h:5432/d?sslmode=prefer&application_name=shop&fallback_application_name=x",
    "SQLAlchemy": "postgresql+asyncpg://u:p@h:5432/d",
    "SQLAlchemy, psycopg": "postgresql+psycopg2://u:p@h/d",
    "Django": "postgres://u:p@h:5432/d",
    "Rails": "postgresql://u:p@h/d?client_encoding=utf8",
    "JDBC's ssl": "postgresql://u:p@h/d?ssl=true",
    "IPv6": "postgresql://u:p@[2001:db8::1]:5432/d",
    "hostaddr": "postgresql://u:p@db.example/d?hostaddr=10.0.0.7&sslnegotiation=direct&sslmode=verify-full",
    "socket": "postgresql:///d?host=/var/run/postgresql&user=u",
    "all in the query": "postgresql:///?host=h&port=5433&user=u&password=p&dbname=d",
    "no database": "postgresql://u:p@h",
    "nothing": "postgresql://",
}
NOTED = {"Neon": ["channel_binding (in the DSN): sslmode is verify-full instead of require"]}
WEAK = ("Neon, cold start", "Neon, no SNI", "Azure", "Fly", "Timescale", "DigitalOcean", "Aiven", "pgx")


@pytest.mark.parametrize("name", CORPUS)
def test_the_dsns_of_providers_are_taken(name: str) -> None:
    settings = load(dsn=CORPUS[name])
    told = list(settings.notes)
    if name in WEAK:
        assert "does not verify the server's identity" in told.pop()
    assert [note[: len(start)] for note, start in zip(told, NOTED.get(name, []), strict=True)] == NOTED.get(name, [])
    found = libpq(CORPUS[name].replace("+asyncpg", "").replace("+psycopg2", ""))
    if found is not None and "host" in found:  # (it takes the brackets of a placeholder for those of an address)
        assert places(conninfo(CORPUS[name])) == theirs(found)


def test_channel_binding_makes_sure_who_the_server_is() -> None:
    for mode in ("allow", "prefer", "require"):
        told = conninfo(f"postgresql://db.example/d?sslmode={mode}&channel_binding=require")
        assert told.sslmode == VERIFY_FULL
        assert "sslmode=verify-full" in told.for_driver
        assert getattr(verification(told), "check_hostname", False)
    assert conninfo("postgresql://localhost/d?channel_binding=require").sslmode == VERIFY_FULL
    assert conninfo("postgresql:///d?host=/run/pg&channel_binding=require").sslmode is None, "there is no TLS there"


def test_the_dsn_wins_over_the_service_and_that_over_the_environment(
    monkeypatch: pytest.MonkeyPatch, home: Path
) -> None:
    (home / ".pg_service.conf").write_text("[s]\nhost=of-service\nuser=of-service\ndbname=of-service\n")
    monkeypatch.setenv("PGUSER", "of-environment")
    monkeypatch.setenv("PGDATABASE", "of-environment")
    monkeypatch.setenv("PGAPPNAME", "of-environment")
    monkeypatch.setenv("PGHOST", "of-environment")
    told = conninfo("postgresql://of-dsn/?service=s&dbname=of-dsn")
    assert told.hosts[0].name == "of-dsn"
    found = told.parameters
    assert (found["dbname"], found["user"], found["application_name"]) == ("of-dsn", "of-service", "of-environment")
    monkeypatch.setenv("PGSERVICE", "s")
    assert conninfo("postgresql://").hosts[0].name == "of-service"


@pytest.mark.parametrize("way", ["DSN", "environment", "no file", "another file"])
def test_a_service_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch, home: Path, way: str) -> None:
    """As by libpq: another database than the one that is meant must not be used."""
    if way != "no file":
        (home / ".pg_service.conf").write_text("[s]\nhost=h\n")
    if way == "another file":
        monkeypatch.setenv("PGSERVICEFILE", "/no/such/file")
    if way == "environment":
        monkeypatch.setenv("PGSERVICE", "typo")
    file = "/no/such/file" if way == "another file" else ".pg_service.conf"
    with pytest.raises(UsageError, match=rf"service 'typo' is not in .*{file}: correct its name"):
        load(dsn="postgresql:///d" + "?service=typo" * (way != "environment"))


def test_without_a_host_the_places_of_postgres_on_this_host_are_tried() -> None:
    assert places(conninfo("postgresql:///d?port=5433")) == [
        ("/run/postgresql", 5433),
        ("/var/run/postgresql", 5433),
        ("/tmp", 5433),  # noqa: S108
        ("/private/tmp", 5433),
        ("localhost", 5433),
    ]


@pytest.mark.parametrize(
    ("query", "given", "limit_s"),
    [
        ("", None, 10.0),
        ("?connect_timeout=15", None, 15.0),
        ("?connect_timeout=300", None, 60.0),
        ("?connect_timeout=0", None, 10.0),
        ("?connect_timeout=-1", None, 10.0),
        ("?connect_timeout=15", "7", 7.0),
    ],
)
def test_the_connect_timeout_of_the_dsn_holds_unless_ours_is_given(
    query: str, given: str | None, limit_s: float
) -> None:
    settings = load(dsn=f"postgresql://h/d{query}", connect_timeout_s=given)
    assert settings.connect_timeout_s == limit_s
    if limit_s in (15.0, 60.0):
        assert settings.origin("connect_timeout_s") == "connect_timeout (in the DSN)"


def test_variables_of_libpq_are_those_of_the_environment() -> None:
    assert not [name for name in os.environ if name in VARIABLES.values()], "the fixture has cleared them"
