"""The streams of a mailbox on NATS, and the steps on them: add, replace, remove, get. The server fences each step.

A message has a subject of its own, and a stream keeps one message a subject. So "add unless there is one" and "replace if it
is still number n" are single steps of the server, and "remove number n" tells whether it was there.
"""

from __future__ import annotations

import base64
import json
from collections import deque
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar

import anyio

from mainspring.errors import ConfigError, MailboxConnectionError, MailboxError, MailboxFullError
from mainspring.mailbox.nats.client import (
    NO_CONSUMER,
    NO_STREAM,
    ApiError,
    GoneError,
    NoResponderError,
    RawMessage,
    is_gone,
    parse,
)
from mainspring.mailbox.nats.connection import NatsConnection, Request
from mainspring.mailbox.nats.messages import StoredMessage, dead_headers, decode, token_of
from mainspring.mailbox.nats.names import CONSUMER, UNBOUNDED, Names, check_stream, upgraded
from mainspring.mailbox.nats.shared_client import ROOM

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
    from contextlib import AbstractAsyncContextManager

    from mainspring.mailbox.message import Dead

    Finish: TypeAlias = Callable[[Iterable[StoredMessage]], Awaitable[None]]


class ReadWriteLock:
    """Keeps counting (reading) apart from moving messages between streams (writing), so that no message is counted half-way.

    Several readers share the lock, and so do several writers: they move different messages. Turns are given in order, so that
    neither kind can keep the other waiting for ever.
    """

    def __init__(self) -> None:
        self._inside = 0
        self._reading = False
        self._waiting: deque[tuple[bool, anyio.Event]] = deque()

    def __repr__(self) -> str:
        what = "reading" if self._reading else "writing"
        return f"<ReadWriteLock {self._inside} {what}, {len(self._waiting)} waiting>"

    def writing(self) -> AbstractAsyncContextManager[None]:
        """Hold the lock while a message moves. A holder must not take it again."""
        return self._hold(reading=False)

    def reading(self) -> AbstractAsyncContextManager[None]:
        """Hold the lock while messages are counted: none is half-way."""
        return self._hold(reading=True)

    @asynccontextmanager
    async def _hold(self, *, reading: bool) -> AsyncIterator[None]:
        if self._waiting or (self._inside and self._reading is not reading):
            await self._wait_for_turn(reading)
        else:
            self._enter(reading)
        try:
            yield
        finally:
            self._leave()

    async def _wait_for_turn(self, reading: bool) -> None:
        turn = anyio.Event()
        place = (reading, turn)
        self._waiting.append(place)
        try:
            await turn.wait()
        except BaseException:
            if turn.is_set():
                self._leave()
            else:
                self._waiting.remove(place)
                self._admit()
            raise

    def _enter(self, reading: bool) -> None:
        self._inside += 1
        self._reading = reading

    def _leave(self) -> None:
        self._inside -= 1
        self._admit()

    def _admit(self) -> None:
        while self._waiting and (not self._inside or self._reading is self._waiting[0][0]):
            reading, turn = self._waiting.popleft()
            self._enter(reading)
            turn.set()


_EXPECT = "Nats-Expected-Last-Subject-Sequence"
_MESSAGE_ID = "Nats-Msg-Id"
_WRONG_LAST = (10071, 10164)
_NO_MESSAGE = (10037, 10043, 10057)
_NOT_NOW = 10008
_SUBJECTS_OVERLAP = 10065
_FULL = (10023, 10026, 10027, 10047, 10077, 10122)
_Read = TypeVar("_Read")
_API = "$JS.API."
_NOTHING = RawMessage(b"", b"", b"", b'{"error":{"err_code":10037}}')
"""The answer about a message that is not there."""
REMOVAL_DELAY = 0.25
"""Seconds before a missing stream is made anew. A server that is still removing it (seen in 2.9.10) would remove the
files of the new one, too."""
WINDOW = 2_000
"""How many requests of one call may be out at once: each must be answered within its own timeout."""


class Add(NamedTuple):
    """A message to add to a stream."""

    subject: str
    payload: bytes
    expect: int | None = None
    """The number of the subject's message that it replaces. 0: the subject must be free. None: replace any."""
    message_id: str | None = None
    """The server drops a second message with this id, for two minutes."""
    headers: dict[str, str] | None = None


