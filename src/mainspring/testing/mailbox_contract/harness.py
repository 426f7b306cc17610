"""The harness of the behaviours, their checks, and the report of a run."""

from __future__ import annotations

from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias
from unittest import SkipTest

import anyio

from mainspring.core import clock, random
from mainspring.core.process import async_library
from mainspring.errors import ConfigError
from mainspring.mailbox.mailbox import Capabilities, Mailbox
from mainspring.mailbox.message import Counts, Envelope, Message

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
    from datetime import datetime
    from types import ModuleType


AnyMailbox: TypeAlias = Mailbox[Any, Any]

REAL_LIMIT = 180.0
"""Real seconds after which a behaviour counts as hanging. Some behaviours open dozens of mailboxes."""
STRETCHES = (1, 3, 9)
"""Factors for real times: each further attempt, after one on a busy machine was too late, takes longer times."""
VIRTUAL_LIMIT = 10_000_000.0
SERIALIZES = "serializes"
"""A need that is no capability: the backend writes bodies as JSON."""
SLACK = 0.03
"""Real seconds by which two clocks of one machine may differ."""
LATENESS = 0.07
"""Real seconds that a call may be late on a busy machine."""


class ContractError(AssertionError):
    """The backend breaks the contract."""


class Factory(Protocol):
    """Makes unopened mailboxes of one store: ``factory(name, body=type, reply=type)``."""

    def __call__(self, name: str, /, *, body: Any = None, reply: Any = None) -> AnyMailbox:
        """Return an unopened mailbox. Equal names mean the same queue, if the backend has the capability."""


@dataclass(frozen=True)
class BackendUnderTest:
    """A backend under test.

    :param factory: makes its mailboxes.
    :param name: its name in reports; by default the class of its mailboxes.
    :param short_lease: real seconds of a lease whose end behaviours wait for; in virtual time it is 10 s.
    :param lateness: real seconds within which the store makes a message available whose delay or lease has ended. The
        default fits a store that decides this when it is asked.
    :param corrupt: ``await corrupt(mailbox, raw)`` stores bytes unchanged, as a pending message. The default calls the
        mailbox's own storing hook, past the encoding.
    """

    factory: Factory
    name: str = ""
    short_lease: float = 0.1
    lateness: float = LATENESS
    corrupt: Callable[[AnyMailbox, bytes], Awaitable[object]] | None = None


def as_backend(backend: BackendUnderTest | Factory) -> BackendUnderTest:
    """Return ``backend``, or a backend around a factory."""
    return backend if isinstance(backend, BackendUnderTest) else BackendUnderTest(backend)


