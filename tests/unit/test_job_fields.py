"""One table describes a job's fields: NewJob and its typed options agree with it; the statements are made from it."""

from __future__ import annotations

import re
from dataclasses import fields

from pgworkd.client.new_job import FIELDS, EnqueueOptions, JobOptions, NewJob
from pgworkd.errors import SQLSTATES

ROOT_FIELDS = ("queue", "payload")
DEPENDENCIES = ("after", "on_failed_dependency")


def test_new_job_has_the_tables_fields_and_the_dependencies() -> None:
    names = {field.name for field in fields(NewJob)}
    assert names == {field.name for field in FIELDS} | set(DEPENDENCIES)


def test_the_typed_options_match_new_job() -> None:
    types = NewJob.__annotations__
    assert JobOptions.__annotations__.keys() == {field.name for field in FIELDS} - set(ROOT_FIELDS)
    assert EnqueueOptions.__annotations__.keys() - JobOptions.__annotations__.keys() == set(DEPENDENCIES)
    for name, annotation in EnqueueOptions.__annotations__.items():
        assert annotation.__forward_arg__ == types[name]


def test_every_sqlstate_of_the_table_has_an_exception_and_a_meaning() -> None:
    for code, (exception, meaning) in SQLSTATES.items():
        assert re.fullmatch(r"PW\d{3}", code)
        assert issubclass(exception, Exception)
        assert meaning
