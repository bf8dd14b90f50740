"""Sends an endpoint a message that is no job."""

from __future__ import annotations

from pathlib import Path
from uuid import uuid4

from pgworkd.push import message, secrets
from pgworkd.push.answer import described
from pgworkd.push.endpoint import Endpoint
from pgworkd.push.sender import NotDelivered, PerhapsDelivered, Sender


async def attempted(endpoint: Endpoint, secrets_dir: Path | None) -> tuple[bool, str]:
    """Sends a test message: whether 2xx was answered, and the answer. UsageError for a secret that is missing."""
    signing = [] if endpoint.secret_name is None else secrets.read(endpoint.secret_name, secrets_dir)
    at = message.now()
    content = message.body_of_test(endpoint.name, at)
    sender = Sender(allow_private=endpoint.allow_private)
    try:
        message_id = uuid4()
        headers = message.headers(message_id, content, at, signing, endpoint.headers)
        url = endpoint.at({"queue": "test", "kind": "test", "id": message_id})
        answer = await sender.post(url, headers, content, endpoint.timeout_s)
    except (NotDelivered, PerhapsDelivered) as error:
        return False, f"{type(error).__name__}: {error}"
    finally:
        sender.close()
    cause, said = described(answer)
    return 200 <= answer.status < 300, f"{cause}: {said}" if said else cause
