"""Push: a job goes out as an HTTP request, and the answer ends its attempt.

`secrets` finds what signs it, `message` writes and signs it, `sender` sends it over connections that `guard` allows,
`answer` says what the answer means; `functions` are for applications. Nothing here knows of a database or a daemon.
"""

from pgworkd.push.functions import Push, PushFailed, Webhook

__all__ = ["Push", "PushFailed", "Webhook"]
