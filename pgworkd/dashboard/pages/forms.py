"""What is filled in: settings of a queue, a new job, changes of a job that waits, a schedule."""

from __future__ import annotations

from typing import Annotated, Any
from uuid import uuid4

from fastapi import APIRouter, Query, Request, Response

from pgworkd.admin.admin import Admin
from pgworkd.admin.schedules import NewSchedule
from pgworkd.core.validation import counted
from pgworkd.dashboard.app import dashboard_of
from pgworkd.dashboard.forms import FormField, FormPage, answered, fitted
from pgworkd.dashboard.names import PageName, part
from pgworkd.dashboard.once import made_once
from pgworkd.dashboard.pages.jobs import naming_holders, seen
from pgworkd.dashboard.reads import Questions
from pgworkd.dashboard.render import pretty
from pgworkd.dashboard.route import PageRoute, back, form_of, shown
from pgworkd.errors import UsageError
from pgworkd.gateway.api.models.jobs import Edit, JobIn
from pgworkd.gateway.api.models.operators import QueueSettings, ScheduleIn
from pgworkd.gateway.api.request.access import access_of, need
from pgworkd.gateway.api.request.gateway import gateway_of
from pgworkd.gateway.api.request.problems import Problem
from pgworkd.gateway.api.routes.queues import set_queue
from pgworkd.gateway.api.routes.schedules import stored
from pgworkd.gateway.api.routes.visible import JobId, needed_any, visible
from pgworkd.settings.queue import SETTINGS, EffectiveSetting, columns_of, effective_settings, unset

router = APIRouter(route_class=PageRoute, include_in_schema=False)
SHOWN_CHARS = 10_000
"""Larger payloads are not in forms: each is sent twice, in up to six times as many bytes, with what it was before."""
_MASKED = " Parts of its payload are masked here, so it is not in this form, and stays as it is."
_INSTANT = "2027-01-31T07:00:00Z"
_AS_IT_IS = "A JSON object. While it is empty here, it stays as it is."
_RUN_AT = FormField("run_at", help="The instant from which it may run, with its zone.", hint=_INSTANT)
_DELAY = FormField("delay_s", help="Seconds from now, in place of run_at.")
_PRIORITY = FormField("priority", help="Higher runs first.", hint="0")


@router.get("/queues/{queue}/settings")
async def settings(request: Request, queue: PageName) -> Response:
    """The form for the settings of a queue."""
    need(request, "operate", queue)

    async def read(reads: Questions) -> dict[str, Any]:
        found = await reads.of("settings", lambda admin: admin.queues.settings())
        return {"form": None if found is None else _settings(request, queue, found.get(queue))}

    return await shown(request, "form.html", read)


def _settings(request: Request, queue: str, found: list[EffectiveSetting] | None = None) -> FormPage:
    fields = []
    for each in found or effective_settings({}, []):
        if each.name not in SETTINGS or (each.name == "endpoint" and not access_of(request).allows("admin")):
            continue
        setting = SETTINGS[each.name]
        choices = ("", "yes", "no") if setting.takes is bool else ()
        more = " Seconds, or as 10m, 2h, 7d." if setting.metavar == "DURATION" else ""
        fields.append(FormField(each.name, each.own, setting.help + more, "" if each.own else str(each), choices))
    note = "For all daemons, at once. What is empty is as the code, the daemon's own settings or the default have it."
    place = f"/queues/{part(queue)}"
    return FormPage(f"Settings of {queue}", f"{place}/settings", place, "Save", fields, note)


@router.post("/queues/{queue}/settings")
async def set_settings(request: Request, queue: PageName) -> Response:
    """Changes the settings that the form has changed; what is empty now is unset."""
    need(request, "operate", queue)
    form = await form_of(request)
    page = _settings(request, queue).sent(form)

    async def act() -> Response:
        columns, faults = dict[str, Any](), list[dict[str, str]]()
        for name, text in page.changed.items():
            value = text == "yes" if SETTINGS[name].takes is bool else text
            try:
                columns |= columns_of(name, value, name) if text else unset([name], name)
            except UsageError as error:
                faults.append({"pointer": f"/{name}", "detail": str(error)})
        if faults:
            raise Problem("invalid", errors=faults)
        if columns:
            await set_queue(request, queue, fitted(QueueSettings, columns))
        said = f"{counted(len(page.changed), 'setting')} of {queue} changed"
        return back(request, page.leads_to, said)

    return await answered(request, page, act)


@router.get("/queues/{queue}/enqueue")
async def new_job(request: Request, queue: PageName) -> Response:
    """The form for a new job."""
    need(request, "enqueue", queue)
    return await shown(request, "form.html", _of(_new_job(queue)))


