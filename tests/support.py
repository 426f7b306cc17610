"""What several test modules share: a mailbox whose store misbehaves on demand, and small ways of watching a loop."""

from __future__ import annotations

from collections import defaultdict, deque
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
import trio.testing

from mainspring.mailbox.memory.mailbox import InMemoryMailbox

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

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


async def hang(hook: Hook) -> Any:
    """The store never answers, and does nothing."""
    await anyio.sleep_forever()


async def work(hook: Hook) -> Any:
    """The store does as it should."""
    return await hook()


class FaultyMailbox(InMemoryMailbox[Any, Any]):
    """A memory mailbox of whose calls chosen ones fail, hang, or are slow.

    The calls are ``"claim"``, ``"settle"``, ``"extend"``, ``"save_checkpoint"`` and ``"put"`` (send and send_many).
    ``calls`` records all of them as (instant, call, argument); ``most_leased`` is how many messages were ever in flight.
    """

    def __init__(self, name: str | None = None, **options: Any) -> None:
        super().__init__(name, **options)
        self.calls: list[tuple[float, str, Any]] = []
        self._next: defaultdict[str, deque[Action]] = defaultdict(deque)
        self._always: dict[str, Action] = {}
        self.most_leased = 0

    def next(self, call: str, *actions: Action) -> None:
        """The next calls of that kind do this, one after the other; the ones after them as usual."""
        self._next[call].extend(actions)

    def always(self, call: str, action: Action) -> None:
        """From now on all calls of that kind do this (``work`` ends it)."""
        self._always[call] = action

    def times(self, call: str) -> list[float]:
        """When calls of that kind were made."""
        return [at for at, name, _ in self.calls if name == call]

    def settlements(self) -> list[str]:
        """What was written, by kind, tries included."""
        return [type(argument).__name__ for _, name, argument in self.calls if name == "settle"]

    async def _through(self, call: str, argument: Any, hook: Hook) -> Any:
        self.calls.append((anyio.current_time(), call, argument))
        queued = self._next[call]
        action = queued.popleft() if queued else self._always.get(call, work)
        return await action(hook)

    async def send(self, body: Any, **options: Any) -> str:
        return await self._through("put", body, partial(super().send, body, **options))

    async def send_many(self, bodies: Any, **options: Any) -> list[str]:
        return await self._through("put", bodies, partial(super().send_many, bodies, **options))

    async def _claim(self, max_messages: int, visibility_timeout: float, wait_time_seconds: float) -> Any:
        hook = partial(super()._claim, max_messages, visibility_timeout, wait_time_seconds)
        claimed = await self._through("claim", (max_messages, wait_time_seconds), hook)
        self.most_leased = max(self.most_leased, (await self._counts()).in_flight)
        return claimed

    async def _settle(self, delivery: Any, settlement: Any) -> None:
        await self._through("settle", settlement, partial(super()._settle, delivery, settlement))

    async def _extend(self, delivery: Any, timeout: float) -> None:
        await self._through("extend", timeout, partial(super()._extend, delivery, timeout))

    async def _save_checkpoint(self, delivery: Any, state: bytes) -> None:
        await self._through("save_checkpoint", state, partial(super()._save_checkpoint, delivery, state))


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