class Added(NamedTuple):
    """The result of an addition: the message's number in the stream, or 0 if another message was there."""

    sequence: int
    duplicate: bool = False


class _StreamInfos(NamedTuple):
    """What JetStream says of a stream and its consumer. None: it is not there, or is not to have one."""

    stream: dict[str, Any] | None
    consumer: dict[str, Any] | None


@dataclass(slots=True)
class Stored:
    """A message of a stream."""

    sequence: int
    payload: bytes
    stored_at: float
    subject: str = ""
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def record(self) -> StoredMessage:
        """The record in its payload."""
        return decode(self.payload, self.sequence, self.stored_at)


class Store:
    """The streams of one mailbox, over one connection."""

    def __init__(
        self, connection: NatsConnection, names: Names, *, replicas: int, storage: str, ack_wait: float
    ) -> None:
        self.connection = connection
        self.names = names
        self.lock = ReadWriteLock()
        self.ack_wait = ack_wait
        self.most_in_flight = UNBOUNDED
        """How many messages of the queue may be out with its consumer."""
        self._replicas = replicas
        self._storage = storage
        self._recreating = anyio.Lock()
        self._recreations = 0
        self._dropped = False
        self.made: set[str] = set()
        """Its streams that are known to be there, or were."""
        self.is_new = False
        """True if this object has made the queue: there is nothing in it that a killed server has left behind."""
        self._made_at = ""
        self._known_in = connection.epoch
        self.replaced: Callable[[], object] = lambda: None
        """Called when the queue was deleted and made anew, so that its numbers mean other messages."""
        self.found: Callable[[str], object] = lambda stream: None
        """Called with each of its streams, as soon as it is known to be there."""
        self.finish_writes: Finish = _nothing_to_finish
        """Called with messages before they leave the streams to which they were sent; see :meth:`Records.finish`."""

    # ------------------------------------------------------------------------------------------------------- set-up

    async def ensure(self, names: Names, stream: str | None = None) -> float:
        """Create what is missing of a mailbox's queue, of ``stream``, and of the streams that were there before, with their
        consumers. Return the ack wait of the queue.

        It takes two round trips if none is missing. If the queue is missing and no other stream is known, the mailbox is new,
        and the other streams are not asked for.
        """
        configs = {each["name"]: each for each in names.configs(replicas=self._replicas, storage=self._storage)}
        consumers = names.consumers(self.ack_wait, self.most_in_flight if names == self.names else UNBOUNDED)
        needed = {names.queue, stream or names.queue, *self.made}
        found = await self._look([names.queue], consumers)
        is_new = found[names.queue].stream is None and needed == {names.queue}
        if not is_new:
            found |= await self._look([each for each in configs if each != names.queue], consumers)
        there: dict[str, dict[str, Any] | None] = {}
        for each, (known, consumer) in found.items():
            if known is None and each not in needed:
                continue
            info = await (self._create(configs[each]) if known is None else self._upgrade(configs[each], known))
            check_stream(configs[each], info["config"])
            if each == self.names.queue:
                self._note_identity(info)
                self.is_new = is_new
            # Meanwhile another process may have made the consumer of a new stream, with an ack wait of its own.
            there[each] = await self._consumer_of(each) if known is None and each in consumers else consumer
        ack_wait = self.ack_wait
        for each in consumers.keys() & there.keys():
            made = there[each] or await self._make(*_consumer(each, consumers[each]))
            if each == names.queue:
                ack_wait = made["config"]["ack_wait"] / 1e9
        if names == self.names:
            for each in there:
                self.note(each)
        return ack_wait

    async def _look(self, streams: list[str], consumers: Iterable[str]) -> dict[str, _StreamInfos]:
        """Return the streams that exist, and their consumers."""
        with_consumer = [each for each in streams if each in consumers]
        requests = [Request(f"{_API}STREAM.INFO.{each}") for each in streams]
        requests += [Request(f"{_API}CONSUMER.INFO.{each}.{CONSUMER}") for each in with_consumer]
        found = [
            _parse_unless(answer, NO_STREAM, NO_CONSUMER) for answer in await self.connection.request_all(requests)
        ]
        about_consumers = dict(zip(with_consumer, found[len(streams) :], strict=True))
        return {
            each: _StreamInfos(known, about_consumers.get(each)) for each, known in zip(streams, found, strict=False)
        }

    async def _consumer_of(self, stream: str) -> dict[str, Any] | None:
        (answer,) = await self.connection.request_all([Request(f"{_API}CONSUMER.INFO.{stream}.{CONSUMER}")])
        return _parse_unless(answer, NO_CONSUMER)

    async def _upgrade(self, config: dict[str, Any], known: dict[str, Any]) -> dict[str, Any]:
        """Update a stream that an older version has made. Return its new state."""
        wanted = upgraded(config, known["config"])
        if wanted == known["config"]:
            return known
        check_stream(config, wanted)  # another program's stream stays as it is
        try:
            return await self.connection.api(f"STREAM.UPDATE.{config['name']}", wanted)
        except ApiError as error:
            if error.code == _NOT_NOW:
                raise _as_mailbox_error(error) from error
            raise ConfigError(
                f"the stream {config['name']!r} would drop accepted messages at a limit (discard = 'old'), and cannot be"
                f" changed: {error.text}; set its discard to 'new'"
            ) from error

    async def _make(self, subject: str, request: dict[str, Any]) -> dict[str, Any]:
        try:
            async with self.connection.creation():
                return await self.connection.api(subject, request)
        except ApiError as error:
            raise _as_mailbox_error(error) from error

    async def _create(self, config: dict[str, Any]) -> dict[str, Any]:
        """Create a stream. Return its state.

        Of creations of one stream at the same moment, the server may refuse one for the subjects of the other.
        """
        try:
            return await self._make(f"STREAM.CREATE.{config['name']}", config)
        except MailboxError as error:
            if not (isinstance(error.__cause__, ApiError) and error.__cause__.code == _SUBJECTS_OVERLAP):
                raise
            (answer,) = await self.connection.request_all([Request(f"{_API}STREAM.INFO.{config['name']}")])
            known = _parse_unless(answer, NO_STREAM)
            if known is None:
                raise
            return known

    async def recreate(self, error: MailboxError) -> None:
        """Create again what a call found missing, as ``error`` says. Raise ``error`` if the mailbox's owner has dropped it.

        Calls that failed before one of them began to look do it together. A later one may miss what was there then.
        """
        if self._dropped:
            raise error
        recreations = self._recreations
        async with self._recreating:
            if recreations == self._recreations:
                await anyio.sleep(REMOVAL_DELAY)
                self._recreations += 1
                try:
                    await self.ensure(self.names)
                except BaseException:
                    self._recreations -= 1  # the next one tries
                    raise
                self.connection.end_pulls()  # they wait for consumers that are not there any more

    async def _make_first(self, stream: str, error: MailboxError) -> None:
        """Create a stream that a message needs for the first time, and tell the other processes."""
        if self._dropped:
            raise error
        async with self._recreating:
            if stream not in self.made:
                await self.ensure(self.names, stream)
                await self.connection.publish(self.names.to_made, stream.encode())

    def note(self, stream: str) -> None:
        """Take note that a stream is there."""
        if stream not in self.made:
            self.made.add(stream)
            self.found(stream)

    async def _mend(self, error: MailboxError, subject: str) -> bool:
        """Create what a call to ``subject`` found missing. Return False if it looks into a stream that was not needed yet."""
        stream = _stream_of(self.names, subject)
        is_look = subject.startswith(_API)
        if stream in self.made or (is_look and isinstance(error, NoResponderError)):
            await self.recreate(error)
        elif is_look:
            return False
        else:
            await self._make_first(stream, error)
        return True

    async def check_identity(self) -> None:
        """Find out, after the connection was lost, if the queue was made anew meanwhile."""
        epoch = self.connection.epoch
        if epoch != self._known_in:
            self._note_identity(await self.api(f"STREAM.INFO.{self.names.queue}"))
            self._known_in = epoch

    def _note_identity(self, queue: dict[str, Any]) -> None:
        made_at, self._made_at = self._made_at, str(queue["created"])
        if made_at not in ("", self._made_at):
            self.replaced()
            self.connection.end_pulls()

    async def destroy(self, names: Names) -> None:
        """Delete all streams of a mailbox."""
        self._dropped = self._dropped or names == self.names
        await self.connection.request_all([Request(f"$JS.API.STREAM.DELETE.{stream}") for stream in names.streams])

    # -------------------------------------------------------------------------------------------------------- steps

    @asynccontextmanager
    async def writing(self) -> AsyncIterator[None]:
        """Move a message from one stream to another: once begun, a cancellation does not leave it in both."""
        async with self.lock.writing():
            with anyio.CancelScope(shield=True):  # every call has a deadline
                yield

    async def api(self, subject: str, request: dict[str, Any] | None = None) -> dict[str, Any]:
        """Call JetStream's API about this mailbox. What is missing is created first, and the call made again.

        A stream that was not needed yet has nothing in it.
        """
        try:
            return await self.connection.api(subject, request)
        except MailboxError as error:
            if not is_gone(error):
                raise
            if not await self._mend(error, f"{_API}{subject}"):
                return {"state": {"messages": 0, "last_seq": 0}, "purged": 0}
        return await self.connection.api(subject, request)

    async def _call(self, read: Callable[[RawMessage], _Read], request: Request) -> _Read:
        try:
            return read(await self.connection.request(*request))
        except GoneError as error:
            if not await self._mend(error, request.subject):
                return read(_NOTHING)
        return read(await self.connection.request(*request))

    async def _call_all(
        self, read: Callable[[RawMessage], _Read], requests: Sequence[Request], window: int = WINDOW
    ) -> list[_Read | MailboxError]:
        """Make calls about one stream."""
        results: list[_Read | MailboxError] = []
        for start in range(0, len(requests), window):
            some = requests[start : start + window]
            found = [_each(read, answer) for answer in await self.connection.request_all(some)]
            gone = [place for place, result in enumerate(found) if isinstance(result, GoneError)]
            if gone:
                try:
                    mended = await self._mend(found[gone[0]], some[gone[0]].subject)
                except MailboxError as error:
                    for place in gone:
                        found[place] = error
                else:
                    again: list[RawMessage | MailboxError] = [_NOTHING] * len(gone)
                    if mended:
                        again = await self.connection.request_all([some[place] for place in gone])
                    for place, answer in zip(gone, again, strict=True):
                        found[place] = _each(read, answer)
            results += found
        return results

    async def add(self, add: Add) -> Added:
        """Add one message; see :class:`Add`."""
        return await self._call(_added, Request(add.subject, add.payload, _headers(add)))

    async def add_elsewhere(self, add: Add) -> Added:
        """Add a message to a stream of another mailbox. Raise :class:`GoneError` if there is none."""
        return _added(await self.connection.request(add.subject, add.payload, _headers(add)))

    async def add_all(self, adds: Sequence[Add]) -> list[Added | MailboxError]:
        """Add messages, all requests at once. The result of a failed one is its error."""
        return await self._call_all(_added, [Request(add.subject, add.payload, _headers(add)) for add in adds])

    async def add_or_replace(self, add: Add, message_id: str) -> Added:
        """Add a message whose subject may hold an earlier copy of it. Replace the copy, so that no other process takes
        it for its own.

        A subject that holds another message than ``message_id`` stays as it is; the result is number 0.
        """
        expect = 0
        for _ in range(10):
            added = await self.add(add._replace(expect=expect))
            if added.sequence:
                return added
            there = await self.last(_stream_of(self.names, add.subject), add.subject)
            if there is not None and there.record.message_id != message_id:
                return added
            expect = 0 if there is None else there.sequence
        raise MailboxConnectionError(f"{add.subject}: other processes changed it ten times during one call")

    async def remove(self, stream: str, sequence: int) -> bool:
        """Remove a message by its number. Return True if it was there."""
        return await self._call(_removed, _removal(stream, sequence))

    async def remove_all(self, stream: str, sequences: Sequence[int]) -> list[bool | MailboxError]:
        """Remove messages, all requests at once."""
        return await self._call_all(_removed, [_removal(stream, sequence) for sequence in sequences])

    async def get(self, stream: str, sequence: int) -> Stored | None:
        """Return a message by its number."""
        return await self._call(_stored, _get(stream, {"seq": sequence}))

    async def last(self, stream: str, subject: str) -> Stored | None:
        """Return the message of a subject."""
        return await self._call(_stored, _get(stream, {"last_by_subj": subject}))

    async def last_all(self, stream: str, subjects: Sequence[str]) -> list[Stored | MailboxError | None]:
        """Return the messages of subjects, as many requests at once as the connection has room for the largest answers."""
        return await self._read_all([_get(stream, {"last_by_subj": subject}) for subject in subjects])

    async def _read_all(self, requests: Sequence[Request]) -> list[Stored | MailboxError | None]:
        largest = 2 * self.connection.max_payload  # in base64
        return await self._call_all(_stored, requests, max(1, ROOM // max(1, largest)))

    async def block(self, stream: str, start: int, count: int) -> list[Stored]:
        """Return the messages with the numbers from ``start`` on, ``count`` numbers at most, all requests at once.

        The first is there in any case: the next behind these numbers where all of them are missing. No message: there is
        none from ``start`` on.
        """
        requests = [_get(stream, {"seq": number}) for number in range(start + 1, start + count)]
        requests.insert(0, _get(stream, {"seq": start, "next_by_subj": ">"}))
        found = {}
        for stored in await self._read_all(requests):
            if isinstance(stored, MailboxError):
                raise stored
            if stored is not None:
                found[stored.sequence] = stored
        return [found[number] for number in sorted(found)]

    async def next(self, stream: str, sequence: int, subject: str) -> Stored | None:
        """Return the first message from number ``sequence`` on."""
        return await self._call(_stored, _get(stream, {"seq": sequence, "next_by_subj": subject}))

    async def subjects(self, stream: str, pattern: str) -> list[str]:
        """Return the subjects of a stream that match ``pattern`` and have a message, in any order."""
        found: list[str] = []
        while True:
            answer = await self.api(f"STREAM.INFO.{stream}", {"subjects_filter": pattern, "offset": len(found)})
            some = answer["state"].get("subjects") or {}
            found += some
            if not some or len(found) >= answer.get("total", 0):
                return found

    async def consumer(self) -> dict[str, Any]:
        """Return the state of the queue's consumer."""
        return await self.api(f"CONSUMER.INFO.{self.names.queue}.{CONSUMER}")

    async def change_consumer(self, config: dict[str, Any]) -> dict[str, Any]:
        """Give the queue's consumer another configuration. Return its state."""
        return await self.api(*_consumer(self.names.queue, config))

    async def delivered(self) -> int:
        """Return the highest number of the queue that was ever delivered."""
        return int((await self.consumer())["delivered"]["stream_seq"])

    async def begin_change(self, sequence: int) -> bool:
        """Return True if a message of the queue has not been delivered. A worker that gets it from now on puts it back."""
        await self.connection.publish(self.names.to_changes, b"%d" % sequence)
        return sequence > await self.delivered()

    async def dead_letter(self, stream: str, sequence: int, record: StoredMessage, dead: Dead, at: float) -> bool:
        """Move a message to the dead letters. Return True if it was still number ``sequence`` of ``stream``."""
        payload = record.encode()
        headers = dead_headers(dead, at, min(65_536, max(2_048, self.connection.max_payload - len(payload) - 1_024)))
        subject = self.names.to_dead + token_of(record.message_id)  # not by its dedup key, which is free now
        await self.finish_writes([record])
        async with self.writing():
            added = await self.add(Add(subject, payload, 0, None, headers))
            fresh = added.sequence > 0
            if not fresh:  # left there by a process that could not finish
                added = await self.add_or_replace(Add(subject, payload, 0, None, headers), record.message_id)
            held = await self.remove(stream, sequence)
            if not held and fresh:
                await self.remove(self.names.dead, added.sequence)
        return held

    async def forget_checkpoint(self, record: StoredMessage) -> None:
        """Drop the checkpoint of a settled message. It does no harm if it stays."""
        try:
            await self.purge(self.names.checkpoints, self.names.to_checkpoints + token_of(record.message_id))
        except MailboxError:
            return

    async def count_moves(self, count: int = 1) -> None:
        """StoredMessage that ``count`` messages that were added to the queue or the delayed stream were not new."""
        with anyio.CancelScope(shield=True):  # every call has a deadline
            await self.add_all([Add(self.names.to_moves, b"")] * count)

    async def purge(self, stream: str, subject: str | None = None) -> int:
        """Drop all messages of a stream, or of a subject. Return how many there were."""
        request = None if subject is None else {"filter": subject}
        return int((await self.api(f"STREAM.PURGE.{stream}", request))["purged"])


async def _nothing_to_finish(messages: Iterable[StoredMessage]) -> None:
    """Stand in for the records of a mailbox that has none yet."""


def _consumer(stream: str, config: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the call by which the consumer of a stream is made or changed."""
    return f"CONSUMER.DURABLE.CREATE.{stream}.{CONSUMER}", {"stream_name": stream, "config": config}


def _stream_of(names: Names, subject: str) -> str:
    """Return the stream that takes messages of a subject, or that a call of JetStream's API is about."""
    for prefix, stream in (
        (names.to_queue, names.queue),
        (names.to_delayed, names.delayed),
        (names.to_expiries, names.expiries),
        (names.to_dead, names.dead),
        (names.to_moves, names.moves),
        (names.to_checkpoints, names.checkpoints),
        (names.to_records, names.records),
    ):
        if subject.startswith(prefix):
            return stream
    return next((stream for stream in names.streams if stream in subject.split(".")), names.queue)


def _headers(add: Add) -> dict[str, str] | None:
    if add.expect is None and add.message_id is None:
        return add.headers
    headers = dict(add.headers) if add.headers else {}
    if add.expect is not None:
        headers[_EXPECT] = str(add.expect)
    if add.message_id is not None:
        headers[_MESSAGE_ID] = add.message_id
    return headers


def _added(answer: RawMessage) -> Added:
    data = answer.data
    number = data[data.rfind(b":") + 1 : -1]
    if number.isdigit() and b'"seq":%s}' % number in data and b'"error"' not in data:  # the usual answer, read quickly
        return Added(int(number))
    try:
        found = parse(answer)
    except ApiError as error:
        if error.code in _WRONG_LAST:
            return Added(0)
        raise _as_mailbox_error(error) from error
    return Added(int(found["seq"]), bool(found.get("duplicate")))


def _removal(stream: str, sequence: int) -> Request:
    return Request(f"$JS.API.STREAM.MSG.DELETE.{stream}", b'{"seq":%d,"no_erase":true}' % sequence)


def _removed(answer: RawMessage) -> bool:
    if answer.data.endswith(b'"success":true}'):
        return True
    try:
        return bool(parse(answer).get("success"))
    except ApiError as error:
        if error.code in _NO_MESSAGE:
            return False
        raise _as_mailbox_error(error) from error


def _get(stream: str, request: dict[str, Any]) -> Request:
    return Request(f"$JS.API.STREAM.MSG.GET.{stream}", json.dumps(request).encode())


def _stored(answer: RawMessage) -> Stored | None:
    try:
        found = parse(answer)["message"]
    except ApiError as error:
        if error.code in _NO_MESSAGE:
            return None
        raise _as_mailbox_error(error) from error
    headers = _read_headers(base64.b64decode(found["hdrs"])) if "hdrs" in found else {}
    payload = base64.b64decode(found.get("data") or b"")
    return Stored(int(found["seq"]), payload, _instant(found["time"]), found["subject"], headers)


def _read_headers(raw: bytes) -> dict[str, str]:
    lines = raw.decode("utf-8", "replace").split("\r\n")[1:]
    pairs = (line.partition(":") for line in lines if line)
    return {name: value.strip() for name, _, value in pairs}


def _instant(text: str) -> float:
    """Return the POSIX seconds of a date with nanoseconds."""
    whole, _, rest = text.partition(".")
    digits = "".join(filter(str.isdigit, rest.partition("Z")[0].partition("+")[0].partition("-")[0]))
    return datetime.fromisoformat(f"{whole.removesuffix('Z')}+00:00").timestamp() + (
        float(f"0.{digits}") if digits else 0
    )


def _each(read: Any, answer: RawMessage | MailboxError) -> Any:
    if isinstance(answer, MailboxError):
        return answer
    try:
        return read(answer)
    except MailboxError as error:
        return error


def _parse_unless(answer: RawMessage | MailboxError, *codes: int) -> dict[str, Any] | None:
    """Return the parsed answer, or None if JetStream refuses with one of ``codes``."""
    if isinstance(answer, MailboxError):
        raise answer
    try:
        return parse(answer)
    except ApiError as error:
        if error.code in codes:
            return None
        raise _as_mailbox_error(error) from error


def _as_mailbox_error(error: ApiError) -> MailboxError:
    """Translate a refusal of JetStream: a limit is reached, something is gone, or it may pass."""
    if error.code in _FULL:
        return MailboxFullError(
            f"the NATS server has no room: {error.text}; purge messages, or raise the limits of the account"
        )
    if is_gone(error):
        return GoneError(str(error))
    return MailboxConnectionError(str(error))
