"""What `pgworkd push --debug-http` logs of each request that is sent, and of its answer.

No secret: the path and query of a URL and the headers of an operator may be, or hold, one, so they are left out.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Mapping

from pgworkd.log.http import LogHttp, body_text, without_secrets
from pgworkd.push.answer import OUTCOME, EndpointAnswer
from pgworkd.push.endpoint import Endpoint

_SHOWN = ("webhook-id", "webhook-timestamp", "pgworkd-attempt", "traceparent")
"""Headers of requests whose values are logged; the signature is none of them."""
_SHOWN_OF_ANSWERS = ("content-type", "content-length", "retry-after", OUTCOME)


class Traffic:
    """Logs requests that are sent, each when it is over; `bodies`: with the first bytes of both bodies."""

    def __init__(self, log: LogHttp, *, bodies: bool = False) -> None:
        self._log, self._bodies = log, bodies

    async def logged(
        self, endpoint: Endpoint, headers: Mapping[str, str], content: bytes, answer: Awaitable[EndpointAnswer]
    ) -> EndpointAnswer:
        """Waits for the answer to a message; whatever comes of it is logged."""
        sent = {name: headers[name] for name in _SHOWN if name in headers}
        facts: dict[str, object] = {"endpoint": endpoint.name, "host": endpoint.parts.netloc, "bytes": len(content)}
        facts |= {"headers": sent} | ({"request": body_text(content)} if self._bodies else {})
        began_s = time.monotonic()
        try:
            found = await answer
        except BaseException as error:
            facts["error"] = without_secrets(str(error)) or type(error).__name__
            raise
        else:
            answered = {name: found.headers[name] for name in _SHOWN_OF_ANSWERS if name in found.headers}
            facts |= {"status": found.status, "answer_headers": answered}
            facts |= {"answer": body_text(found.content)} if self._bodies else {}
            return found
        finally:
            self._log(facts | {"took_s": round(time.monotonic() - began_s, 4)})
