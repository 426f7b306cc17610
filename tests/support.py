"""What several test modules share: a mailbox whose store misbehaves on demand, and small ways of watching a loop."""

from __future__ import annotations

import json
from collections import defaultdict, deque
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import anyio
import trio.testing

from mainspring.mailbox.memory.mailbox import InMemoryMailbox, MemoryBackend
from wrapped_backend import WrappedBackend, wrap

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from mainspring import MailboxConnectionError
    from mainspring.worker.main_loop import MainLoop

    Hook = Callable[[], Awaitable[Any]]
    Action = Callable[[Hook], Awaitable[Any]]


def fail(error: BaseException) -> Action:
    """The store refuses: ``error``, and no effect."""

    async def act(hook: Hook) -> Any:
        raise error

    return act


def lose_answer(error: BaseException) -> Action:
    """The store does it, but its answer is lost: ``error``."""

    async def act(hook: Hook) -> Any:
        await hook()
        raise error

    return act


def slow(seconds: float) -> Action:
    """The store takes ``seconds`` before it does it."""

    async def act(hook: Hook) -> Any:
        await anyio.sleep(seconds)
        return await hook()

    return act


def shielded(action: Action) -> Action:
    """Once it has begun, a cancellation does not reach it, as a claim that a server is answering."""

    async def act(hook: Hook) -> Any:
        with anyio.CancelScope(shield=True):
            return await action(hook)

    return act


def until(instant: float, action: Action) -> Action:
    """It does this before that instant, and what it should from then on."""

    async def act(hook: Hook) -> Any:
        return await (action if anyio.current_time() < instant else work)(hook)

    return act


async def hang(hook: Hook) -> Any:
    """The store never answers, and does nothing."""
    await anyio.sleep_forever()


async def work(hook: Hook) -> Any:
    """The store does as it should."""
    return await hook()


class FaultyMailbox(InMemoryMailbox[Any, Any]):
    """A memory mailbox of whose calls chosen ones fail, hang, or are slow.

    The calls are ``"claim"``, ``"settle"``, ``"extend"``, ``"save_checkpoint"``, ``"counts"``, ``"find_dead"`` (by a view of
    its dead letters), ``"write_record"`` and, where ``joins``, ``"join"``: such a mailbox takes acknowledgements that are made
    together in one call, any other takes them one by one.

    ``calls`` records them, except ``"counts"``, ``"find_dead"`` and ``"write_record"``, as (instant, call, argument);
    ``most_leased`` is how many messages were ever in flight; ``joined`` has the bodies of each joint acknowledgement.
    """

    def __init__(self, name: str | None = None, *, joins: bool = False, **options: Any) -> None:
        super().__init__(name, **options)
        self.calls: list[tuple[float, str, Any]] = []
        self.joined: list[list[Any]] = []
        self.most_leased = 0
        self._next: defaultdict[str, deque[Action]] = defaultdict(deque)
        self._always: dict[str, Action] = {}
        wrap(self, partial(_JoiningBackend if joins else _FaultyBackend, mailbox=self))

    @classmethod
    def named(cls, name: str) -> Self:
        """One object of many on the queue of that name, as ``open_mailbox("memory://name")`` gives them."""
        mailbox = cls(name)
        mailbox.backend.inner = MemoryBackend(name, capacity=None, key=name)
        return mailbox

    def next(self, call: str, *actions: Action) -> None:
        """The next calls of that kind do this, one after the other; the ones after them as usual."""
        self._next[call].extend(actions)

    def always(self, call: str, action: Action) -> None:
        """From now on all calls of that kind do this (``work`` ends it)."""
        self._always[call] = action

    def fall_silent(self, error: MailboxConnectionError) -> None:
        """Find out, as a backend does, that the server does not answer."""
        self.backend.notifications.silence.publish(error)

    def times(self, call: str) -> list[float]:
        """When calls of that kind were made."""
        return [at for at, name, _ in self.calls if name == call]

    def settlements(self) -> list[str]:
        """What was written, by kind, tries included."""
        return [type(argument).__name__ for _, name, argument in self.calls if name == "settle"]

    async def through(self, call: str, argument: Any, hook: Hook) -> Any:
        """Make a call: record it, and do what the test has said."""
        self.calls.append((anyio.current_time(), call, argument))
        return await self.act(call, hook)

    async def act(self, call: str, hook: Hook) -> Any:
        """Do what the test has said of such a call."""
        queued = self._next[call]
        action = queued.popleft() if queued else self._always.get(call, work)
        return await action(hook)


