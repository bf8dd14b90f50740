"""What `mask` names is on no page, whoever looks, and no form writes stars in its place."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from pgworkd.core.masks import HIDDEN, Masks
from pgworkd.errors import UsageError
from pgworkd.settings.config import load
from tests.dashboard.test_forms import filled_in, sent
from tests.kits import verbs as v
from tests.kits.gateway import ALL, served, token
from tests.kits.pages import viewing
from tests.kits.verbs import Db

SECRET = "s3cr3t"
CASES: list[tuple[str, Any, Any]] = [
    ("payload.a", {"a": SECRET, "b": 1}, {"a": HIDDEN, "b": 1}),
    ("payload.a", {"a": {"b": SECRET}}, {"a": HIDDEN}),
    ("payload.a", {"b": {"a": 1}, "A": 2}, {"b": {"a": 1}, "A": 2}),
    ("payload.*.email", {"to": {"email": SECRET}, "email": "x"}, {"to": {"email": HIDDEN}, "email": "x"}),
    ("payload.*.email", {"to": [{"email": "x"}]}, {"to": [{"email": "x"}]}),
    ("payload.to.*.email", {"to": [{"email": SECRET}, 7]}, {"to": [{"email": HIDDEN}, 7]}),
    ("payload.to.1", {"to": ["x", SECRET]}, {"to": ["x", HIDDEN]}),
    ("payload.**.pin", {"pin": SECRET, "a": [{"b": {"pin": SECRET}}]}, {"pin": HIDDEN, "a": [{"b": {"pin": HIDDEN}}]}),
    ("payload.**", {"a": SECRET}, HIDDEN),
    ("payload.a.**.b", {"a": {"b": SECRET}, "b": 1}, {"a": {"b": HIDDEN}, "b": 1}),
    ("payload.x*y", {"xy": SECRET, "xay": SECRET, "xyz": 1}, {"xy": HIDDEN, "xay": HIDDEN, "xyz": 1}),
    ("payload.a[b", {"a[b": SECRET, "a": "b"}, {"a[b": HIDDEN, "a": "b"}),
    ("payload.a.b", {"a": SECRET[:0], "c": []}, {"a": "", "c": []}),
    ("result.a", {"a": "x"}, {"a": "x"}),
]


@pytest.mark.parametrize(("mask", "value", "wanted"), CASES)
def test_a_mask_hides_what_its_path_leads_to(mask: str, value: Any, wanted: Any) -> None:
    masks, text = Masks([mask]), json.dumps(value)
    assert json.loads(masks.text("payload", text)) == wanted
    assert masks.members({"payload": value, "priority": 7}) == {"payload": wanted, "priority": 7}
    assert (masks.text("payload", text) == text) == (wanted == value), "what has nothing to hide stays as it is"


def test_a_masked_text_keeps_its_numbers_and_a_strange_one_is_hidden_whole() -> None:
    masks = Masks(["payload.a", "payload.**.pin"])
    text = '{"n": 1.10, "big": 123456789012345678901234567890, "e": 1E400, "l": [-0.0], "a": 7}'
    assert masks.text("payload", text) == text.replace('"a": 7', '"a": "***"')
    long = "7" * 10_000
    assert masks.text("payload", f'{{"n": {long}, "a": 7}}') == f'{{"n": {long}, "a": "***"}}'
    for strange in (
        '{"a": "s3cr3t", "a": 1}',
        '{"b": {"pin": 7}, "b": 1}',
        "{",
        '{"b":' * 100_000 + "1" + "}" * 100_000,
    ):
        assert masks.text("payload", strange) == '"***"', strange[:50]
    assert masks.text("payload", "[1.10]") == "[1.10]"
    assert Masks([]).text("payload", "{") == "{", "without masks nothing is read"


@pytest.mark.parametrize(
    ("masks", "path", "hidden"),
    [
        ("payload.a", "a", True),
        ("payload.a", "a.b.c", True),
        ("payload.a.b", "a", False),
        ("payload.*.email", "to.email", True),
        ("payload.l.0", "l.-1", True),
        ("payload.l.0", "l.00", True),
        ("payload.l.0", "l.+0.x", True),
        ("payload.l.x", "l.0", False),
        ("payload.**.pin", "a.b.pin", True),
        ("result.a", "a", False),
    ],
)
def test_what_is_masked_cannot_be_asked_for(masks: str, path: str, *, hidden: bool) -> None:
    assert Masks([masks]).hides(f"payload.{path}") is hidden


@pytest.mark.parametrize("wrong", ["payload", "payload.", "a.b", "payload..a", "payload.a b", "x" * 10_000, ".a"])
def test_a_wrong_mask_is_refused_at_the_start(wrong: str) -> None:
    with pytest.raises(UsageError, match=r"http_mask .*must be paths such as payload\.\*\.email"):
        load(http_mask=wrong)
    with pytest.raises(UsageError, match=r"mask .*give paths such as"):
        Masks([wrong])


async def test_no_page_shows_what_is_masked(dsn: str, db: Db) -> None:
    payload = json.dumps({"to": {"email": SECRET}, "amount": 7, "many": 123456789012345678901234567890})
    job_id = await v.one(db, payload=payload, meta=json.dumps({"key": SECRET}), run_at=v.at(3600))
    worker_id = await v.worker(db, 3600)
    done = await v.one(db, "w", payload=payload)
    await v.claim(db, worker_id, 1, "w")
    await v.complete(db, [done], results=[json.dumps({"token": SECRET, "rows": 8})])
    rule = "INSERT INTO pgworkd.schedules (name, queue, every_s, payload) VALUES ('s', 'q', 60, $1)"
    await db.execute(rule, payload)
    await db.execute("SELECT pgworkd.edit($1, $2)", job_id, json.dumps({"to": {"email": SECRET + "2"}, "amount": 7}))
    mask = ("payload.*.email", "result.**.token", "meta.key")
    pages = ("/audit", f"/audit?job={job_id}", f"/jobs/{job_id}", f"/jobs/{job_id}/edit", f"/jobs/{done}")
    async with viewing(dsn, ALL, mask=mask) as client:
        for path in (*pages, "/schedules/edit?name=s", "/schedules", "/jobs"):
            page = await client.get(path)
            assert page.status_code == 200
            assert SECRET not in page.text, path
        assert "***" in (await client.get("/audit")).text
        shown = (await client.get(f"/jobs/{done}")).text
        for each in ("***", "amount", "123456789012345678901234567890", "rows"):
            assert each in shown
        for path in (f"/jobs?payload=to.email:{SECRET}", "/jobs?payload=amount:7+to.email.x:7"):
            answer = await client.get(path)
            assert (answer.status_code, "is masked: no page shows it" in answer.text) == (422, True)
        assert f"row-{done}" in (await client.get("/jobs?payload=amount:7")).text
    async with viewing(dsn, ALL) as client:
        for path in pages:
            assert SECRET in (await client.get(path)).text, "the test looks at the right pages"


async def test_a_form_of_what_is_masked_leaves_the_payload_as_it_is(dsn: str, db: Db) -> None:
    payload = '{"to": {"email": "s3cr3t"}, "amount": 1.10}'
    job_id = await v.one(db, payload=payload, run_at=v.at(3600))
    plain = await v.one(db, payload='{"amount": 1}', run_at=v.at(3600))
    rule = "INSERT INTO pgworkd.schedules (name, queue, every_s, payload) VALUES ('s', 'q', 60, $1)"
    await db.execute(rule, payload)
    async with viewing(dsn, ALL, mask=("payload.*.email",)) as client:
        for path, name, value in (
            (f"/jobs/{job_id}/edit", "priority", "3"),
            ("/schedules/edit?name=s", "every_s", "30"),
        ):
            form = await filled_in(client, path)
            assert [each for each in form if "payload" in each] == []
            assert "integer" in await sent(client, path, priority="x")
            answer = await client.post(path.partition("?")[0], data=form | {"priority": "x"})
            assert 'name="payload"' not in answer.text, "nor when it is shown again"
            await sent(client, path, **{name: value})
        assert (await filled_in(client, f"/jobs/{plain}/edit"))["payload"] == '{\n  "amount": 1\n}'
        await client.post("/jobs/cancel", data={"id": str(job_id)})
        again = await client.post(f"/jobs/{job_id}/replay", data={"back": "/"})
        assert again.status_code == 303
    texts = [row[0] for row in await db.fetch("SELECT payload::text FROM pgworkd.all_jobs WHERE id <> $1", plain)]
    texts.append(await db.fetchval("SELECT payload::text FROM pgworkd.schedules"))
    assert {json.dumps(json.loads(each), sort_keys=True) for each in texts} == {
        json.dumps(json.loads(payload), sort_keys=True)
    }
    row = await db.fetchrow(
        "SELECT j.priority, every_s FROM pgworkd.all_jobs j, pgworkd.schedules WHERE id = $1", job_id
    )
    assert tuple(row) == (3, 30)


@pytest.mark.slow("a gateway in a process of its own")
async def test_serve_takes_masks(dsn: str, db: Db) -> None:
    job_id = await v.one(db, payload=json.dumps({"a": SECRET}))
    with served(dsn, "--with", "dashboard", "--mask", "payload.a,result.b") as (_, address):
        headers = {"Authorization": f"Bearer {await token(dsn)}"}
        async with httpx.AsyncClient(headers=headers) as client:
            page = await client.get(f"{address}/jobs/{job_id}")
        assert (page.status_code, "***" in page.text, SECRET in page.text) == (200, True, False)
