"""Pieces of PromQL for the board and the alert rules, made from the table of metrics: a name or label that is not
in it cannot be written.

Labels are matched by Grafana's variables as regular expressions in backquotes (`{queue=~`${queue:regex}`}`): in those
PromQL has no escapes, so a queue's name may hold quotes, backslashes and newlines.
"""

from __future__ import annotations

from collections.abc import Mapping

from pgworkd.metrics.families import FAMILIES, VALUES, Family

BY_NAME = {family.name: family for family in FAMILIES}
VARIABLES = ("job", "queue", "kind")
"""Labels that a board can be narrowed down by; `job` is of Prometheus, and all series have it."""
INTERVAL = "$__rate_interval"
"""Grafana's: at least four scrapes, at least one point of the graph."""


def family(name: str, *labels: str) -> Family:
    """The metric of this name; KeyError if there is none, or if it lacks one of the labels."""
    found = BY_NAME[name]
    for label in labels:
        if label not in (*found.labels, "job", "instance"):
            raise KeyError(f"{name} has no label {label}")
    return found


def fixed(name: str, **values: str) -> str:
    """The series of a metric that have these values of labels; all of them without any.

    KeyError for a value that is not in the table of them.
    """
    _check(name, values)
    return name + ("{" + ", ".join(f'{label}="{value}"' for label, value in values.items()) + "}" if values else "")


def _check(name: str, values: Mapping[str, str]) -> Family:
    for label, value in values.items():
        if value not in VALUES[name, label]:
            raise KeyError(f"{name} has no {label} {value}")
    return family(name, *values)


def chosen(name: str, suffix: str = "", by: tuple[str, ...] = VARIABLES, **values: str) -> str:
    """As `fixed`, but of what the variables of the board select; `by`: only these of them.

    `suffix`: _bucket, _sum or _count of a histogram; KeyError where it does not fit.
    """
    found = _check(name, values)
    if bool(suffix) != (found.kind == "histogram"):
        raise KeyError(f"{name} is a {found.kind}: {suffix or 'a suffix is needed'}")
    wanted = [f"{label}=~`${{{label}:regex}}`" for label in by if label in ("job", *found.labels)]
    wanted += [f'{label}="{value}"' for label, value in values.items()]
    return f"{name}{suffix}{{{', '.join(wanted)}}}"


def _by(labels: tuple[str, ...]) -> str:
    return f" by ({', '.join(labels)}) " if labels else ""


def rate(name: str, *by: str, suffix: str = "", **values: str) -> str:
    """How much a counter rises in a second, by label."""
    family(name, *by)
    return f"sum{_by(by)}(rate({chosen(name, suffix, VARIABLES, **values)}[{INTERVAL}]))"


def rise(name: str, window: str, *by: str, **values: str) -> str:
    """How much a counter has risen within `window`, by label."""
    family(name, *by)
    return f"sum{_by(by)}(increase({chosen(name, '', VARIABLES, **values)}[{window}]))"


def quantile(share: float, name: str, *by: str) -> str:
    """The duration in seconds that this share of a histogram's observations did not exceed, by label."""
    family(name, *by)
    rates = f"rate({chosen(name, '_bucket')}[{INTERVAL}])"
    return f"histogram_quantile({share}, sum{_by(('le', *by))}({rates}))"


def mean(name: str, *by: str) -> str:
    """The mean of a histogram's observations, by label."""
    return f"{rate(name, *by, suffix='_sum')} / {rate(name, *by, suffix='_count')}"


def gauge(how: str, name: str, *by: str, **values: str) -> str:
    """A gauge put together (`how`: sum, min or max) by label.

    What is read from the database is the same whoever asks: of those, `max` counts nothing twice.
    """
    family(name, *by)
    return f"{how}{_by(by)}({chosen(name, '', VARIABLES, **values)})"
