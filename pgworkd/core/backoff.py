"""How long a failed job waits for its retry."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from typing import Any

from pgworkd.core.decorated import innermost, is_async
from pgworkd.errors import DELAY_S_MAX, UsageError, delay_seconds

STEPS_MAX = 1000

Rule = Callable[[int], "float | timedelta"]
"""A user's own policy: failures so far (1, 2, ...) -> delay in seconds, or a timedelta."""


@dataclass(frozen=True, slots=True)
class Backoff:
    """The delay before a retry: `min(cap_s, base_s * factor ** (failures - 1))`; 30 s, 5 min, 30 min.

    `steps_s` replaces the formula by a list whose last value repeats, `rule` by a function. `jitter` changes the delay
    by up to that share either way (0.1 is ±10 %), so that jobs that failed together are not retried together; a
    function's result has no jitter. Raises UsageError for values out of bounds: seconds are 0 to 366 days, factor 1 to
    1000, jitter 0 to 1.
    """

    base_s: float = 30.0
    factor: float = 10.0
    cap_s: float = 1800.0
    jitter: float = 0.1
    steps_s: tuple[float, ...] = ()
    rule: Rule | None = None

    def __post_init__(self) -> None:
        delay_seconds(self.base_s, "backoff base_s")
        delay_seconds(self.cap_s, "backoff cap_s")
        for step in self.steps_s:
            delay_seconds(step, "a backoff step")
        if not _is_within(self.factor, 1, 1000):
            raise UsageError("backoff factor must be a number from 1 to 1000")
        if not _is_within(self.jitter, 0, 1):
            raise UsageError("backoff jitter must be a number from 0 to 1, 0.1 is ±10 %")

    @classmethod
    def parse(cls, policy: object) -> Backoff:
        """Converts the `backoff` of a handler to a Backoff; None is the default policy.

        Accepts a Backoff, a number of seconds or a timedelta (constant), a list of those (the last repeats), a dict of
        this class's numbers, or a function from failures (1, 2, ...) to seconds. Raises UsageError for anything else.
        """
        if policy is None:
            return cls()
        if isinstance(policy, Backoff):
            return policy
        if isinstance(policy, Mapping):
            return cls._from_mapping(policy)
        if isinstance(policy, (list, tuple)):
            if not 1 <= len(policy) <= STEPS_MAX:
                raise UsageError(f"a backoff list has 1 to {STEPS_MAX} delays in seconds, this one {len(policy)}")
            return cls(steps_s=tuple(delay_seconds(step, "a backoff step") for step in policy))
        if isinstance(policy, type) or (callable(policy) and is_async(innermost(policy))):
            raise UsageError("a backoff function is a plain function: def backoff(failures: int) -> float (seconds)")
        if callable(policy):
            return cls(rule=policy)
        return cls(steps_s=(delay_seconds(policy, "backoff"),))  # type: ignore[arg-type]  # raises for the rest

    def overridden_by(self, row: Mapping[str, float]) -> Backoff:
        """This policy, overridden by a row of `queues`: backoff_s, backoff_factor, backoff_cap_s.

        If the row sets any, the formula replaces a list or function; numbers that it does not set are this policy's.
        """
        if not row:
            return self
        base_s, factor = row.get("backoff_s", self.base_s), row.get("backoff_factor", self.factor)
        cap_s = row.get("backoff_cap_s", self.cap_s)
        return replace(self, base_s=base_s, factor=factor, cap_s=cap_s, steps_s=(), rule=None)

    @classmethod
    def _from_mapping(cls, policy: Mapping[Any, Any]) -> Backoff:
        known = {field.name for field in fields(cls)} - {"rule", "steps_s"}
        if unknown := sorted(str(key) for key in policy if key not in known):
            raise UsageError(f"unknown backoff setting {unknown[0]!r}: use {', '.join(sorted(known))}")
        return cls(**policy)

    def delay_s(
        self,
        failures: int,
        rng: Callable[[], float] = random.random,
        warn: Callable[[str], None] | None = None,
    ) -> float:
        """Seconds to wait after `failures` (1 or more), finite, 0 to 366 days; `rng` returns 0 <= x < 1.

        If a rule raises, or returns no number, the default policy is used, and `warn` is called with the reason.
        """
        if self.rule is not None:
            try:
                return _clamped(self.rule(failures))
            except BaseException as error:  # noqa: BLE001 - user code, but synchronous: no cancellation passes here
                if warn is not None:
                    warn(f"backoff function failed ({type(error).__name__}), the default policy is used")
                return Backoff().delay_s(failures, rng)
        if self.steps_s:
            delay_s = self.steps_s[min(max(failures, 1), len(self.steps_s)) - 1]
        else:
            delay_s = self._grown_s(max(failures, 1))
        return min(delay_s * (1 + self.jitter * (2 * rng() - 1)), DELAY_S_MAX)

    def _grown_s(self, failures: int) -> float:
        try:
            return min(self.base_s * float(self.factor) ** (failures - 1), self.cap_s)  # a power of ints has no end
        except OverflowError:
            return self.cap_s if self.base_s else 0.0


def _is_within(value: object, low: float, high: float) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= high


def _clamped(answer: object) -> float:
    if isinstance(answer, timedelta):
        answer = answer.total_seconds()
    if isinstance(answer, bool) or not isinstance(answer, (int, float)):
        raise TypeError(f"returned a {type(answer).__name__}")
    if isinstance(answer, float) and not math.isfinite(answer):
        raise ValueError(f"returned {answer}")
    return float(min(max(answer, 0), DELAY_S_MAX))