def _new_job(queue: str) -> FormPage:
    fields = (
        FormField("kind", help="What the job is for.", hint="the queue's own handler"),
        FormField("payload", "{}", "A JSON object.", is_json=True),
        _PRIORITY,
        _RUN_AT,
        _DELAY,
    )
    place = f"/queues/{part(queue)}"
    return FormPage(f"New job in {queue}", f"{place}/enqueue", place, "Enqueue", fields, once=str(uuid4()))


@router.post("/queues/{queue}/enqueue")
async def enqueue(request: Request, queue: PageName) -> Response:
    """Inserts a job."""
    access = need(request, "enqueue", queue)
    form = await form_of(request)
    page = _new_job(queue).sent(form)

    async def act() -> Response:
        job = fitted(JobIn, {"payload": "{}", **page.given, "queue": queue})

        async def make(admin: Admin) -> dict[str, Any]:
            return {"id": str((await admin.jobs.enqueue(queue, job.payload, **job.options())).id)}

        made, before = await made_once(request, form, make)
        place = f"/jobs/{made['id']}" if access.allows("read", queue) else page.place
        said = "was enqueued before by this form, which makes one" if before else "is enqueued"
        return back(request, place, f"job {made['id']} {said}")

    return await answered(request, page, act)


@router.get("/jobs/{job_id}/edit")
async def edited_job(request: Request, job_id: JobId) -> Response:
    """The form for a job that waits, with its payload for those who may see that."""
    needed_any(request, "operate")

    async def question(admin: Admin) -> FormPage:
        job = await visible(request, admin, job_id, "operate")
        values = {"priority": str(job.priority), "run_at": "" if job.run_at is None else job.run_at.isoformat()}
        if access_of(request).allows("payload", job.queue):
            values["payload"] = _shown(job.payload)
        return _edited(job_id, has_payload=seen(request, job).payload == job.payload).filled(values)

    async def read(reads: Questions) -> dict[str, Any]:
        return {"form": await reads.of("the job", question)}

    return await shown(request, "form.html", read)


def _edited(job_id: JobId, *, has_payload: bool) -> FormPage:
    fields = (FormField("payload", help=_AS_IT_IS, is_json=True), _PRIORITY, _RUN_AT, _DELAY)[not has_payload :]
    note = "What is changed here is changed if the job still waits." + _MASKED * (not has_payload)
    return FormPage(f"Edit job {job_id}", f"/jobs/{job_id}/edit", f"/jobs/{job_id}", "Save", fields, note)


@router.post("/jobs/{job_id}/edit")
async def edit(request: Request, job_id: JobId) -> Response:
    """Changes what the form has changed; what is empty stays as it is."""
    access = access_of(request)
    needed_any(request, "operate")
    form = await form_of(request)
    page = _edited(job_id, has_payload=bool(form.all("payload"))).sent(form)

    async def act() -> Response:
        wanted = fitted(Edit, {name: text for name, text in page.changed.items() if text})
        given = {name: getattr(wanted, name) for name in ("run_at", "delay_s", "priority")}
        async with naming_holders(request, [job_id]), gateway_of(request).admin(access.name) as admin:
            await visible(request, admin, job_id, "operate")
            changed = await admin.jobs.edit(job_id, wanted.payload, **given)
        return back(request, page.leads_to, f"changed: {', '.join(changed)}" if changed else "nothing differs now")

    return await answered(request, page, act)


@router.post("/jobs/{job_id}/replay")
async def replay(request: Request, job_id: JobId) -> Response:
    """Inserts a new job like one that has ended."""
    needed_any(request, "operate")

    async def make(admin: Admin) -> dict[str, Any]:
        return {"id": str((await admin.jobs.replay(await visible(request, admin, job_id, "operate"))).id)}

    made, before = await made_once(request, await form_of(request), make)
    said = "was made before, when that was replayed; to replay it again, press Replay there anew" if before else ""
    return back(request, f"/jobs/{made['id']}", f"this job {said or f'is like {job_id}, which has ended'}")


