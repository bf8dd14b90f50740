"""The remote workers that this process knows: their keys, their slots, and what they hold.

The database is the truth. What is kept here saves asking it for each request, and may be missing what was done through
another gateway; `Watch` compares the two every few seconds.
"""

from __future__ import annotations

import contextlib
import hmac
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from uuid import UUID

import anyio

from pgworkd.core.assignment import is_sealed, parsed
from pgworkd.core.fence import Fence
from pgworkd.core.registration import Registration
from pgworkd.database.endpoint_store import PUSH_WORKER
from pgworkd.database.remote_store import ASSIGNMENTS, News, RemoteStore, RunningAttempt
from pgworkd.database.remote_store import StoredWorker as Stored
from pgworkd.engine.attempts import Attempt
from pgworkd.errors import LeaseLost, UsageError, WorkerLost

FORGET_LEASES = 3
"""A worker that was not heard of here for this many leases is forgotten; it is looked up again when it calls."""
GIVEN_MAX = 10_000
"""Assignments that are remembered until they come back."""
NO_PUSH_S = 5.0
"""Where nothing was ever pushed, the database is asked this often at most whether something was."""
RECOUNT_S = 0.1
"""A worker that claims while its slots seem to be taken is looked up in the database this often at most."""


class RemoteWorker:
    """One worker, as this process sees it. Times are on the loop's clock."""

    def __init__(self, stored: Stored) -> None:
        self.id = stored.registration
        self.name = stored.name
        self.lease_s = stored.lease_s
        self.slots = stored.slots
        self.requested = stored.requested
        """What an operator asks of it: quiet, stop, or None."""
        self.is_stopping = False
        """The worker is about to end, as it says: no job is given to it."""
        self.held: dict[UUID, Attempt] = {}
        """Attempts claimed here that it has not settled."""
        self.elsewhere: dict[UUID, tuple[int, str]] = {}
        """Attempts that it runs, and claimed through other gateways, each with its queue."""
        self.reserved: Counter[str] = Counter()
        """By queue: slots for which a claim is under way."""
        self.cancels: dict[UUID, int] = {}
        """Attempts that are to be cancelled, by job."""
        self.listed: frozenset[tuple[UUID, int]] = frozenset()
        """All that it holds, by its last list."""
        self.claim_id = 0
        """The last of its claims whose answer it had read or given up when it sent that list, as all before it."""
        self.begun: set[tuple[UUID, int]] = set()
        """The attempts it holds that the database knows to have begun."""
        self.heard_at = anyio.current_time()
        self.recounted_at = -RECOUNT_S
        self.is_lost = False
        self._told: object = (None, frozenset())
        self.on_news: set[Callable[[], None]] = set()
        """Called when there is something new to tell it."""

    def free(self, queue: str, most: int = 0) -> int:
        """How many more jobs of the queue it may be given; `most`: the queue's concurrency, if that is set."""
        slots = self.slots.get(queue, 0)
        slots = min(slots, most) if most else slots
        held = sum(attempt.queue == queue for attempt in self.held.values())
        held += sum(each == queue for _, each in self.elsewhere.values())
        return max(0, slots - held - self.reserved[queue])

    @property
    def may_claim(self) -> bool:
        """False if it is about to end, as it says, or an operator asks it to claim nothing."""
        return self.requested is None and not self.is_stopping

    @property
    def is_full(self) -> bool:
        """True if it waits for jobs of a queue of which it has no slot, as far as is known here."""
        return bool(self.on_news) and not all(self.free(queue) for queue in self.slots)

    @property
    def has_news(self) -> bool:
        """True if it has not been told what it is to do."""
        return self._news() != self._told

    def tell(self) -> tuple[str, dict[UUID, int]]:
        """What it is to do (run, quiet, stop), and which attempts are to be cancelled; counts as told."""
        self._told = self._news()
        return self.requested or "run", dict(self.cancels)

    def list_held(self, held: frozenset[tuple[UUID, int]], claim_id: int) -> None:
        """Notes what it says that it holds, all of it. A list that comes late does no harm: it has its own number."""
        self.claim_id, self.listed = claim_id, held

    def not_listed(self, rows: Iterable[RunningAttempt]) -> list[Fence]:
        """Returns the attempts among these that the worker would have listed if it held them."""
        return [
            Fence(row.job_id, row.attempt, self.id, self.id.token)
            for row in rows
            if row.claim_id is not None
            and row.claim_id <= self.claim_id
            and (row.job_id, row.attempt) not in self.listed
        ]

    def learn(self, requested: str | None, cancels: Mapping[UUID, int]) -> None:
        """Stores what it is to do."""
        self.requested, self.cancels = requested, dict(cancels)
        if self.has_news:
            self.tell_waiters()

    def says(self, state: str) -> None:
        """What it says of itself: running or stopping."""
        was, self.is_stopping = self.is_stopping, state == "stopping"
        if self.is_stopping and not was:
            self.tell_waiters()

    def lose(self) -> None:
        """Notes that the worker is presumed dead, or has signed off."""
        self.is_lost = True
        self.tell_waiters()

    def tell_waiters(self) -> None:
        """Answers its claims that wait."""
        for call in list(self.on_news):
            call()

    def _news(self) -> object:
        return self.requested, frozenset(self.cancels.items())