class Harness:
    """What a behaviour works with: fresh mailboxes, the passing of time, and checks."""

    wait = 30.0
    """Seconds of a waiting receive that must be woken before its end."""

    def __init__(self, backend: BackendUnderTest, stretch: float = 1.0) -> None:
        self.backend = backend
        self._stretch = stretch
        self._prefix = f"contract-{int(clock.monotonic() * 1e6):x}-{random.token(16)}"
        sample = self.unopened("sample")
        self.capabilities: Capabilities = sample.capabilities
        self.serializes = sample.serializes
        self.name = backend.name or type(sample).__name__
        self.virtual = clock.virtual_clock() is not None
        self.short = (10.0 if self.virtual else backend.short_lease * stretch) + self.capabilities.lease_granularity
        self.slack = (0.0 if self.virtual else SLACK) + self.capabilities.lease_granularity
        self._late = 0.0 if self.virtual else backend.lateness
        self.patience = self.wait if self._late > LATENESS else 0.0
        """Seconds to wait, after :meth:`pass_time`, for a store that acts by itself; 0 if it decides when it is asked."""
        self.late = ""
        """What came too late, if anything did: a check that fails then shows nothing."""

    def can(self, need: str) -> bool:
        """True if the backend declares ``need``."""
        return self.serializes if need == SERIALIZES else getattr(self.capabilities, need) is True

    def named(self, name: str) -> str:
        """Return the full name of a mailbox, unique to this run of the behaviour."""
        return f"{self._prefix}-{name}"

    def unopened(self, name: str = "jobs", *, body: Any = None, reply: Any = None) -> AnyMailbox:
        """Return a mailbox as the factory makes it."""
        made = self.backend.factory(self.named(name), body=body, reply=reply)
        if not isinstance(made, Mailbox):
            raise ConfigError(f"the factory of a backend returns a Mailbox, not {made!r}")
        return made

    @asynccontextmanager
    async def open(self, name: str = "jobs", *, body: Any = None, reply: Any = None) -> AsyncIterator[AnyMailbox]:
        """Open a mailbox for the block."""
        mailbox = self.unopened(name, body=body, reply=reply)
        async with mailbox:
            yield mailbox

    async def corrupt(self, mailbox: AnyMailbox, raw: bytes) -> None:
        """Store ``raw`` unchanged, as a pending message."""
        if self.backend.corrupt is not None:
            await self.backend.corrupt(mailbox, raw)
        else:
            await mailbox.backend.send([Envelope(mailbox.new_id(), raw)])  # past the encoding

    # -------------------------------------------------------------------------------------------------------- receiving

    async def one(
        self,
        mailbox: AnyMailbox,
        *,
        lease: float = 600.0,
        wait: float = 0.0,
        counts: tuple[int, int] | None = None,
    ) -> Message[Any, Any]:
        """Receive the only message that is available, or becomes so within ``wait`` seconds.

        ``counts`` are the delivery_count and the attempt that it must have.
        """
        found = await mailbox.receive(visibility_timeout=lease, wait_time_seconds=wait)
        equal(len(found), 1, "messages received")
        if counts is not None:
            equal((found[0].delivery_count, found[0].attempt), counts, "delivery_count and attempt")
        return found[0]

    async def lapsed(self, mailbox: AnyMailbox) -> Message[Any, Any]:
        """Receive the only message that is available, and let its lease run out."""
        message = await self.one(mailbox, lease=self.short)
        await self.pass_time(self.short)
        return message

    async def delivery(
        self, mailbox: AnyMailbox, body: Any = "x", *, lease: float = 600.0, **options: Any
    ) -> Message[Any, Any]:
        """Send a message and receive it. ``options`` are those of :meth:`Mailbox.send`."""
        await mailbox.send(body, **options)
        return await self.one(mailbox, lease=lease)

    @asynccontextmanager
    async def waiting(
        self, mailbox: AnyMailbox, receivers: int = 1, *, seconds: float = wait
    ) -> AsyncIterator[list[list[Message[Any, Any]]]]:
        """Start receives that wait for ``seconds``, and wait for them at the end of the block. The list has their results."""
        results: list[list[Message[Any, Any]]] = []

        async def receive() -> None:
            results.append(await mailbox.receive(visibility_timeout=600, wait_time_seconds=seconds))

        async with anyio.create_task_group() as group:
            for _ in range(receivers):
                group.start_soon(receive)
            await self.rest()
            yield results

    async def all(self, mailbox: AnyMailbox, *, lease: float = 600.0, due: int = 0) -> list[Message[Any, Any]]:
        """Receive all available messages. A store that acts by itself gets time until ``due`` messages are available."""
        found = await mailbox.receive(max_messages=1_000, visibility_timeout=lease)
        until = anyio.current_time() + self.patience
        while len(found) < due and (left := until - anyio.current_time()) > 0:
            found += await mailbox.receive(max_messages=1_000, visibility_timeout=lease, wait_time_seconds=left)
        return found

    async def none(self, mailbox: AnyMailbox, why: str) -> None:
        """Check that no message is available."""
        found = await self.all(mailbox)
        check(not found, f"{why}: yet {found} came")

    async def counts(self, mailbox: AnyMailbox, **expected: int) -> None:
        """Check that the counts are exactly these (0 if not named), and that approximate_count() agrees."""
        counts = await mailbox.counts()
        equal(counts, Counts(**expected), "counts")
        equal(await mailbox.approximate_count(), counts.waiting, "approximate_count")

    async def due_counts(self, mailbox: AnyMailbox, **expected: int) -> None:
        """Check the counts after time has passed. A store that acts by itself gets time to reach them."""

        async def reached() -> bool:
            return await mailbox.counts() == Counts(**expected)

        await self.when_due(reached)
        await self.counts(mailbox, **expected)

    # ------------------------------------------------------------------------------------------------------------ time

    def ample(self, least: float) -> float:
        """Return the seconds for a lease during which calls are made: ``short``, but in real time at least ``least``."""
        return self.short if self.virtual else max(self.short, least * self._stretch)

    @contextmanager
    def within(self, seconds: float, since: float | None = None) -> Iterator[None]:
        """Mark checks that hold for ``seconds`` from the begin of the block, or from ``since``, such as during a lease.

        In real time a block may take longer. If a check in it or behind it then fails, the behaviour is repeated with
        longer times.
        """
        began = anyio.current_time() if since is None else since
        try:
            yield
        finally:
            took = anyio.current_time() - began
            if not self.virtual and took >= seconds - self.slack:
                self.late = f"what was to be done within {seconds:g} s took {took:g} s"

    async def pass_time(self, seconds: float) -> None:
        """Let ``seconds`` pass, and the time by which the store's clock may differ and the store may be late."""
        await anyio.sleep(seconds + self.slack + self._late)

    @asynccontextmanager
    async def ending(self, seconds: float) -> AsyncIterator[None]:
        """Mark checks that hold for ``seconds``, as :meth:`within` does, and let that time pass after the block."""
        with self.within(seconds):
            yield
        await self.pass_time(seconds)

    async def spend(self, seconds: float) -> None:
        """Let ``seconds`` pass during a longer lease, which must not end."""
        await anyio.sleep(seconds)

    async def rest(self) -> None:
        """Let started tasks run until they wait.

        In real time other behaviours run concurrently, so that there may be no moment at which all tasks wait: sleep instead.
        """
        if self.virtual:
            await anyio.wait_all_tasks_blocked()
        else:
            await anyio.sleep(self.slack + LATENESS)

    async def when_due(self, holds: Callable[[], Awaitable[bool]]) -> bool:
        """True if the condition holds now, or within :attr:`patience`."""
        return await self._comes(holds, self.patience)

    async def until(self, holds: Callable[[], Awaitable[bool]], what: str) -> None:
        """Poll until a condition holds for which a mailbox has no event."""
        check(await self._comes(holds, self.wait), f"it did not happen within {self.wait:g} s that {what}")

    async def _comes(self, holds: Callable[[], Awaitable[bool]], seconds: float) -> bool:
        until = anyio.current_time() + seconds
        while not await holds():
            if anyio.current_time() >= until:
                return False
            await anyio.sleep(self.short / 20)
        return True

    @contextmanager
    def takes(self, seconds: float, what: str) -> Iterator[None]:
        """Check that the block takes ``seconds``: exactly in virtual time; at least, and less than a wait, in real time."""
        began = anyio.current_time()
        yield
        self.check_duration(anyio.current_time() - began, seconds, what)

    def check_duration(self, took: float, seconds: float, what: str) -> None:
        """Raise :class:`ContractError` unless ``took`` is about ``seconds``, by the rules of :meth:`takes`."""
        allowed = self.capabilities.lease_granularity + 1e-6 if self.virtual else self.wait / 2
        least = seconds - self.capabilities.lease_granularity - (1e-6 if self.virtual else SLACK)
        check(least <= took <= seconds + allowed, f"{what} took {took:.6g} s, not {seconds:g} s")

    def check_date(self, actual: datetime, expected: datetime, what: str) -> None:
        """Check that a date is about the expected one."""
        near = abs((actual - expected).total_seconds()) <= (0.01 if self.virtual else 5.0)
        check(near, f"{what} is {actual}, not about {expected}")

    def at_once(self, what: str) -> Any:
        """Check that the block takes no time."""
        return self.takes(0.0, what)


