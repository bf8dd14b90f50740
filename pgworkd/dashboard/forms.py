"""Forms on pages of their own. One that is refused is shown again as it was filled in, with the reason at its field."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar
from uuid import uuid4

from fastapi import Request, Response
from pydantic import BaseModel, ValidationError

from pgworkd.core.json_text import JsonText
from pgworkd.dashboard import render
from pgworkd.dashboard.app import dashboard_of
from pgworkd.dashboard.once import FIELD
from pgworkd.dashboard.route import Form
from pgworkd.errors import PgworkdError
from pgworkd.gateway.api.request.access import access_of
from pgworkd.gateway.api.request.failures import misfit, problem_of
from pgworkd.gateway.api.request.problems import Problem

M = TypeVar("M", bound=BaseModel)


class FormField(NamedTuple):
    """A field: its value now, and `was`, the value when the form was made: what differs has been changed."""

    name: str
    value: str = ""
    help: str = ""
    hint: str = ""
    """What stands in it while it is empty."""
    choices: Sequence[str] = ()
    is_json: bool = False
    is_fixed: bool = False
    was: str | None = None


class FormPage(NamedTuple):
    """A page with one form, which is sent to `place`; `leads_to`: the page where it came from."""

    title: str
    place: str
    leads_to: str
    button: str
    fields: Sequence[FormField]
    note: str = ""
    once: str = ""
    """The id of this form, if what it makes is made once however often it is sent; see `once`."""

    def filled(self, values: Mapping[str, str]) -> FormPage:
        """This form with other values."""
        return self._replace(fields=[each._replace(value=values.get(each.name, each.value)) for each in self.fields])

    def sent(self, form: Form) -> FormPage:
        """This form as somebody has filled it in."""
        found = [each._replace(value=form.one(each.name), was=form.one(f"was.{each.name}")) for each in self.fields]
        return self._replace(fields=found, once=form.one(FIELD))

    @property
    def given(self) -> dict[str, str]:
        """The fields that are not empty."""
        return {each.name: each.value.strip() for each in self.fields if each.value.strip()}

    @property
    def changed(self) -> dict[str, str]:
        """The fields that differ from what they were, those that are empty now among them."""
        found = [each for each in self.fields if _lines(each.value) != _lines(each.was or "")]
        return {each.name: each.value.strip() for each in found if not each.is_fixed}


async def answered(request: Request, page: FormPage, act: Callable[[], Awaitable[Response]]) -> Response:
    """The answer of `act`; or, where it is refused, the form as it was filled in, with the reason."""
    try:
        return await act()
    except (Problem, PgworkdError) as error:
        problem = problem_of(error, request.scope)
        if problem is None or problem.slug in ("unauthenticated", "forbidden", "not-found"):
            raise
        names = {each.name for each in page.fields}
        faults: dict[str, str] = {}
        others = [] if problem.errors else [str(problem.detail)]
        for each in problem.errors:
            name = each.get("pointer", "").partition("/")[2].partition("/")[0]
            if name in names:
                faults.setdefault(name, each["detail"])
            else:
                others.append(f"{name}: {each['detail']}")
        return render.page(
            request,
            "form.html",
            access=access_of(request),
            signs_in=dashboard_of(request).callers.by_tokens,
            status=problem.status_code,
            form=page._replace(once=str(uuid4())) if page.once and problem.slug == "conflict" else page,
            faults=faults,
            others=others,
        )


def fitted(model: type[M], given: Mapping[str, object]) -> M:
    """The fields of a form as those of a model. Raises Problem, which names each that does not fit."""
    texts = {name: JsonText(value) if name == "payload" else value for name, value in given.items()}
    try:
        return model.model_validate(texts, strict=False)
    except ValidationError as error:
        raise misfit(error) from None


def _lines(text: str) -> str:
    return text.replace("\r\n", "\n").strip()