class _FaultyBackend(WrappedBackend):
    def __init__(self, inner: Any, mailbox: FaultyMailbox) -> None:
        super().__init__(inner)
        self.mailbox = mailbox

    async def claim(self, max_messages: int, visibility_timeout: float, wait_time_seconds: float) -> Any:
        claim = partial(self.inner.claim, max_messages, visibility_timeout, wait_time_seconds)
        claimed = await self.mailbox.through("claim", (max_messages, wait_time_seconds), claim)
        self.mailbox.most_leased = max(self.mailbox.most_leased, (await self.inner.counts()).in_flight)
        return claimed

    async def settle(self, delivery: Any, settlement: Any) -> None:
        await self.mailbox.through("settle", settlement, partial(self.inner.settle, delivery, settlement))

    async def extend(self, delivery: Any, timeout: float) -> None:
        await self.mailbox.through("extend", timeout, partial(self.inner.extend, delivery, timeout))

    async def checkpoint(self, delivery: Any, state: bytes) -> None:
        await self.mailbox.through("save_checkpoint", state, partial(self.inner.checkpoint, delivery, state))

    async def counts(self) -> Any:
        return await self.mailbox.act("counts", self.inner.counts)

    async def write_record(self, write: Any, envelopes: Any = ()) -> Any:
        return await self.mailbox.act("write_record", partial(self.inner.write_record, write, envelopes))

    async def find_dead_letters(self, message_ids: list[str]) -> Any:
        return await self.mailbox.act("find_dead", partial(self.inner.find_dead_letters, message_ids))


class _JoiningBackend(_FaultyBackend):
    async def acknowledge_many(self, deliveries: list[Any]) -> dict[int, Exception]:
        self.mailbox.joined.append([json.loads(delivery.body) for delivery in deliveries])
        each = WrappedBackend(self.inner).acknowledge_many
        return await self.mailbox.through("join", len(deliveries), partial(each, deliveries))


def virtually(fn: Callable[[trio.testing.MockClock], Awaitable[None]]) -> Callable[[], None]:
    """Run the test in virtual time; it gets the clock, which starts at 0."""

    def test() -> None:
        clock = trio.testing.MockClock(autojump_threshold=0)
        anyio.run(fn, clock, backend="trio", backend_options={"clock": clock})

    test.__name__ = fn.__name__
    return test


def record(loop: MainLoop, *kinds: type[Any]) -> list[Any]:
    """A list that fills with the loop's events of these kinds (none given: of all)."""
    events: list[Any] = []
    for kind in kinds or (object,):
        loop.dispatcher.subscribe(kind, events.append)
    return events


@asynccontextmanager
async def background(loop: MainLoop, **keywords: Any):
    """``loop.run(**keywords)`` in a task; leaving the block shuts down."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(partial(loop.run, **keywords))
        try:
            yield loop
        finally:
            with anyio.CancelScope(shield=True, deadline=anyio.current_time() + 60):
                await loop.shutdown(timeout=30)


async def settled(mailbox: InMemoryMailbox[Any, Any], *, within: float = 10.0) -> None:
    """Wait until nothing is delayed, pending or in flight in ``mailbox``, and a thousandth of ``within`` longer at most.

    The looks become rarer: in virtual time, where nobody waits, they are all that it costs.
    """
    pause = 0.001
    with anyio.fail_after(within):
        while await mailbox.approximate_count():
            await anyio.sleep(pause)
            pause = min(1.05 * pause, max(0.001, within / 1_000))


async def outcomes(*calls: Callable[[], Awaitable[Any]]) -> list[Any]:
    """What each of these calls comes to, made at once: so that they leave together, in this order on asyncio."""
    found: list[Any] = [None] * len(calls)

    async def one(number: int, call: Callable[[], Awaitable[Any]]) -> None:
        try:
            found[number] = await call()
        except Exception as error:
            found[number] = error

    async with anyio.create_task_group() as tasks:
        for number, call in enumerate(calls):
            tasks.start_soon(one, number, call)
    return found
