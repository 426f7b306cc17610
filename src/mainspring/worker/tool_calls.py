"""Tool calls: effects outside that a handler marks as begun, so that its next delivery knows which may have happened."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from datetime import datetime
from functools import cache
from typing import TYPE_CHECKING, Any, Self

import anyio

from mainspring.core import clock
from mainspring.core.process import in_event_loop
from mainspring.errors import ConfigError, InvalidParameterError, MailboxConnectionError, SerializationError
from mainspring.mailbox.codec import Codec, why_unreadable

if TYPE_CHECKING:
    from types import TracebackType

    from mainspring.worker.delivery import Delivery

MOST_UNFINISHED = 100
"""How many calls of one message may have begun and not ended: they are written anew with each other one."""
END_TIMEOUT = 5.0
"""Seconds that writing the end of a call may take, also where its handler is being cancelled meanwhile."""

_MARK = b'{"$mainspring":'
_VERSION = 1


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call to the outside that a handler has begun.

    ``begun_at`` (aware UTC) and ``attempt`` say when; ``info`` is what was given, as JSON holds it. ``number`` tells the calls
    of one message apart.
    """

    name: str
    key: str | None
    info: Any
    begun_at: datetime
    attempt: int
    number: int


class Notes:
    """The notes that are kept with one message in its checkpoint: the handler's state, and the calls that have begun and not
    ended.

    Without such calls the checkpoint is the state and nothing else, as it is where a handler makes none.
    """

    def __init__(self, delivery: Delivery) -> None:
        self._delivery = delivery
        self._lock = anyio.Lock()
        self.state, calls = _read(delivery.message.checkpoint)
        self._calls = {call.number: call for call in calls}
        self._restored: Any = None
        self._earlier = set(self._calls)
        self._open: set[int] = set()

    @property
    def unfinished(self) -> tuple[ToolCall, ...]:
        """The calls of earlier deliveries that have not ended, been settled, or been taken up again; oldest first."""
        return tuple(call for number, call in self._calls.items() if number in self._earlier)

    @property
    def restored(self) -> Any:
        """The state as JSON holds it, or None."""
        if self._restored is None and self.state is not None:
            from pydantic_core import from_json

            self._restored = from_json(self.state)
        return self._restored

    async def save(self, state: bytes) -> None:
        """Keep another state."""
        async with self._lock:
            await self._write(state, self._calls)

    async def begin(self, name: str, key: str | None, info: Any) -> ToolCall:
        """Write down that a call begins. One of the same name and key that has not ended is taken up again."""
        async with self._lock:
            same = next((c for c in self._calls.values() if key is not None and (c.name, c.key) == (name, key)), None)
            if same is not None and same.number in self._open:
                raise InvalidParameterError(
                    f"tool_call: {_title(same)} is under way in this handler already; await it, or give this one another key"
                )
            if same is not None:
                call = replace(same, info=info)
            elif len(self._calls) < MOST_UNFINISHED:
                number = max(self._calls, default=0) + 1
                call = ToolCall(name, key, info, clock.utc_now(), self._delivery.message.attempt, number)
            else:
                raise InvalidParameterError(
                    f"tool_call: {MOST_UNFINISHED} calls of message {self._delivery.message_id} have begun and not ended;"
                    " settle the ones of no further interest with ctx.resolve_call()"
                )
            await self._write(self.state, {**self._calls, call.number: call})
            self._earlier.discard(call.number)
            self._open.add(call.number)
            return call

    def leave(self, call: ToolCall) -> None:
        """Note that the block of a call was left, with or without an error."""
        self._open.discard(call.number)

    async def end(self, call: ToolCall, state: bytes | None = None) -> None:
        """Write down that a call is over and, in the same step, another state. One that is over already stays so."""
        async with self._lock:
            known = self._calls.get(call.number)
            mine = known is not None and (known.name, known.key, known.begun_at) == (call.name, call.key, call.begun_at)
            if mine or state is not None:
                left = {number: c for number, c in self._calls.items() if not (mine and number == call.number)}
                await self._write(self.state if state is None else state, left)

    async def _write(self, state: bytes | None, calls: dict[int, ToolCall]) -> None:
        """Write both, as one value. What is known here changes when it is written."""
        raw = _written(state, calls)
        if (reason := why_unreadable(raw)) is not None:
            raise SerializationError(f"a checkpoint cannot be written: {reason}, and could not be read back")
        self._delivery.beat()
        await self._delivery.message.save_checkpoint(raw)
        self.state, self._calls, self._restored = state, calls, None
        self._delivery.beat()