@dataclass(frozen=True)
class Behaviour:
    """One behaviour of every mailbox. Call it with a backend or a factory: ``await behaviour(backend)``."""

    name: str
    claim: str
    needs: frozenset[str]
    check: Callable[[Harness], Awaitable[None]]

    def __repr__(self) -> str:
        return f"<Behaviour {self.name}>"

    async def __call__(self, backend: BackendUnderTest | Factory) -> None:
        """Check the behaviour of a backend.

        Only capabilities excuse a backend: a ``SkipTest`` raised by the backend itself is a :class:`ContractError`.

        :raises ContractError: the behaviour does not hold.
        :raises unittest.SkipTest: a capability is missing.
        """
        harness = Harness(as_backend(backend))
        reason = self.missing(harness)
        if reason is not None:
            raise SkipTest(f"{harness.name}: {reason}")
        try:
            await self._in_time(harness)
        except SkipTest as skip:
            raise ContractError(f"skipped ({skip}), which the capabilities do not declare") from skip

    async def _in_time(self, harness: Harness) -> None:
        late = ""
        for stretch in STRETCHES:
            attempt = Harness(harness.backend, stretch)
            with anyio.fail_after(VIRTUAL_LIMIT if harness.virtual else REAL_LIMIT):
                try:
                    await self.check(attempt)
                    return
                except Exception as error:
                    if not attempt.late:
                        raise
                    late = f"{attempt.late}, and then: {error!r}"
        raise ContractError(f"{late}, with the longest times too")

    def missing(self, harness: Harness) -> str | None:
        """Return the missing capability that excuses the backend, as text, or None if the behaviour applies."""
        library = async_library()
        if library not in harness.capabilities.async_backends:
            return f"does not run on {library}"
        for need in sorted(self.needs):
            if not harness.can(need):
                return f"has not the capability {need!r}" if need != SERIALIZES else "hands objects over as they are"
        return None


_KNOWN_NEEDS = {field.name for field in fields(Capabilities) if field.type == "bool"} | {SERIALIZES}