class RemoteWorkers:
    """All remote workers that this gateway knows, by id."""

    def __init__(self, store: RemoteStore) -> None:
        self._store = store
        self._known: OrderedDict[int, RemoteWorker] = OrderedDict()
        self._standing: dict[str, Registration] = {}
        self._no_push_until = 0.0
        self._given: OrderedDict[str, Fence] = OrderedDict()

    def slots_in_use(self) -> list[tuple[str, int, int]]:
        """By queue: what the workers known here have been given here and hold, and their slots. From any thread."""
        used, slots = Counter[str](), Counter[str]()
        for worker in list(self._known.values()):
            slots.update(worker.slots)
            used.update(attempt.queue for attempt in list(worker.held.values()))
        return [(queue, used[queue], slots[queue]) for queue in slots | used]

    def __iter__(self) -> Iterator[RemoteWorker]:
        return iter(list(self._known.values()))

    async def register(self, name: str, version: str, lease_s: float, slots: dict[str, int]) -> RemoteWorker:
        """Registers a worker. Raises PgworkdError."""
        registration = await self._store.register(name, version, lease_s)
        await self._store.set_slots(registration, slots)
        worker = self._known[registration] = RemoteWorker(Stored(registration, name, lease_s, None, slots))
        return worker

    async def serve(self, worker: RemoteWorker, slots: dict[str, int]) -> None:
        """The worker serves these queues from now on, with this many slots each. Raises PgworkdError."""
        gone = [queue for queue in worker.slots if queue not in slots]
        await self._store.set_slots(worker.id, slots, gone)
        worker.slots = slots
        worker.tell_waiters()

    async def refresh(self, worker: RemoteWorker) -> None:
        """Reads its slots again: they may have been changed through another gateway. Raises PgworkdError."""
        if (stored := await self._store.worker(worker.id)) is not None and stored.slots:
            worker.slots = stored.slots

    def find(self, worker_id: int) -> RemoteWorker | None:
        """The worker, if it is known here."""
        return self._known.get(worker_id)

    async def authenticated(self, worker_id: int, secret: str) -> RemoteWorker:
        """The worker that has this secret. Raises WorkerLost: there is none, or it is presumed dead."""
        worker = await self._get(worker_id)
        if worker is None or worker.is_lost or not hmac.compare_digest(worker.id.token.hex.encode(), secret.encode()):
            raise WorkerLost(f"worker {worker_id} is presumed dead, or has signed off, or its secret is another one")
        if not worker.slots:  # the server has crashed: see `pools`
            raise WorkerLost(f"the slots of worker {worker_id} were lost when the database restarted")
        worker.heard_at = anyio.current_time()
        return worker

    async def _get(self, worker_id: int) -> RemoteWorker | None:
        worker = self._known.get(worker_id)
        if worker is None and (stored := await self._store.worker(worker_id)) is not None:
            asked_at = anyio.current_time()
            rows = await self._store.attempts_of([worker_id])  # it may run what it claimed through other gateways
            worker = self._known.setdefault(worker_id, RemoteWorker(stored))
            self.compare(worker, rows, asked_at)
        return worker

    async def standing(self) -> Registration:
        """The worker under which attempts with a lease of their own run."""
        if ASSIGNMENTS not in self._standing:
            self._standing[ASSIGNMENTS] = await self._store.standing_worker()
        return self._standing[ASSIGNMENTS]

    async def _pushed(self) -> Registration | None:
        """The worker under which attempts run that were pushed; None: none ever was."""
        if PUSH_WORKER not in self._standing and anyio.current_time() >= self._no_push_until:
            if (found := await self._store.find_standing(PUSH_WORKER)) is not None:
                self._standing[PUSH_WORKER] = found
            else:  # whoever has no token could ask again and again
                self._no_push_until = anyio.current_time() + NO_PUSH_S
        return self._standing.get(PUSH_WORKER)

    def forget_standing(self) -> None:
        """The database may be another one (a restored dump)."""
        self._standing.clear()

    async def is_pushed(self, text: str) -> bool:
        """True for the assignment of a job that was pushed: whoever has it was sent it, and may end the attempt."""
        with contextlib.suppress(UsageError):
            found, pushed = parsed(text), await self._pushed()
            if pushed is not None and found.worker_id == pushed:
                return is_sealed(text, found._replace(token=pushed.token))
        return False

    def remember(self, text: str, held: Fence) -> None:
        """This assignment is about to be given to a worker: it need not be read and checked when it comes back."""
        self._given[text] = held
        if len(self._given) > GIVEN_MAX:
            self._given.popitem(last=False)

    async def held(self, text: str) -> Fence:
        """The attempt that an assignment names. Raises UsageError: it is none; LeaseLost: it is nobody's here."""
        if (given := self._given.pop(text, None)) is not None:
            return given
        found = parsed(text)
        if found.worker_id == (standing := await self.standing()):
            key: UUID | None = standing.token
        elif (worker := self._known.get(found.worker_id)) is not None:
            key = worker.id.token
        elif (pushed := await self._pushed()) is not None and found.worker_id == pushed:
            key = pushed.token
        else:
            worker = await self._get(found.worker_id)
            key = None if worker is None else worker.id.token
        if key is None:  # nor can it be said that this is one of its assignments
            raise LeaseLost(f"worker {found.worker_id} is presumed dead, or has signed off")
        fence = found._replace(token=key)
        if not is_sealed(text, fence):
            raise LeaseLost("this assignment was not made for a worker that is registered now")
        return fence

    async def listed(self, worker: RemoteWorker, texts: Iterable[str]) -> dict[str, Fence]:
        """The attempts that a worker says it holds, by the text that it sent; what cannot be its own is left out."""
        found, owners = {}, (worker.id, await self.standing())
        for text in texts:
            with contextlib.suppress(UsageError, LeaseLost):
                held = await self.held(text)
                if held.worker_id in owners:
                    found[text] = held
        return found

    def attempt(self, held: Fence) -> Attempt | None:
        """What was claimed here as that attempt."""
        worker = self._known.get(held.worker_id)
        found = None if worker is None else worker.held.get(held.job_id)
        return found if found is not None and found.claimed.attempt == held.attempt else None

    def ended(self, held: Fence) -> Attempt | None:
        """The attempt has been settled: its slot is free. Returns what was claimed here as that attempt."""
        attempt, worker = self.attempt(held), self._known.get(held.worker_id)
        if worker is not None and attempt is not None:
            del worker.held[held.job_id]
        if worker is not None and worker.elsewhere.get(held.job_id, (0, ""))[0] == held.attempt:
            del worker.elsewhere[held.job_id]
        if worker is not None and worker.cancels.get(held.job_id) == held.attempt:
            del worker.cancels[held.job_id]
        return attempt

    async def recount(self, worker: RemoteWorker) -> None:
        """Counts what it runs in the database, if its slots seem to be taken. Raises PgworkdError."""
        if (now := anyio.current_time()) - worker.recounted_at >= RECOUNT_S:
            worker.recounted_at = now
            await self.refresh(worker)
            self.compare(worker, await self._store.attempts_of([worker.id]), now)

    def compare(self, worker: RemoteWorker, rows: list[RunningAttempt], asked_at: float) -> None:
        """Takes over what the database says that the worker runs."""
        running = {(row.job_id, row.attempt) for row in rows}
        for job_id, attempt in list(worker.held.items()):
            if (job_id, attempt.claimed.attempt) not in running and (attempt.started or 0.0) < asked_at:
                del worker.held[job_id]
        worker.elsewhere = {row.job_id: (row.attempt, row.queue) for row in rows if row.job_id not in worker.held}

    def apply(self, news: News, asked: Mapping[int, str | None]) -> None:
        """Takes over what concerns these workers; `asked`: what operators ask of each."""
        cancels: dict[int, dict[UUID, int]] = {worker_id: {} for worker_id in asked}
        for worker_id, job_id, attempt in news.cancels:
            cancels.setdefault(worker_id, {})[job_id] = attempt
        for worker_id, requested in asked.items():
            if (worker := self._known.get(worker_id)) is not None:
                worker.learn(requested, cancels[worker_id])

    def lose(self, worker_id: int) -> None:
        """A worker is presumed dead, or has signed off: it is not known any more."""
        if (worker := self._known.pop(worker_id, None)) is not None:
            worker.lose()

    def forget_silent(self) -> None:
        """Forgets workers that have not been heard of here for long: they may call another gateway."""
        now = anyio.current_time()
        for worker_id, worker in list(self._known.items()):
            if now - worker.heard_at > FORGET_LEASES * worker.lease_s and not worker.on_news:
                del self._known[worker_id]
