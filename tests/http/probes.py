"""Ways in that must be none: requests of those who may do nothing, or only a little, for what belongs to others.

Everything of the queue `vault` is out of bounds for all of them. `{job}`, `{dead}` and so on in a path or a body stand
for what is in it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

CANARY = "canary"
"""In each text of the vault that none of them may read."""


@dataclass(frozen=True)
class Probe:
    """One request. `who`: whose token it carries, see `prepared`; None: as `headers` says.

    `filtered`: a success is all right: a list shows what its caller may see, a queue of a similar name is another one.
    `raw`: bytes in the request's place. `control`: the same as one who may must pass, if there is such a request: a
    probe that fails for another reason proves nothing.
    """

    name: str
    who: str | None
    method: str
    path: str
    body: Any = None
    headers: Mapping[str, str] = field(default_factory=dict)
    filtered: bool = False
    raw: Callable[[Mapping[str, str]], bytes] | None = None
    control: bool = True


def _nobody() -> list[Probe]:
    tries: list[tuple[str, str, dict[str, str]]] = [
        ("no token", "/v1/jobs/{job}", {}),
        ("the token as a password", "/v1/jobs/{job}", {"Authorization": "Basic {root_basic}"}),
        ("the token in the address", "/v1/jobs/{job}?token={root}&access_token={root}", {}),
        ("the token as a cookie", "/v1/jobs/{job}", {"Cookie": "token={root}; Authorization=Bearer {root}"}),
        ("the token's id alone", "/v1/jobs/{job}", {"Authorization": "Bearer pgw_{root_id}_"}),
        ("the stored hash as the secret", "/v1/jobs/{job}", {"Authorization": "Bearer pgw_{root_id}_{root_hash}"}),
        ("another id with one's own secret", "/v1/jobs/{job}", {"Authorization": "Bearer pgw_{root_id}_{own_secret}"}),
        ("the token cut short", "/v1/jobs/{job}", {"Authorization": "Bearer {root_short}"}),
        ("the token and one letter more", "/v1/jobs/{job}", {"Authorization": "Bearer {root}A"}),
        ("SQL in the id", "/v1/jobs/{job}", {"Authorization": "Bearer pgw_aaaaaaaa' OR '1'='1_" + "x" * 30}),
        ("a token of letters alike", "/v1/jobs/{job}", {"Authorization": "Bearer {root_wide}"}),
        ("an expired token", "/v1/jobs/{job}", {"Authorization": "Bearer {expired}"}),
        ("a revoked token", "/v1/jobs/{job}", {"Authorization": "Bearer {revoked}"}),
        ("who it is, said by itself", "/v1/jobs/{job}", {"X-Remote-User": "admin", "X-User": "admin"}),
        ("from a trusted address", "/v1/jobs/{job}", {"X-Forwarded-For": "127.0.0.1", "Forwarded": "for=127.0.0.1"}),
        ("the open page, the other path in a header", "/healthz", {"X-Original-URL": "/v1/jobs/{job}"}),
        ("metrics", "/metrics", {}),
        ("the list of tokens", "/v1/tokens", {}),
    ]
    found = [
        Probe(
            name,
            None,
            "GET",
            path,
            headers=headers,
            filtered=path == "/healthz",
            control="?" not in path and path != "/healthz",
        )
        for name, path, headers in tries
    ]
    found += [
        Probe("a token of one's own making", None, "POST", "/v1/tokens", {"name": "x", "scopes": {"admin": None}}),
        Probe("a job", None, "POST", "/v1/jobs", {"queue": "vault"}),
        Probe("a worker", None, "POST", "/v1/workers", {"name": "x", "queues": {"vault": 1}}),
    ]
    return found


def _scopes() -> list[Probe]:
    asked = {"name": "x", "scopes": {"admin": None}}
    return [
        Probe("a reader reads a payload", "reader", "GET", "/v1/jobs/{job}", filtered=True, control=False),
        Probe("a reader reads a result", "reader", "GET", "/v1/jobs/{done}/result"),
        Probe("a reader reads a traceback", "reader", "GET", "/v1/jobs/{dead}", filtered=True, control=False),
        Probe("a reader lists errors", "reader", "GET", "/v1/dead", filtered=True, control=False),
        Probe("a reader reads results of a batch", "reader", "GET", "/v1/batches/{batch}/results"),
        Probe("a reader cancels", "reader", "DELETE", "/v1/jobs/{job}"),
        Probe("by another method's name", "reader", "GET", "/v1/jobs/{job}?_method=DELETE",
              headers={"X-HTTP-Method-Override": "DELETE", "X-HTTP-Method": "DELETE"}, filtered=True, control=False),
        Probe("a reader pauses", "reader", "POST", "/v1/queues/vault/pause", {}),
        Probe("a reader adds a token", "reader", "POST", "/v1/tokens", asked),
        Probe("an operator adds a token", "narrow", "POST", "/v1/tokens", asked),
        Probe("an operator revokes a token", "narrow", "DELETE", "/v1/tokens/{root_id}", control=False),
    ]  # fmt: skip


def _queues() -> list[Probe]:
    names = {
        "another queue": "vault",
        "a queue in capitals": "VAULT",
        "a blank before": " vault",
        "both names, with NUL": "public\0vault",
        "both names, with a line between": "vault\npublic",
        "the pattern itself": "*",
    }
    found = [
        Probe(name, "narrow", "POST", "/v1/jobs", {"queue": queue}, control=queue == "vault")
        for name, queue in names.items()
    ]
    two = [{"queue": "public"}, {"queue": "vault"}]
    flow = [{"name": "a", "queue": "public"}, {"name": "b", "queue": "vault", "after": ["a"]}]
    tree = {"name": "x", "queue": "public", "children": [{"name": "y", "queue": "vault", "payloads": [{}]}]}
    found += [
        Probe("among many", "narrow", "POST", "/v1/jobs/bulk", {"jobs": two}),
        Probe("within a flow", "narrow", "POST", "/v1/workflows", {"jobs": flow}),
        Probe("within a tree", "narrow", "POST", "/v1/batches", tree),
        Probe("into another's batch", "narrow", "POST", "/v1/batches/{batch}/jobs", {"payloads": [{}]}, control=False),
        Probe("a child of another's batch", "narrow", "POST", "/v1/batches/{batch}/children", {"name": "x"},
              control=False),
        Probe("sealing another's batch", "narrow", "POST", "/v1/batches/{batch}/seal"),
        Probe("deleting another's batch", "narrow", "DELETE", "/v1/batches/{batch}", control=False),
        Probe("another's job", "narrow", "GET", "/v1/jobs/{job}"),
        Probe("another's result", "narrow", "GET", "/v1/jobs/{done}/result"),
        Probe("editing another's job", "narrow", "PATCH", "/v1/jobs/{job}", {"payload": {"mine": 1}}),
        Probe("a PUT over another's job", "narrow", "PUT", "/v1/jobs/{job}", {"queue": "public"}, control=False),
        Probe("replaying another's job", "narrow", "POST", "/v1/jobs/{done}/replay", {}),
    ]  # fmt: skip
    return found


def _operations() -> list[Probe]:
    """Those of operators."""
    rule = {"queue": "vault", "every_s": 60}
    return [
        Probe("cancelling by ids", "narrow", "POST", "/v1/jobs/cancel", {"ids": ["{job}"]}),
        Probe("retrying in all queues", "narrow", "POST", "/v1/jobs/retry", {"all_queues": True, "status": "dead"}),
        Probe("discarding by filter", "narrow", "POST", "/v1/jobs/discard", {"queue": "vault", "status": "dead"}),
        Probe("counting by a dry run", "narrow", "POST", "/v1/jobs/retry?dry_run=true", {"queue": "vault"}),
        Probe("listing a queue", "narrow", "GET", "/v1/jobs?queue=vault"),
        Probe("listing two queues", "narrow", "GET", "/v1/jobs?queue=public&queue=vault", control=False),
        Probe("listing with SQL", "narrow", "GET", "/v1/jobs?queue=public'%20OR%20'1'='1", filtered=True,
              control=False),
        Probe("listing all", "narrow", "GET", "/v1/jobs"),
        Probe("listing a batch", "narrow", "GET", "/v1/jobs?queue=public&batch={batch}", filtered=True, control=False),
        Probe("listing from another's job on", "narrow", "GET", "/v1/jobs?queue=public&cursor={job}", filtered=True,
              control=False),
        Probe("settings of a queue", "narrow", "PATCH", "/v1/queues/vault", {"concurrency": 1}),
        Probe("a queue behind another", "narrow", "POST", "/v1/queues/public/../vault/pause", {}, control=False),
        Probe("the same in code", "narrow", "POST", "/v1/queues/public%2F..%2Fvault/pause", {}, filtered=True,
              control=False),
        Probe("the same in code twice", "narrow", "POST", "/v1/queues/public/%252e%252e/vault/pause", {},
              control=False),
        Probe("a backslash", "narrow", "POST", "/v1/queues/public\\..\\vault/pause", {}, filtered=True, control=False),
        Probe("the depth of a queue", "narrow", "GET", "/v1/queues/vault/depth"),
        Probe("metrics of all", "narrow", "GET", "/metrics"),
        Probe("a schedule for it", "narrow", "PUT", "/v1/schedules/mine", rule),
        Probe("moving its schedule", "narrow", "PUT", "/v1/schedules/secret", rule | {"queue": "public"},
              control=False),
        Probe("running its schedule", "narrow", "POST", "/v1/schedules/secret/run"),
        Probe("deleting its schedule", "narrow", "DELETE", "/v1/schedules/secret", control=False),
        Probe("the audit", "narrow", "GET", "/v1/audit"),
        Probe("asking its worker to stop", "narrow", "POST", "/v1/workers/{worker}/ask", {"state": "stop"},
              control=False),
    ]  # fmt: skip


def _workers() -> list[Probe]:
    mine = {"Pgworkd-Secret": "{my_secret}"}
    claim = {"worker": "{my_worker}", "queues": ["vault"], "max": 1}
    return [
        Probe("registering for it", "narrow", "POST", "/v1/workers", {"name": "x", "queues": {"vault": 1}}),
        Probe("claiming from it", "narrow", "POST", "/v1/claims", claim, mine, control=False),
        Probe("claiming as its worker", "narrow", "POST", "/v1/claims", claim | {"worker": "{worker}"}, mine,
              control=False),
        Probe("adding it later", "narrow", "PUT", "/v1/workers/{my_worker}/queues", {"queues": {"vault": 1}}, mine,
              control=False),
        Probe("beating for its worker", "narrow", "POST", "/v1/workers/{worker}/beat", {"assignments": []}, mine,
              control=False),
        Probe("signing off its worker", "narrow", "DELETE", "/v1/workers/{worker}", headers=mine, control=False),
        Probe("without a secret", "narrow", "DELETE", "/v1/workers/{worker}", control=False),
        Probe("settling by the job's id", "narrow", "POST", "/v1/assignments/{running}/complete", {}, control=False),
        Probe("an assignment under one's own secret", "narrow", "POST", "/v1/assignments/{forged}/complete", {},
              control=False),
        Probe("an assignment with one bit changed", "narrow", "POST", "/v1/assignments/{bent}/complete", {},
              control=False),
        Probe("a forged one among many", "narrow", "POST", "/v1/settlements",
              {"settlements": [{"assignment": "{forged}", "outcome": "complete"}]}, filtered=True, control=False),
        Probe("a job in it by a result", "runner", "POST", "/v1/assignments/{mine}/complete",
              {"enqueue": [{"queue": "vault"}]}, control=False),
    ]  # fmt: skip


def _browsers() -> list[Probe]:
    job = {"queue": "vault"}
    return [
        Probe("a name pointed to this host", "root", "GET", "/v1/jobs/{job}", headers={"Host": "evil.example"},
              control=False),
        Probe("a name that begins alike", "root", "GET", "/v1/jobs/{job}",
              headers={"Host": "localhost.evil.example"}, control=False),
        Probe("another page's form", "root", "POST", "/v1/jobs", job, {"Origin": "http://evil.example"},
              control=False),
        Probe("a frame without origin", "root", "POST", "/v1/jobs", job, {"Origin": "null"}, control=False),
        Probe("a page of a sister domain", "root", "POST", "/v1/jobs", job, {"Sec-Fetch-Site": "same-site"},
              control=False),
        Probe("a form's own type", "root", "POST", "/v1/jobs", job, {"Content-Type": "text/plain"}, control=False),
        Probe("asking for leave beforehand", "root", "OPTIONS", "/v1/jobs",
              headers={"Origin": "http://evil.example", "Access-Control-Request-Method": "POST"}, control=False),
    ]  # fmt: skip


_HEAD = "POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {narrow}\r\n"
_INNER = (
    "POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {narrow}\r\nContent-Type: application/json\r\n"
    'Content-Length: 18\r\nConnection: close\r\n\r\n{{"queue":"public"}}'
)


def _smuggled() -> list[Probe]:
    """Two requests where a proxy in front may see one: the second must not be done."""
    tricks = {
        "two lengths": "Content-Length: 0\r\nContent-Length: 5\r\n\r\n0\r\n\r\n",
        "a length and chunks": "Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        "chunks by another name": "Content-Length: 5\r\nTransfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
        "a length that is none": "Content-Length: +0\r\n\r\n",
        "a chunk of a negative size": "Transfer-Encoding: chunked\r\n\r\n-1\r\n\r\n",
        "a header that goes on": "X-A: b\r\n Transfer-Encoding: chunked\r\nContent-Length: 0\r\n\r\n",
        "a bare line end": "X-A: b\nContent-Length: 0\r\n\r\n",
    }
    return [
        Probe(name, None, "POST", "/v1/jobs", control=False, raw=lambda facts, trick=trick: (
            (_HEAD.format(**facts) + trick + _INNER.format(**facts)).encode()))
        for name, trick in tricks.items()
    ]  # fmt: skip


PROBES = [*_nobody(), *_scopes(), *_queues(), *_operations(), *_workers(), *_browsers(), *_smuggled()]
