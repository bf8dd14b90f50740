"""DSNs: what is accepted, what is rejected, and that no secret is ever shown."""

import pickle
import traceback

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from pgworkd.core.dsn import dsn_fault
from pgworkd.errors import UsageError
from pgworkd.process.redaction import redacted
from pgworkd.settings.config import Settings, load
from pgworkd.settings.shown import describe
from tests.kits.cli import CANARY, clean
from tests.unit.test_config import write

__all__ = ["clean"]  # a fixture

SOUND_DSNS = [
    ("postgresql://user:{}@host:5432/db", "postgresql://user:***@host:5432/db"),
    ("postgres://user:{}@host", "postgres://user:***@host"),
    ("postgresql://:{}@h1:1,h2:2,[::1]:3/db", "postgresql://:***@h1:1,h2:2,[::1]:3/db"),
    ("postgresql://us%40er:a%2F{}:b@host/db", "postgresql://us%40er:***@host/db"),
    (
        "postgresql://host/db?user=u&password={}&sslmode=require",
        "postgresql://host/db?user=u&password=***&sslmode=require",
    ),
    ("postgresql:///db?host=/run/pg&p%61ssword={}", "postgresql:///db?host=/run/pg&p%61ssword=***"),
    (
        "postgresql://h/db?sslpassword={}&oauth_client_secret={}",
        "postgresql://h/db?sslpassword=***&oauth_client_secret=***",
    ),
]


@pytest.mark.parametrize(("dsn", "shown"), SOUND_DSNS)
def test_a_dsn_is_displayed_without_its_secrets(dsn, shown):
    dsn = dsn.replace("{}", CANARY)
    settings = load(dsn=dsn)
    assert settings.dsn_redacted == shown
    assert settings.dsn_required() == dsn


@pytest.mark.parametrize(
    "dsn",
    ["postgresql://", "postgresql:///db", "postgres://%2Frun%2Fpg/db", "postgresql://u@[fe80::1%eth0]/d"],
)
def test_a_dsn_without_secrets_is_displayed_unchanged(dsn):
    assert dsn_fault(dsn) is None
    assert redacted(dsn) == dsn


BAD_DSNS = [
    "mysql://u:{}@h/db",
    "u:{}@h/db",
    "postgresql:/u:{}@h/db",
    "host=h password={}",
    "{}",
    "postgresql://u:p#{}@h/db",
    "postgresql://u:p/{}@h/db",
    "postgresql://u:p?{}@h/db",
    "postgresql://u:1/{}@h/db",
    "postgresql://u:1?{}@h/db",
    "postgresql://u:1?x={}@h/db",  # parses as host u, port 1 and a parameter
    "postgresql://u:x@{}@h/db",  # the driver ends the password at the first @ and looked up the rest in DNS
    "postgresql://u:{}@h:port/db",
    "postgresql://u:{}@h:123456/db",
    "postgresql://u:{}@[::1/db",
    "postgresql://u:{}@h,/db",
    "postgresql://u:{}@,h:1/db",
    "postgresql://u:{}@h,:2/db",
    "postgresql://u:{}@/db?host=h,",
    "postgresql://u:{}@/db?host=h:99999",
    "postgresql://u:{}@h/db?port=1,2",
    "postgresql://u:{}@h/db?port=first",
    "postgresql://u:{}@h/db?hostaddr=g",
    "postgresql://host?PassWord={}",
    "postgresql://h/db?password=a&{}=b",
    "postgresql://u:{}@h/db?sslmode",
    "postgresql://u:p\n{}@h/db",
    "postgresql://u:\x00{}@h/db",
    "postgresql://u:\udc80{}@h/db",
]


def assert_hidden(error: BaseException) -> None:
    seen: BaseException | None = error
    while seen is not None:
        shown = str(seen) + repr(seen) + str(seen.args) + "".join(traceback.format_exception(seen))
        assert CANARY not in shown
        seen = seen.__context__


@pytest.mark.parametrize("dsn", BAD_DSNS)
@pytest.mark.parametrize("source", ["flag", "environment", "file"])
def test_an_invalid_dsn_is_rejected_without_being_quoted(monkeypatch, dsn, source):
    dsn = dsn.replace("{}", CANARY)
    given: dict[str, object] = {}
    if source == "flag":
        given = {"dsn": dsn}
    elif source == "environment" and "\0" not in dsn:
        monkeypatch.setenv("PGWORKD_DSN", dsn)
    else:
        write("dsn = " + repr(dsn).replace("\\x00", "\\u0000").replace("'", '"').replace("\\udc80", "\\u007f"))
    with pytest.raises(UsageError, match=r"^dsn \(") as caught:
        load(**given)
    assert_hidden(caught.value)


def test_the_password_appears_in_no_output(monkeypatch):
    dsn = f"postgresql://u:{CANARY}@h/db?sslpassword={CANARY}"
    monkeypatch.setenv("PGWORKD_DSN", dsn)
    settings = load(lease_s=60)
    shown = [
        repr(settings),
        str(settings),
        str(describe(settings)),
        settings.model_dump_json(),
        str(settings.model_dump()),
    ]
    shown += [str(settings.notes), f"{settings.dsn}", str(settings.dsn_redacted), str(vars(settings))]
    assert not [text for text in shown if CANARY in text]
    assert pickle.loads(pickle.dumps(settings)).dsn_required() == dsn  # noqa: S301
    with pytest.raises(UsageError) as caught:
        load(lease_s=1)  # another field is invalid
    assert_hidden(caught.value)
    with pytest.raises(ValidationError) as direct:
        Settings(dsn=dsn + "#")
    assert CANARY not in str(direct.value)


@pytest.mark.parametrize("name", [name for name in Settings.model_fields if name not in ("dsn", "worker_name")])
def test_a_dsn_given_for_another_option_is_not_quoted(monkeypatch, name):
    monkeypatch.setenv(f"PGWORKD_{name.upper()}", f"postgresql://u:{CANARY}@h/db?x=y")
    with pytest.raises(UsageError) as caught:
        load()
    assert_hidden(caught.value)


@pytest.mark.parametrize("name", ["queues", "worker_name"])
def test_a_dsn_parsed_as_a_name_is_displayed_without_its_password(name):
    settings = load(**{name: f"postgresql://u:{CANARY}@h/db"})
    assert CANARY not in str(describe(settings))
    assert "postgresql://u:***@h/db" in str(describe(settings))


def test_a_missing_dsn_error_explains_how_to_set_one():
    with pytest.raises(UsageError, match=r"set PGWORKD_DSN, or pass --dsn"):
        load().dsn_required()


@given(st.text(st.characters(exclude_categories=("Cs", "Cc"), exclude_characters="/?#")))
def test_no_password_survives_redaction(password):
    dsn = f"postgresql://u:{CANARY}{password}@host/db"
    assert redacted(dsn) == "postgresql://u:***@host/db"


def test_every_setting_has_a_description():
    assert not [name for name, field in Settings.model_fields.items() if not field.description]
