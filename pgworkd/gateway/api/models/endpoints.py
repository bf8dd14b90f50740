"""What requests and answers about endpoints look like."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from pgworkd.admin.endpoints import EndpointRow
from pgworkd.gateway.api.models.jobs import Answer, Model


class EndpointIn(Model):
    """An endpoint: where to send, and how. A secret is named, never given; without one `unsigned` must be true."""

    url: Annotated[str, Field(min_length=1, max_length=2000, examples=["https://billing.example.com/jobs"])]
    mode: Literal["sync", "callback"] = "sync"
    timeout_s: Annotated[float, Field(ge=0.1, le=3600)] = 30.0
    callback_timeout_s: Annotated[float, Field(ge=10, le=420)] = 300.0
    headers: dict[str, str] = Field(default_factory=dict, max_length=20)
    secret_name: Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_-]{0,63}$")] | None = None
    unsigned: bool = False
    allow_private: bool = Field(False, description="Also addresses that are not of the public internet")
    strict_results: bool = Field(False, description="A 2xx whose result cannot be stored makes the job dead")


class EndpointOut(Answer, row=EndpointRow):
    """An endpoint. `reason`: why it is not live; `url`, `headers`: for the scope admin."""

    mode: Literal["sync", "callback"]
    state: Literal["live", "paused", "disabled"]
    url: str | None
    headers: dict[str, str] | None


class EndpointsOut(Answer):
    """Endpoints, by name."""

    endpoints: list[EndpointOut]


class DisableIn(Model):
    """Why the endpoint is disabled."""

    reason: Annotated[str, Field(min_length=1, max_length=500)] = "by an operator"
