"""The jobs of one call of `Batch.add`: plain ones in one INSERT for many, those with keys one by one, by enqueue()."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any
from uuid import UUID

from pgworkd.client import sent
from pgworkd.client.columns import parts
from pgworkd.client.connections import Step
from pgworkd.client.enqueueing import Enqueued
from pgworkd.client.new_job import FIELDS, KEY_CHARS_MAX, NewJob, check_on_duplicate, new_ids, row
from pgworkd.client.statements import ADD_JOBS, ENQUEUE_ITEMS
from pgworkd.core.traces import Carrier, added
from pgworkd.core.validation import counted, text
from pgworkd.errors import UsageError

ITEM_KEY_CHARS_MAX = KEY_CHARS_MAX - 37
"""Maximum characters of a dedupe key: the id of the batch and a slash are stored before it."""
_KEYS = {"dedupe_key": ITEM_KEY_CHARS_MAX, "serialize_key": KEY_CHARS_MAX}
_KEYED = {*_KEYS, "dedupe_by", "dedupe_until", "dedupe_for", "limit_key", "on_retry"}
_PLAIN = ("queue", "kind", "priority", "run_at", "max_attempts", "timeout_s", "meta")


class Items:
    """Jobs of these payloads (JSON texts) to be added to a batch; UsageError for an invalid option of `Batch.add`."""

    def __init__(
        self,
        batch_id: UUID,
        payloads: Sequence[str],
        options: Mapping[str, Any],
        on_duplicate: str | None,
    ) -> None:
        self._batch_id = str(batch_id)
        self._on_duplicate = on_duplicate
        keys = {name: _each(options.get(name), name, len(payloads)) for name in _KEYS}
        # What goes with a key is checked with one of them.
        one = {name: next(iter(each), "-") for name, each in keys.items() if options.get(name) is not None}
        job = NewJob(**{**options, **one, "queue": options.get("queue") or "-"})
        self._values = values_of(job) | {"queue": options.get("queue")}
        if on_duplicate is not None:
            check_on_duplicate(on_duplicate, job)
            if "priority" not in options:  # then "reschedule" does not change it
                self._values["priority"] = None
        self._is_keyed = bool(_KEYED & options.keys())
        self._ids = new_ids(len(payloads))
        self._rows = list(zip((f"{i:032x}" for i in self._ids), payloads, *keys.values(), strict=True))

    def trace(self, carrier: Carrier) -> None:
        """Gives the jobs this trace context."""
        self._values["meta"] = added(self._values["meta"], carrier)

    def steps(self) -> list[Step]:
        """The statements that add them."""
        return [partial(self._step, part) for part in parts(self._rows, lambda item: len(item[1]))]

    def answer(self, rows: Sequence[Any]) -> list[UUID] | list[Enqueued]:
        """What `Batch.add` returns, from the rows of the statements."""
        if self._on_duplicate is None:
            return [UUID(int=i) for i in self._ids]
        return [Enqueued(UUID(job_id), *rest) for job_id, *rest in rows]

    def _step(self, part: Sequence[tuple[Any, ...]]) -> tuple[Any, Sequence[Any]]:
        ids, payloads, *keys = map(list, zip(*part, strict=True))
        sent.count(self._values["queue"], len(ids))
        if not self._is_keyed:
            return ADD_JOBS, [self._batch_id, ids, payloads, *(self._values[name] for name in _PLAIN)]
        alike = [self._values[field.name] for field in FIELDS if field.name not in ("payload", *_KEYS)]
        return ENQUEUE_ITEMS, [ids, payloads, *keys, *alike, self._batch_id, self._on_duplicate or "raise"]


def values_of(job: NewJob) -> dict[str, Any]:
    """The fields of a job as the statements take them; UsageError for an invalid one."""
    return dict(zip((field.name for field in FIELDS), row(job), strict=True))


def _each(keys: object, name: str, count: int) -> Sequence[str | None]:
    """A key for each of the jobs."""
    if keys is None:
        return [None] * count
    if isinstance(keys, str):
        return [text(keys, name, _KEYS[name])] * count
    if not isinstance(keys, Sequence) or isinstance(keys, bytes):
        raise UsageError(f"{name} must be text, or a list with one for each payload")
    if len(keys) != count:
        raise UsageError(f"{name} lists {counted(len(keys), 'key')} for {counted(count, 'payload')}")
    return [text(key, f"{name}[{i}]", _KEYS[name]) for i, key in enumerate(keys)]