def behaviour(*needs: str) -> Callable[[Callable[[Harness], Awaitable[None]]], Behaviour]:
    """Make a behaviour of a function: its name, its docstring as the claim, and the capabilities it needs."""
    unknown = set(needs) - _KNOWN_NEEDS
    if unknown:
        raise ConfigError(f"no such capabilities: {', '.join(sorted(unknown))}")

    def make(function: Callable[[Harness], Awaitable[None]]) -> Behaviour:
        return Behaviour(function.__name__, _claim_of(function), frozenset(needs), function)

    return make


def on_mailbox(
    *needs: str, body: Any = None, reply: Any = None, also: str = ""
) -> Callable[[Callable[..., Awaitable[None]]], Behaviour]:
    """Make a behaviour of a function that is given an open mailbox with these types, and one named ``also`` if given."""

    def make(function: Callable[..., Awaitable[None]]) -> Behaviour:
        return from_row(function.__name__, _claim_of(function), function, *needs, body=body, reply=reply, also=also)

    return make


def from_row(
    name: str,
    claim: str,
    function: Callable[..., Awaitable[None]],
    *needs: str,
    body: Any = None,
    reply: Any = None,
    also: str = "",
) -> Behaviour:
    """Make a behaviour of a row of a table. ``function`` is given mailboxes as by :func:`on_mailbox`."""

    async def run(h: Harness) -> None:
        async with AsyncExitStack() as stack:
            boxes = [await stack.enter_async_context(h.open(body=body, reply=reply))]
            if also:
                boxes.append(await stack.enter_async_context(h.open(also)))
            await function(h, *boxes)

    return replace(behaviour(*needs)(run), name=name, claim=claim)


def _claim_of(function: Callable[..., object]) -> str:
    return " ".join((function.__doc__ or "").split())


def behaviours_of(module: ModuleType) -> list[Behaviour]:
    """Return the behaviours that a module defines, singly or in lists."""
    found: list[Behaviour] = []
    for value in vars(module).values():
        if isinstance(value, Behaviour):
            found.append(value)
        elif isinstance(value, list):
            found += [one for one in value if isinstance(one, Behaviour)]
    return found


# -------------------------------------------------------------------------------------------------------------- checks


def check(holds: bool, otherwise: str) -> None:
    """Raise :class:`ContractError` unless ``holds``. (``python -O`` removes ``assert``.)"""
    if not holds:
        raise ContractError(otherwise)


def equal(actual: object, expected: object, what: str) -> None:
    """Raise :class:`ContractError` unless the two are equal."""
    check(actual == expected, f"{what}: {actual!r}, not {expected!r}")


@contextmanager
def raises(kind: type[BaseException], when: str) -> Iterator[list[BaseException]]:
    """Check that the block raises ``kind``. The list then holds the error."""
    caught: list[BaseException] = []
    try:
        yield caught
    except kind as error:
        caught.append(error)
        return
    except Exception as error:
        raise ContractError(f"{when} raised {error!r}, not {kind.__name__}") from error
    raise ContractError(f"{when} did not raise {kind.__name__}")


def ids(messages: list[Message[Any, Any]]) -> list[str]:
    """Return the ids of messages, in order."""
    return [message.id for message in messages]


def texts(messages: list[Message[Any, Any]]) -> list[Any]:
    """Return the bodies of messages, in order."""
    return [message.body for message in messages]


@dataclass
class Report:
    """The result of a run: the names of the behaviours, with errors and reasons. ``str(report)`` is for people."""

    backend: str
    passed: list[str] = field(default_factory=list)
    failed: dict[str, BaseException] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    undeclared: list[str] = field(default_factory=list)
    """The skipped behaviours that missing capabilities do not excuse."""
    lacking: frozenset[str] = frozenset()
    """The missing capabilities that the contract checks: names of ``Capabilities``, and "serializes"."""
    claims: dict[str, str] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """True if no behaviour failed, at least one passed, and only missing capabilities caused skips."""
        return not self.failed and not self.undeclared and bool(self.passed)

    def __str__(self) -> str:
        verdict = "keeps the contract" if self.ok else "does not keep the contract"
        lines = [
            f"{self.backend} {verdict}: {len(self.passed)} passed, {len(self.failed)} failed, {len(self.skipped)} skipped"
        ]
        for name, error in self.failed.items():
            lines.append(f"  failed   {name}: {error!r}\n           {self.claims.get(name, '')}")
        for name, reason in self.skipped.items():
            lines.append(f"  skipped  {name}: {reason}")
        if self.undeclared:
            lines.append(f"  {len(self.undeclared)} skipped that the capabilities do not declare")
        return "\n".join(lines)
