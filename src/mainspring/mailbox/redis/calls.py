"""A batch of operations becomes one call of the library, and its results find their way back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, TypeVar

from mainspring.errors import MailboxConnectionError
from mainspring.mailbox.redis.claims import Claim, claim_alike
from mainspring.mailbox.redis.commands import Acknowledge, Operation, Put, acknowledge, put_alike

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence

    from mainspring.mailbox.redis.commands import Argument

_KEYS: Final = (
    "messages",
    "ready",
    "delayed",
    "leases",
    "state",
    "more",
    "keyed",
    "expiry",
    "dead",
    "deaths",
    "epitaph",
    "waiters",
)
MOST_ARGUMENTS: Final = 50_000
"""Of one call, unless a single operation has more: the server serves nobody else meanwhile."""

O = TypeVar("O", bound=Operation)  # noqa: E741


def base_of(name: str) -> bytes:
    """What the keys and channels of a mailbox begin with: all in one slot of a cluster."""
    return b"{ms:%b}:" % name.encode("utf-8", "surrogatepass")


def keys_of(name: str) -> tuple[bytes, ...]:
    """The keys of a mailbox, in the order in which the library knows them."""
    base = base_of(name)
    return tuple(base + key.encode() for key in _KEYS)


class Call:
    """One call of the library, being put together for the mailbox ``name``."""

    def __init__(self, name: str, keys: tuple[bytes, ...]) -> None:
        self.keys: list[bytes] = list(keys)
        self.arguments: list[Argument] = []
        self.commands: list[Operation] = []
        self.failed: list[Operation] = []
        """Those of the commands that failed on the server."""
        self._takers: list[tuple[Callable[[Any], None], Sequence[Operation]]] = []
        self._numbers = {name: 0}

    @property
    def full(self) -> bool:
        """Whether it should leave before more is added."""
        return len(self.arguments) >= MOST_ARGUMENTS

    def number(self, name: str) -> int:
        """The number of another mailbox of the call."""
        if name not in self._numbers:
            self._numbers[name] = len(self._numbers)
            self.keys += keys_of(name)
        return self._numbers[name]

    def add(self, taker: Callable[[Any], None], commands: Sequence[Operation]) -> None:
        """What takes the result of the operation that was just written, which is that of these commands."""
        self._takers.append((taker, commands))
        self.commands += commands

    def take(self, results: list[Any]) -> tuple[int, int, int]:
        """Give the results out. Return in how many microseconds the next thing is due (-1: not known), the server's time, and
        how many index entries without a record were dropped.

        An operation that failed on the server is the error of its own commands, and nothing to the others.
        """
        due, now, dropped, *failures = results[-1]
        errors: dict[int, bytes] = dict(zip(failures[::2], failures[1::2], strict=True)) if failures else {}
        for number, (taker, commands) in enumerate(self._takers):
            if number in errors:
                self._fail(commands, errors[number])
            else:
                taker(results[number])
        for command in self.commands:
            command.done = True
        return due, now, dropped

    def _fail(self, commands: Sequence[Operation], error: bytes) -> None:
        for command in commands:
            command.error = MailboxConnectionError(f"the Redis server says: {error.decode('utf-8', 'replace')}")
        self.failed += commands


def calls(
    name: str, keys: tuple[bytes, ...], commands: list[Operation], leased_at: float, waiter: Callable[[int], str]
) -> Iterator[Call]:
    """The calls that do ``commands``: what is alike together, in the order of their turns, as a rule all in one call.

    The callers of one batch do not know of each other, so any order is right; this one serves all best.
    """
    call = Call(name, keys)
    if len(commands) == 1 and type(commands[0]) not in {
        Acknowledge,
        Claim,
    }:  # what comes one by one costs its caller least
        commands[0].write(call.arguments, call.number)
        call.add(commands[0].take, commands)
        yield call
        return
    for write in _writers(commands, leased_at, waiter):
        if call.full:
            yield call
            call = Call(name, keys)
        write(call)
    yield call


def _writers(
    commands: list[Operation], leased_at: float, waiter: Callable[[int], str]
) -> Iterator[Callable[[Call], None]]:
    turns: dict[int, list[Operation]] = {}
    for command in commands:
        turns.setdefault(command.turn, []).append(command)
    for turn in sorted(turns):
        some = turns[turn]
        if turn == Acknowledge.turn:
            yield _acks(some)
        elif turn == Put.turn:
            yield from _puts(some)
        elif turn == Claim.turn:
            for claims in _alike(some, lambda claim: claim.visibility):
                yield _claims(claims, leased_at, waiter)
        else:
            yield from map(_single, some)


def _single(command: Operation) -> Callable[[Call], None]:
    def write(call: Call) -> None:
        command.write(call.arguments, call.number)
        call.add(command.take, (command,))

    return write


def _acks(acks: list[Any]) -> Callable[[Call], None]:
    return lambda call: call.add(acknowledge(acks, call.arguments), acks)


def _claims(claims: list[Any], leased_at: float, waiter: Callable[[int], str]) -> Callable[[Call], None]:
    return lambda call: call.add(claim_alike(claims, leased_at, waiter, call.arguments), claims)


def _puts(puts: list[Any]) -> Iterator[Callable[[Call], None]]:
    for kind, some in _by(puts, lambda put: put.kind):
        if kind is None or len(some) == 1:
            yield from map(_single, some)
        else:
            yield _put_alike(some)


def _put_alike(puts: list[Any]) -> Callable[[Call], None]:
    return lambda call: call.add(put_alike(puts, call.arguments), puts)


def _by(commands: Iterable[Any], key: Callable[[Any], Hashable]) -> Iterator[tuple[Hashable, list[Any]]]:
    """Neighbours that are alike, as they come: sends keep their order."""
    last: Hashable = None
    run: list[Any] = []
    for command in commands:
        kind = key(command)
        if run and kind != last:
            yield last, run
            run = []
        run.append(command)
        last = kind
    if run:
        yield last, run


def _alike(commands: list[Any], key: Callable[[Any], Hashable]) -> Iterator[list[Any]]:
    """All that are alike, wherever they stand."""
    found: dict[Hashable, list[Any]] = {}
    for command in commands:
        found.setdefault(key(command), []).append(command)
    return iter(found.values())
