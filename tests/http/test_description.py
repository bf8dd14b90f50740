"""The description of the interface: every answer that a stranger's requests get is in it, and none is a 5xx."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from typing import Any

import pytest

from pgworkd.core import json_reader
from pgworkd.gateway.api import description
from pgworkd.gateway.api.app import asgi
from pgworkd.gateway.api.models import batches, endpoints, jobs, operators, workers
from pgworkd.gateway.api.request.problems import PROBLEMS
from tests.kits.gateway import served

pytestmark = pytest.mark.slow("each calls the whole table of routes")


def described() -> dict[str, Any]:
    return asgi("postgresql://nobody@localhost/none").api.openapi()


def test_each_route_says_what_it_does_and_what_it_answers() -> None:
    for path, methods in described()["paths"].items():
        for method, route in methods.items():
            assert route.get("description"), (method, path)
            assert route["tags"]
            codes = set(route["responses"])
            if path.startswith("/v1/") and not path.startswith("/v1/problems"):
                assert {"401", "403", "421", "422", "429", "503"} <= codes, (method, path)
            if "requestBody" in route:
                assert {"408", "413", "415"} <= codes, (method, path)


def test_no_problem_is_without_a_remedy_and_each_slug_is_a_word() -> None:
    for slug, kind in PROBLEMS.items():
        assert slug.replace("-", "").isalpha()
        assert kind.remedy.endswith(".")
        assert not kind.title.endswith(".")
        assert (kind.retry_after_s is None) == (kind.status not in (429, 503))


def test_a_fuzzer_finds_no_failure_and_no_answer_that_is_not_described(dsn: str) -> None:
    """schemathesis makes requests, right ones and wrong ones, from the description itself."""
    with served(dsn, "--auth", "none", PGWORKD_HTTP_REQUESTS_PER_S="1000000") as (_, address):
        checks = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
        command = [sys.executable, "-m", "schemathesis.cli", "run", f"{address}/v1/openapi.json", "--checks", checks]
        command += ["--max-examples", "15", "--seed", "1", "--no-color", "--phases", "examples,coverage,fuzzing"]
        command += ["--exclude-path-regex", "(stream|events|profile)$"]
        found = subprocess.run(command, capture_output=True, text=True, env=os.environ, timeout=240, check=False)
    assert found.returncode == 0, found.stdout.partition("= FAILURES")[2][:9000] + found.stdout[-1500:]


def test_the_description_is_served(dsn: str) -> None:
    import httpx

    with served(dsn, "--auth", "none") as (_, address):
        assert httpx.get(f"{address}/v1/openapi.json", timeout=60).json() == json.loads(json.dumps(described()))


def test_clients_can_be_generated_from_it() -> None:
    """What generators stumble over: names, media types, credentials, ambiguous paths, objects that nothing fits."""
    found = described()
    routes = [(path, method, route) for path, methods in found["paths"].items() for method, route in methods.items()]
    names = [route["operationId"] for _, _, route in routes]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch("[a-z][A-Za-z]+", name) for name in names)
    shapes = [re.sub(r"\{\w+\}", "{}", path) for path in found["paths"]]
    assert len(set(shapes)) == len(shapes)
    for path, method, route in routes:
        needs_token = path not in ("/healthz", "/readyz", "/v1/problems/{slug}")
        assert (route.get("security", found["security"]) != []) == needs_token, (method, path)
        for code, answer in route["responses"].items():
            content = answer.get("content", {})
            assert set(content) == {"application/problem+json"} or code < "400" or path == "/readyz", (path, code)
            assert all(each.get("schema") for each in content.values() if code >= "400"), (path, code)
    text = json.dumps(found)
    named = set(re.findall(r"#/components/schemas/(\w+)", text))
    assert named == found["components"]["schemas"].keys()
    assert '{"type": "object"}' not in text, "an object without members fits nothing"
    members = [
        each for schema in found["components"]["schemas"].values() for each in schema.get("properties", {}).values()
    ]
    closed = {"state", "mode", "status", "outcome", "source"}
    schemas = found["components"]["schemas"]
    for name, schema in schemas.items():
        for member in closed & schema.get("properties", {}).keys() - ({"status"} if name == "ProblemOut" else set()):
            shown = json.dumps(schema["properties"][member])
            shown += "".join(json.dumps(schemas[each]) for each in re.findall(r"/(\w+)\"", shown))
            assert '"enum"' in shown or '"const"' in shown, (name, member)
    assert not any("default" in each for each in members), "one with a default counts as one that must be sent"


@pytest.mark.parametrize("name", description.EXAMPLES)
def test_the_examples_are_of_their_form(name: str) -> None:
    models = [jobs, batches, endpoints, operators, workers]
    model = next(getattr(each, name) for each in models if hasattr(each, name))
    model.model_validate(json_reader.read(json.dumps(description.EXAMPLES[name])))
