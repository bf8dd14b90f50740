"""Members of payloads, results and metadata that are not to be seen, by globs of their paths."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from secrets import token_hex
from typing import Any

from pgworkd.errors import UsageError

HIDDEN = "***"
"""What is shown in place of what is hidden."""
GIVE = "paths such as payload.*.email or result.**.token: payload, result or meta, and names with dots between"
_PATH = re.compile(r"(payload|result|meta)(\.[^.,\s]{1,200}){1,64}")
_ANY_DEPTH = "**"
_INTEGER = re.compile(r"[-+]?\d+", re.ASCII)
_States = frozenset[tuple[int, int]]
"""How far each mask has matched: its number, and how many of its steps."""


def is_mask(text: str) -> bool:
    """Whether this is the path of a mask."""
    return _PATH.fullmatch(text) is not None


class Masks:
    """Globs of paths: a `*` in a step stands for any characters, `**` for any number of steps.

    Elements of lists have their indexes as names.
    """

    def __init__(self, paths: Sequence[str]) -> None:
        if wrong := [each for each in paths if not is_mask(each)]:
            raise UsageError(f"mask {wrong[0][:100]!a}: give {GIVE}")
        self._masks = [[_step(step) for step in each.split(".")] for each in paths]
        self._start = self._with_empty((number, 0) for number in range(len(paths)))

    def text(self, what: str, text: str) -> str:
        """The JSON text of a `what` (payload, result, meta) without what is hidden: itself, if nothing is.

        Numbers keep their digits. A text that cannot be read is hidden as a whole.
        """
        states = self._after(self._start, what)
        if not states:
            return text
        exact, mark = list[str](), token_hex(16)

        def number(digits: str) -> object:
            exact.append(digits)
            return f"{mark}{len(exact) - 1}"

        try:
            value = json.loads(text, parse_float=number, parse_int=number, object_pairs_hook=_object)
            if (masked := self._masked(value, states)) is value:
                return text
            return re.sub(
                f'"{mark}([0-9]+)"', lambda found: exact[int(found[1])], json.dumps(masked, ensure_ascii=False)
            )
        except (ValueError, RecursionError):
            return json.dumps(HIDDEN)

    def members(self, found: object) -> object:
        """An object with the members payload, result or meta, without what is hidden in them."""
        try:
            return self._masked(found, self._start) if self._masks else found
        except RecursionError:
            return HIDDEN

    def hides(self, path: str) -> bool:
        """Whether the member at this path, or what it is in, is hidden. An index may be counted from either end."""
        states = self._start
        for step in path.split("."):
            states = self._after(states, step, any_index=True)
            if self._is_whole(states):
                return True
        return False

    def _masked(self, value: Any, states: _States) -> Any:
        """The value without what is hidden: itself, if nothing is."""
        if self._is_whole(states):
            return HIDDEN
        if isinstance(value, dict) and states:
            members = {name: self._masked(each, self._after(states, name)) for name, each in value.items()}
            return value if all(members[name] is value[name] for name in value) else members
        if isinstance(value, list) and states:
            items = [self._masked(each, self._after(states, str(place))) for place, each in enumerate(value)]
            return value if all(new is old for new, old in zip(items, value, strict=True)) else items
        return value

    def _is_whole(self, states: _States) -> bool:
        return any(len(self._masks[number]) == place for number, place in states)

    def _after(self, states: _States, name: str, *, any_index: bool = False) -> _States:
        found = []
        for number, place in states:
            step = self._masks[number][place] if place < len(self._masks[number]) else ""
            if step == _ANY_DEPTH:
                found.append((number, place))
            elif isinstance(step, re.Pattern):
                is_index = any_index and _INTEGER.fullmatch(name) and _INTEGER.fullmatch(step.pattern)
                if is_index or step.fullmatch(name):
                    found.append((number, place + 1))
        return self._with_empty(found)

    def _with_empty(self, states: Any) -> _States:
        """States, and what follows a `**`, which may stand for no step."""
        found = set(states)
        for number, place in list(found):
            steps = self._masks[number]
            end = next((at for at in range(place, len(steps)) if steps[at] != _ANY_DEPTH), len(steps))
            found |= {(number, at) for at in range(place, end + 1)}
        return frozenset(found)


def _object(members: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object. Raises ValueError for names that it has twice: the text shows both, and a dict one."""
    if len(found := dict(members)) < len(members):
        raise ValueError("a name is there twice")
    return found


def _step(text: str) -> re.Pattern[str] | str:
    return text if text == _ANY_DEPTH else re.compile(".*".join(map(re.escape, text.split("*"))), re.DOTALL)
