"""One table describes a job's fields: NewJob, its typed options and the statements agree with it."""

from __future__ import annotations

import re
from dataclasses import fields

from pgworkd.client.new_job import FIELDS, EnqueueOptions, JobOptions, NewJob
from pgworkd.client.statements import ENQUEUE, INSERT, INSERT_ONE
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


def test_statement_parameters_follow_the_order_of_the_field_table() -> None:
    parameters = [field.parameter for field in FIELDS]
    assert ["queue", *re.findall(r"p_(\w+) =>", ENQUEUE.numbered)] == [*parameters, "on_duplicate"]
    others = [name for name in parameters if name != "payload"]
    (columns,) = re.findall(r"AS new\s+\(([^)]*)\)", INSERT.numbered)
    assert re.findall(r"\w+", columns) == ["id", "payload", *others]
    assert len(re.findall(r"\$\d+", INSERT_ONE.numbered)) == 2 + len(others)


def test_every_sqlstate_of_the_table_has_an_exception_and_a_meaning() -> None:
    for code, (exception, meaning) in SQLSTATES.items():
        assert re.fullmatch(r"PW\d{3}", code)
        assert issubclass(exception, Exception)
        assert meaning