@router.get("/schedules/edit")
async def edited_schedule(request: Request, *, name: Annotated[str, Query(max_length=200)] = "") -> Response:
    """The form for a schedule; without a name, for a new one."""
    access = access_of(request)
    needed_any(request, "operate")
    if not name:
        return await shown(request, "form.html", _of(_schedule()))

    async def read(reads: Questions) -> dict[str, Any]:
        found = await reads.of("the schedule", lambda admin: admin.schedules.get(name))
        if reads.failures:
            return {"form": None}
        if found is None or not access.allows("operate", found.queue):
            raise Problem("not-found", f"there is no schedule {name!r}")
        values = {"name": name} | _texts(found)
        values["payload"] = _shown(found.payload_text) if access.allows("payload", found.queue) else ""
        is_whole = dashboard_of(request).masks.text("payload", found.payload_text) == found.payload_text
        return {"form": _schedule(is_new=False, has_payload=is_whole).filled(values)}

    return await shown(request, "form.html", read)


def _schedule(*, is_new: bool = True, has_payload: bool = True) -> FormPage:
    fields = [
        FormField("name", is_fixed=not is_new),
        FormField("queue", is_fixed=not is_new),
        FormField("kind", hint="the queue's own handler"),
        FormField("cron", help="Five fields, or six with seconds first; or every_s.", hint="30 7 * * 1-5"),
        FormField("every_s", help="Seconds between its jobs, counted from 1970 in UTC."),
        FormField("timezone", "UTC", "Of cron: a name as Europe/Berlin."),
        FormField("payload", "{}" if is_new else "", "A JSON object." if is_new else _AS_IT_IS, is_json=True),
        FormField("missed", "skip", "What becomes of those that were due while no worker ran.", choices=_MISSED),
        FormField("missed_grace_s", help="With skip: how late one may still run, in seconds.", hint="60"),
        FormField("wait_for_retries", "no", "Whether the next one waits while one is retried.", choices=("no", "yes")),
        _PRIORITY,
        FormField("max_attempts", hint="as the handler or the queue has it"),
        FormField("timeout_s", help="Seconds per attempt.", hint="as the handler or the queue has it"),
        FormField("enabled", "yes", choices=("yes", "no")),
    ]
    if not has_payload:
        fields = [each for each in fields if each.name != "payload"]
    title, note = "New schedule" if is_new else "Edit schedule", "" if has_payload else _MASKED.strip()
    return FormPage(title, "/schedules/edit", "/schedules", "Save", fields, note, once=str(uuid4()) if is_new else "")


_MISSED = ("skip", "once", "all")


@router.post("/schedules/edit")
async def put(request: Request) -> Response:
    """Makes a schedule, or changes what the form has changed of one."""
    access = access_of(request)
    needed_any(request, "operate")
    form = await form_of(request)
    name, is_new = form.one("name"), not form.one("was.name")
    page = _schedule(is_new=is_new, has_payload=is_new or bool(form.all("payload"))).sent(form)

    async def make(admin: Admin) -> dict[str, Any]:
        found = await admin.schedules.get(name)
        if is_new and found is not None and access.allows("operate", found.queue):
            said = "there is a schedule of this name: edit that one, or take another name"
            raise Problem("conflict", errors=[{"pointer": "/name", "detail": said}])
        if not is_new and (found is None or not access.allows("operate", found.queue)):
            raise Problem("not-found", f"there is no schedule {name!r}")
        wanted = page.given if found is None or is_new else _texts(found) | page.changed
        if not is_new and not wanted["payload"]:
            wanted["payload"] = found.payload_text if found else "{}"
        given = {key: text for key, text in wanted.items() if text and key != "name"}
        await stored(request, admin, name, fitted(ScheduleIn, given))
        return {}

    async def act() -> Response:
        _, before = await made_once(request, form, make)
        said = "was saved before by this form" if before else "is saved"
        return back(request, page.leads_to, f"schedule {name} {said}")

    return await answered(request, page, act)


def _texts(schedule: NewSchedule) -> dict[str, str]:
    """A schedule as the fields of its form."""
    rule = schedule.rule
    found = {
        "queue": schedule.queue,
        "kind": schedule.kind,
        "payload": schedule.payload_text,
        **{each: getattr(rule, each) for each in ("cron", "every_s", "timezone", "missed", "missed_grace_s")},
        "wait_for_retries": schedule.wait_for_retries,
        **{each: getattr(schedule, each) for each in ("priority", "max_attempts", "timeout_s", "enabled")},
    }
    words: dict[object, str] = {None: "", True: "yes", False: "no"}
    return {
        key: words[value] if value is None or isinstance(value, bool) else str(value) for key, value in found.items()
    }


def _shown(payload: str) -> str:
    """A payload as a form has it; "" for a large one, which no form could send back: it stays as it is."""
    return pretty(payload) if len(payload) <= SHOWN_CHARS else ""


def _of(page: FormPage) -> Any:
    async def read(_: Questions) -> dict[str, Any]:
        return {"form": page}

    return read