def _written(state: bytes | None, calls: dict[int, ToolCall]) -> bytes:
    if not calls and not (state or b"").startswith(_MARK):  # a state that looks like ours is not to be taken for it
        return b"null" if state is None else state
    from pydantic_core import to_json as to_plain_json

    head = b'%s%d,"calls":%s,"state":' % (_MARK, _VERSION, to_plain_json([asdict(call) for call in calls.values()]))
    return head + (b"null" if state is None else state) + b"}"


def _read(raw: bytes | None) -> tuple[bytes | None, list[ToolCall]]:
    if raw is None or not raw.startswith(_MARK):
        return raw, []
    from pydantic_core import from_json
    from pydantic_core import to_json as to_plain_json

    value = from_json(raw)
    if value.keys() != {"$mainspring", "calls", "state"}:
        return raw, []  # a handler's own, by chance
    if value["$mainspring"] != _VERSION:
        raise SerializationError(
            "the message's checkpoint was written by a newer version of Mainspring; upgrade this worker"
        )
    calls = [ToolCall(**{**call, "begun_at": datetime.fromisoformat(call["begun_at"])}) for call in value["calls"]]
    return to_plain_json(value["state"]), calls


def to_json(value: Any, what: str = "a checkpoint") -> bytes:
    """Return ``value`` as JSON that is read as equal, or that a dataclass or a model is read from.

    :raises SerializationError: it is neither plain JSON nor such an object, or would be read as another one.
    """
    return _codec(what).encode(value)


@cache
def _codec(what: str) -> Codec:
    return Codec(by_alias=True, what=what)


def _title(call: ToolCall) -> str:
    return repr(call.name) if call.key is None else f"{call.name!r} with key {call.key!r}"


class ToolCallBlock:
    """The block of one call: ``async with``, or ``with`` in a handler that is a plain ``def``."""

    def __init__(self, notes: Notes, name: str, key: str | None, info: Any) -> None:
        if not (isinstance(name, str) and name):
            raise InvalidParameterError(f"tool_call: name must be text, not {name!r}")
        if key is not None and not (isinstance(key, str) and key):
            raise InvalidParameterError(f"tool_call: key must be text, or None, not {key!r}")
        from pydantic_core import from_json

        self._notes = notes
        self._given = (name, key, from_json(to_json(info, "the info of a tool call")))
        self._call: ToolCall | None = None
        self._kept: bytes | None = None

    @property
    def call(self) -> ToolCall:
        """The note of the call. Raise :class:`ConfigError` if the block was not entered."""
        if self._call is None:
            raise ConfigError("a tool call begins with its block: `async with ctx.tool_call(…) as call:`")
        return self._call

    def keep(self, state: Any) -> None:
        """Have ``state`` kept as the message's checkpoint, by the very write that ends the call: no crash can come between
        the two. Raises :class:`SerializationError` for what is no JSON."""
        self._kept = to_json(state)

    async def __aenter__(self) -> Self:
        if self._call is not None:
            raise ConfigError("a tool call is made once; call ctx.tool_call() for each")
        self._call = await self._notes.begin(*self._given)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._notes.leave(self.call)
        if kind is not None:
            return  # begun, and not known to have ended: it stays so
        with anyio.CancelScope(shield=True, deadline=anyio.current_time() + END_TIMEOUT) as scope:
            await self._notes.end(self.call, self._kept)
        if scope.cancelled_caught:
            raise MailboxConnectionError(
                f"the end of tool call {_title(self.call)} could not be written within {END_TIMEOUT:g} s"
            )

    def __enter__(self) -> Self:
        if in_event_loop():
            raise ConfigError("`with ctx.tool_call(…)` is for handlers in threads; write `async with` here")
        return anyio.from_thread.run(self.__aenter__)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        anyio.from_thread.run(self.__aexit__, kind, error, trace)
