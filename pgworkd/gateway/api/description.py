"""The description of the interface (OpenAPI), such that clients can be generated from it.

FastAPI describes routes and values. What is put right here: who may call, which media type a problem has, names of
operations, and where it is less strict than the routes or stricter.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, get_args

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from pgworkd.gateway.api.request.problems import CONTENT_TYPE, PROBLEMS
from pgworkd.gateway.api.routes.operate import Operation

_METHODS = ("get", "put", "post", "patch", "delete")
_SCHEME = "token"
_PROBLEM = {CONTENT_TYPE: {"schema": {"$ref": "#/components/schemas/ProblemOut"}}}
_MANY = "/v1/jobs/{operation}"
EXAMPLES: dict[str, Any] = {
    "JobIn": {"queue": "invoices", "kind": "invoice.paid", "payload": {"invoice": 7}, "dedupe_key": "invoice-7"},
    "JobsIn": {"jobs": [{"queue": "mail", "payload": {"to": "ada@example.com"}}, {"queue": "mail"}]},
    "WorkflowIn": {"jobs": [{"name": "load", "queue": "etl"}, {"name": "tell", "queue": "mail", "after": ["load"]}]},
    "BatchIn": {"name": "payroll", "kind": "calculate", "payloads": [{"employee": 1}], "sealed": True},
    "AddIn": {"payloads": [{"employee": 2}]},
    "FilterIn": {"queue": "mail", "status": "dead"},
    "QueueSettings": {"concurrency": 4, "max_running": 20},
    "ScheduleIn": {"queue": "report", "cron": "0 6 * * *", "timezone": "Europe/Berlin"},
    "EndpointIn": {"url": "https://billing.example.com/jobs", "secret_name": "billing"},  # nosec B105 # a name
    "TokenIn": {"name": "payroll", "scopes": {"enqueue": ["payroll*"], "read": None}},
    "WorkerIn": {"name": "crawler-1", "queues": {"crawl": 10}},
    "ClaimIn": {"worker": 7, "queues": ["crawl"], "max": 10, "wait_s": 30, "claim_id": 1},
    "CompleteIn": {"result": {"pages": 3}},
    "FailIn": {"type": "TimeoutError", "message": "no answer within 30 s"},
}
"""A value of each body that is more than a field or two."""


def describe(api: FastAPI) -> dict[str, Any]:
    """The description of an application, made once."""
    if api.openapi_schema is None:
        found = get_openapi(
            title=api.title,
            version=api.version,
            description=api.description,
            routes=api.routes,
            license_info={"name": "MIT", "identifier": "MIT"},
        )
        _split(found["paths"])
        for route in _routes(found["paths"]):
            _correct(route)
        schemas = found["components"]["schemas"]
        for name in ("HTTPValidationError", "ValidationError"):  # FastAPI's own, which no route answers with
            schemas.pop(name, None)
        for name in schemas.keys() & EXAMPLES.keys():
            schemas[name]["examples"] = [EXAMPLES[name]]
        _open(found)
        found["components"]["securitySchemes"] = {
            _SCHEME: {"type": "http", "scheme": "bearer", "description": "As pgworkd token add has printed it"}
        }
        found["security"], found["servers"] = [{_SCHEME: []}], [{"url": ".."}]
        api.openapi_schema = found
    return api.openapi_schema


def _split(paths: dict[str, Any]) -> None:
    """One path for each operation on many jobs: beside /v1/jobs/{job_id}, a path with another variable is ambiguous."""
    if _MANY not in paths:  # it serves workers only
        return
    text = json.dumps(paths.pop(_MANY))
    for name in get_args(Operation):
        each = paths[_MANY.format(operation=name)] = json.loads(text)
        each["post"]["parameters"] = [one for one in each["post"]["parameters"] if one["in"] != "path"]
        each["post"]["summary"] = f"{name.capitalize()} Jobs"


def _routes(paths: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for path in paths.values():
        yield from (path[method] for method in _METHODS if method in path)


def _correct(route: dict[str, Any]) -> None:
    first, *more = route["summary"].split()
    route["operationId"] = first.lower() + "".join(more)
    if "401" not in route["responses"]:
        route["security"] = []
    for parameter in route.get("parameters", ()):
        parameter["required"] = parameter["required"] or parameter["name"] == "Pgworkd-Secret"
        if parameter["name"] == "assignment":  # a receiver of pushed jobs has no token
            route["security"] = [{_SCHEME: []}, {}]
    responses = route["responses"]
    if "HTTPValidationError" in str(responses.get("422")):
        del responses["422"]
    if not any(code.startswith("4") for code in responses):
        kind = PROBLEMS["headers-too-large"]
        responses[str(kind.status)] = {"description": f"headers-too-large: {kind.title}", "content": _PROBLEM}
    for response in responses.values():
        if CONTENT_TYPE in response.get("content", {}):
            response["content"] = _PROBLEM


def _open(value: Any) -> None:
    """Says of objects without members of their own that they may have any; and puts defaults into words.

    Generators take a member with a default for one that must be sent.
    """
    if isinstance(value, list):
        for each in value:
            _open(each)
    if not isinstance(value, dict):
        return
    if value.get("type") == "object" and not value.keys() & {"properties", "additionalProperties"}:
        value["additionalProperties"] = True
    for each in value.get("properties", {}).values():
        if "default" in each and (default := each.pop("default")) not in (None, "", [], {}):
            said = f"{each['description']}; default" if "description" in each else "Default"
            each["description"] = f"{said}: {json.dumps(default)}"
    for each in value.values():
        _open(each)
