"""Drives a mailbox and the reference model through the same steps, and compares what they say after each."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import anyio
from hypothesis import strategies as st

from mailbox_model import Disagreement, Model, Record
from mainspring.errors import MailboxClosedError, MainspringError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from mainspring.mailbox.mailbox import Mailbox
    from mainspring.mailbox.message import Message

CAPACITY = 12
Step = tuple[str, dict[str, Any]]


def _step(name: str, **values: st.SearchStrategy[Any]) -> st.SearchStrategy[Step]:
    return st.tuples(st.just(name), st.fixed_dictionaries(values))


def _of(*values: Any) -> st.SearchStrategy[Any]:
    return st.sampled_from(values)


_which = st.integers(0, 5)
_rare = (
    _step("discard", first=st.integers(0, 2), count=st.integers(0, 3)),
    _step("cancel", which=_which),
    _step("purge"),
    _step("crash"),
    _step("turn"),
    _step("reopen", fresh=st.booleans()),
)
_replay = _step("replay", first=st.integers(0, 2), count=st.integers(0, 3))
_priority, _key = _of(0, 0, 0, 5, -1), _of(None, "a", "b")


def _settling(*delays: float) -> tuple[st.SearchStrategy[Step], ...]:
    return (
        _step("acknowledge", which=_which),
        _step("nack", which=_which, delay=_of(*delays), charge=st.booleans()),
        _step("release", which=_which),
        _step("checkpoint", which=_which, state=_of(b"1", b'{"at": 2}')),
        _step("dead_letter", which=_which),
    )


def _sending(delays: st.SearchStrategy[float], life: st.SearchStrategy[float | None]) -> st.SearchStrategy[Step]:
    many = _step("send_many", count=st.integers(0, 4), priority=_priority, delay=delays, life=life)
    return _step("send", priority=_priority, key=_key, delay=delays, life=life) | many


_timed_send = _sending(_of(0, 0, 3.25, 10.5), _of(None, None, 4.125, 20.0))
_waits = _of(0, 0, 0, 2 + 1 / 64, 40 + 1 / 64)
_timed_receive = _step("receive", most=st.integers(1, 5), lease=_of(30.0, 7.75, 2.5, 0), wait=_waits)
_times = (_step("sleep", seconds=_of(0.125, 1.0, 5.0, 60.0)), _step("sleep_until_due"))
_extend = _step("extend", which=_which, timeout=_of(0, 3.5, 40.0))
# Where time is real, a delay never ends, and a lease neither.
_plain_send = _sending(_of(0, 0, 10_000.0), st.none())
_plain_receive = _step("receive", most=st.integers(1, 5), lease=st.just(3_600.0), wait=st.just(0))
_plain_extend = _step("extend", which=_which, timeout=_of(0, 4_000.0))


def _sequence(
    send: st.SearchStrategy[Step], receive: st.SearchStrategy[Step], *others: st.SearchStrategy[Step]
) -> st.SearchStrategy[list[Step]]:
    """Chapters, joined: in each something comes, is received, and then all kinds of things happen. They shrink to nothing."""
    some = st.sampled_from([others, others, others, _rare]).flatmap(st.one_of)
    chapter = st.tuples(st.lists(send, max_size=3), st.lists(receive, max_size=2), st.lists(some, max_size=6))
    return st.lists(chapter, max_size=10).map(
        lambda book: [step for chapter in book for part in chapter for step in part]
    )


SEQUENCES = _sequence(_timed_send, _timed_receive, _timed_receive, *_settling(0, 2.5, 6.0), _extend, _replay, *_times)
"""Steps of all kinds, for a run in virtual time."""
SHORT_SEQUENCES = _sequence(
    _plain_send, _plain_receive, _plain_receive, *_settling(0, 10_000.0), _plain_extend, _replay
)
"""Steps of which none depends on time that passes."""
SHORT = 1.0
"""Seconds within which times end in real time that end at all."""
LONGEST_STEP = 0.3
"""Seconds of real time within which a step ends, if anybody is to know what was due before it and what after it."""
_short = 0.9
REAL_SEQUENCES = _sequence(
    _sending(_of(0, 0, _short, 10_000.0), _of(None, None, _short)),
    *[_step("receive", most=st.integers(1, 5), lease=_of(3_600.0, _short), wait=st.just(0))] * 2,
    *_settling(0, _short),
    _plain_extend,
    _replay,
    _step("sleep_until_due"),
)
"""Steps of which some wait for times that are short enough to be waited for really."""


@dataclass
class Handle:
    """A delivery that somebody holds, or once held, and the mailbox object that it came through."""

    message: Message[Any, Any]
    mailbox: Mailbox[Any, Any]


@dataclass(frozen=True)
class Place:
    """What is particular about where a mailbox is kept."""

    capacity: float = CAPACITY
    forgets: bool = False
    """Whether a mailbox object that is opened again does not know its deliveries of before."""
    lateness: float = 0.3
    """Seconds of real time after which it surely has been seen to what was due."""


class Driver:
    """One mailbox (several objects of it, in turn) beside its model. ``make`` gives a new, unopened object of it."""

    def __init__(
        self,
        make: Callable[[], Mailbox[Any, Any]],
        *,
        exact: bool,
        place: Place = Place(),
    ) -> None:
        self.make = make
        self.place = place
        able = make().capabilities
        self.model = Model(place.capacity, exact, able.front_return, able.priority, able.lease_ends_seen)
        self.handles: list[Handle] = []
        self.bodies: dict[str, Any] = {}
        self.sent = 0
        self.open: list[Mailbox[Any, Any]] = []
        self.leave: dict[int, tuple[anyio.Event, anyio.Event]] = {}
        self.mailbox: Mailbox[Any, Any]

    async def run(self, steps: list[Step], *, finish: bool = True) -> None:
        """Do the steps, then everything that is left; raises :class:`Disagreement`."""
        failure: Exception | None = None
        async with anyio.create_task_group() as self.tasks:
            try:
                await self._use(self.make())
                for at, (name, values) in enumerate(steps):
                    try:
                        await self.step(name, values)
                    except Disagreement as error:
                        raise Disagreement(f"step {at}, {name} {values}: {error}") from None
                if finish:
                    await self.finish()
            except (Disagreement, Inconclusive) as error:
                failure = error
            finally:
                for leave, _ in self.leave.values():
                    leave.set()
        if failure is not None:
            raise failure

    async def step(self, name: str, values: dict[str, Any]) -> None:
        """One step, and whether everything is where it should be afterwards."""
        await getattr(self, f"do_{name}")(**values)
        await self.compare()

    async def both(
        self, theirs: Awaitable[Any], ours: Callable[[float], Any], mailbox: Mailbox[Any, Any] | None = None
    ) -> Any:
        """What both say to a call, which must be the same: a value or a kind of error."""
        now = anyio.current_time()
        closed = mailbox is not None and mailbox not in self.open
        expected = _outcome_of(ours, now) if not closed else MailboxClosedError
        try:
            result: Any = await theirs
        except MainspringError as error:
            result = type(error)
        if result != expected:
            raise Disagreement(f"{result!r}, not {expected!r}")
        return result

    async def compare(self) -> None:
        """Whether everything is where the model has it."""
        self.model.advance(anyio.current_time())
        counts, expected = await self.mailbox.counts(), self.model.counts()
        if not self.model.lease_ends_seen:  # then such a lease may still be counted as one
            counts, expected = (
                replace(some, pending=some.pending + some.in_flight, in_flight=0) for some in (counts, expected)
            )
        if counts != expected:
            raise Disagreement(f"{counts}, not {expected}")
        letters = await self.mailbox.dead_letters()
        self.model.see_dead([letter.message_id for letter in letters])
        for letter in letters:
            record = self.model.find(letter.message_id)
            found = letter.body, letter.delivery_count, letter.attempt, letter.error_type
            wanted = record.body, record.deliveries, record.charged, record.why
            if found != wanted:
                raise Disagreement(f"dead letter {found}, not {wanted}")

    async def finish(self) -> None:
        """Wait for all that is left and do it; whatever was accepted is then done or dead."""
        while self.model.alive():
            if not self.model.claimable():
                await self.do_sleep_until_due()
            had = len(self.handles)
            await self.do_receive(most=1_000, lease=60, wait=0)
            for handle in self.handles[had:]:
                await self._settle(handle, handle.message.acknowledge(), self.model.acknowledge)
            await self.compare()
        counts = await self.mailbox.counts()
        if counts.waiting or counts.settled + counts.dead != len(self.model.records):
            raise Disagreement(f"{len(self.model.records)} were accepted, and in the end there are {counts}")

    # ---------------------------------------------------------------------------------------------------- the objects

    async def _use(self, mailbox: Mailbox[Any, Any]) -> None:
        leave, gone = anyio.Event(), anyio.Event()

        async def keep_open(*, task_status: anyio.abc.TaskStatus[None]) -> None:
            async with mailbox:
                task_status.started()
                await leave.wait()
            gone.set()

        await self.tasks.start(keep_open)
        self.leave[id(mailbox)] = leave, gone
        self.open.append(mailbox)
        self.mailbox = mailbox

    async def do_turn(self) -> None:
        """Another object of the same mailbox is used from now on; the first stays open."""
        if len(self.open) < 2:
            await self._use(self.make())
        else:
            self.mailbox = self.open[self.open.index(self.mailbox) - 1]

    async def do_crash(self) -> None:
        """Whoever had received something is gone, and the object in use with it, with nothing closed."""
        self.handles.clear()
        self.open.remove(self.mailbox)
        await self._use(self.make())

    async def do_reopen(self, fresh: bool) -> None:
        mailbox = self.mailbox
        self.open.remove(mailbox)
        leave, gone = self.leave[id(mailbox)]
        leave.set()
        await gone.wait()
        if self.place.forgets:
            self.handles = [handle for handle in self.handles if handle.mailbox is not mailbox]
        try:
            await mailbox.send({"too": "late"})
        except MailboxClosedError:
            pass
        else:
            raise Disagreement("a closed mailbox took a message")
        await self._use(self.make() if fresh else mailbox)

    # ------------------------------------------------------------------------------------------------------ the steps

    def _record(self, identity: str, body: Any, priority: int, key: str | None, life: float | None) -> Record:
        dies_at = math.inf if life is None else anyio.current_time() + life
        return Record(identity, body, priority, key, dies_at)

    def _body(self) -> dict[str, int]:
        self.sent += 1
        return {"n": self.sent}

    async def do_send(self, priority: int, key: str | None, delay: float, life: float | None) -> None:
        await self._send([self._body()], key, priority=priority, delay=delay, expires_in=life)

    async def do_send_many(self, count: int, priority: int, delay: float, life: float | None) -> None:
        await self._send(
            [self._body() for _ in range(count)], priority=priority, delay=delay, expires_in=life, many=True
        )

    async def _send(self, bodies: list[Any], key: str | None = None, *, many: bool = False, **values: Any) -> None:
        """The ids are the mailbox's, so the model is asked afterwards, with the instant before."""
        now, mailbox = anyio.current_time(), self.mailbox
        result: Any
        try:
            result = await (
                mailbox.send_many(bodies, **values) if many else mailbox.send(bodies[0], dedup_key=key, **values)
            )
        except MainspringError as error:
            result = type(error)
        ids = (
            [f"unsent {n}" for n, _ in enumerate(bodies)] if isinstance(result, type) else result if many else [result]
        )
        made = zip(ids, bodies, strict=True)
        records = [self._record(i, body, values["priority"], key, values["expires_in"]) for i, body in made]
        expected = _outcome_of(lambda at: self.model.send(records, at, values["delay"]), now)
        if (result if isinstance(result, type) else ids) != expected:
            raise Disagreement(f"{result!r}, not {expected!r}")

    async def do_receive(self, most: int, lease: float, wait: float) -> None:
        model, now = self.model, anyio.current_time()
        model.advance(now)
        if any(record.due == now + wait for record in model.alive()):
            wait += (
                1 / 128 if wait else 0
            )  # whether what is due at the very end of a wait still counts is a matter of taste
        until = now + wait
        while not model.claimable() and now < until:
            now = min(model.next_due(), until)
            model.advance(now)
        given = {"max_messages": most, "visibility_timeout": lease, "wait_time_seconds": wait}
        messages = await self.mailbox.receive(**given)
        if wait and anyio.current_time() != now:
            raise Disagreement(f"received at {anyio.current_time()}, not {now}")
        claimed = model.claim([(m.id, m.receipt_handle) for m in messages], most, now, lease)
        for message, record in zip(messages, claimed, strict=True):
            found = message.body, message.delivery_count, message.attempt, message.checkpoint
            wanted = record.body, record.deliveries, record.charged + 1, record.checkpoint
            if found != wanted:
                raise Disagreement(f"message {message.id} {found}, not {wanted}")
            self.handles.append(Handle(message, self.mailbox))

    async def _held(self, which: int, call: Callable[[Message[Any, Any]], Awaitable[Any]], ours: Any) -> None:
        """A call on one of the latest deliveries, whose lease may be over; each time as if it were the first."""
        if self.handles:
            handle = self.handles[-1 - which % len(self.handles)]
            await self._settle(handle, call(copy.copy(handle.message)), ours)

    async def _settle(self, handle: Handle, theirs: Awaitable[Any], ours: Callable[[str, float], Any]) -> None:
        await self.both(theirs, lambda now: ours(handle.message.receipt_handle, now), handle.mailbox)

    async def do_acknowledge(self, which: int) -> None:
        await self._held(which, lambda m: m.acknowledge(), self.model.acknowledge)

    async def do_nack(self, which: int, delay: float, charge: bool) -> None:
        def ours(receipt: str, now: float) -> None:
            self.model.give_back(receipt, now, delay, charge=charge)

        await self._held(which, lambda m: m.nack(delay=delay, charge=charge), ours)

    async def do_release(self, which: int) -> None:
        def ours(receipt: str, now: float) -> None:
            self.model.give_back(receipt, now, charge=False, front=True)

        await self._held(which, lambda m: m.release(), ours)

    async def do_extend(self, which: int, timeout: float) -> None:
        def ours(receipt: str, now: float) -> None:
            self.model.extend(receipt, now, timeout)

        await self._held(which, lambda m: m.extend_visibility(timeout), ours)

    async def do_checkpoint(self, which: int, state: bytes) -> None:
        def ours(receipt: str, now: float) -> None:
            self.model.save_checkpoint(receipt, now, state)

        await self._held(which, lambda m: m.save_checkpoint(state), ours)

    async def do_dead_letter(self, which: int) -> None:
        def ours(receipt: str, now: float) -> None:
            self.model.bury(receipt, now, "ValueError")

        await self._held(which, lambda m: m.dead_letter(ValueError("it never works")), ours)

    def _chosen(self, first: int, count: int) -> list[str]:
        return [*self.model.dead[first : first + count], "nobody"]

    async def do_replay(self, first: int, count: int) -> None:
        """``count`` dead letters from the one numbered ``first``; all of them where ``count`` is 0."""
        if count:
            chosen = self._chosen(first, count)
            await self.both(self.mailbox.replay_dead_letters(chosen), lambda now: self.model.replay(chosen, now))
        else:
            everyone = list(self.model.dead)
            await self.both(self.mailbox.replay_dead_letters(), lambda now: self.model.replay(everyone, now))

    async def do_discard(self, first: int, count: int) -> None:
        chosen = self._chosen(first, count)
        await self.both(self.mailbox.purge_dead_letters(chosen), lambda now: self.model.discard(chosen, now))

    async def do_cancel(self, which: int) -> None:
        identity = self.model.records[-1 - which % len(self.model.records)].id if self.model.records else "nobody"
        await self.both(self.mailbox.cancel(identity), lambda now: self.model.cancel(identity, now))

    async def do_purge(self) -> None:
        await self.both(self.mailbox.purge(), self.model.purge)

    async def do_sleep(self, seconds: float) -> None:
        until = anyio.current_time() + seconds
        await anyio.sleep_until(until)
        while self.model.exact and self.model.next_due() <= until:
            self.model.advance(self.model.next_due())  # its reaper was there each time

    async def do_sleep_until_due(self) -> None:
        """To the very instant at which a lease, a delay or a life ends."""
        due = self.model.next_due()
        if due < math.inf:
            await anyio.sleep_until(due)


class Inconclusive(Exception):
    """Something took so long that nobody knows what was due when."""


class RealDriver(Driver):
    """The same in real time, on the server's clock: nothing is done while something is about to be due, or has just been."""

    async def step(self, name: str, values: dict[str, Any]) -> None:
        while self.model.next_due() < anyio.current_time() + LONGEST_STEP:
            await self.do_sleep_until_due()
        due, began = self.model.next_due(), anyio.current_time()
        await super().step(name, values)
        if name != "sleep_until_due" and anyio.current_time() > min(due, began + LONGEST_STEP):
            raise Inconclusive

    async def do_sleep_until_due(self) -> None:
        """Until everything is over that ends soon, and the server has seen to it."""
        while (due := self.model.next_due()) < anyio.current_time() + SHORT:
            await anyio.sleep_until(due + self.place.lateness)
            self.model.advance(anyio.current_time())


def _outcome_of(call: Callable[[float], Any], now: float) -> Any:
    try:
        return call(now)
    except MainspringError as error:
        return type(error)
