"""Calls of which one is enough: ``unique`` and ``debounce``. Records of the mailbox say which call stands for a key.

While a call is unfinished (``unique=True``), the store itself knows its key: that is the ``dedup_key`` of its message. The
others take a record under the key, which is written in one step with the message. Of senders that race, one writes it; the
others find what it has written.

A debounced call has its arguments in the record, and one message that fetches them when its time has come. So an update is
one write of the record. It is neither lost nor made twice: the record is deleted after the run, and only if no update came
meanwhile. Else the message comes again. A crash in between means one more run, as for every message.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from mainspring.core import clock
from mainspring.errors import ConfigError, InvalidParameterError, Retry
from mainspring.mailbox.limits import check_seconds
from mainspring.mailbox.message import MessagePlace, header_of
from mainspring.mailbox.records import RecordWrite, check_size
from mainspring.tasks.keys import given_key
from mainspring.validation import MAX_DELAY, Seconds, as_seconds
from mainspring.worker.delivery import ALREADY_DONE

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from mainspring.mailbox.backend import Backend
    from mainspring.mailbox.message import Envelope, Message
    from mainspring.mailbox.records import Record
    from mainspring.tasks.calls import TaskCall
    from mainspring.tasks.task import Task

Unique: TypeAlias = "bool | Literal['pending'] | Seconds"
"""For how long a second call with the same key is not sent: see :meth:`Tasks.task`."""

UNIQUE: Final = "unique"
"""The kind of the record that names the job that stands for a key."""
DEBOUNCE: Final = "debounce"
"""The kind of the record that holds the latest call of a key."""
DEBOUNCE_KEY: Final = "mainspring-debounce"
"""The header of a message that runs the latest call of the key which it says."""
PENDING: Final = "pending"
RECORD_LIFE = 30 * 86_400.0
"""Seconds that the record of a pending call is kept after the last send: a call that waits longer than that is no longer known
by its key. That of a debounced call holds the call itself, and is kept as long as a record can be."""
MOST_WAITS = 10
"""How many times its ``debounce`` a call waits at most, while others come, where nothing else is said."""


def check_unique(name: str, unique: Any) -> None:
    """Raise :class:`InvalidParameterError` for a value that ``unique`` of a task cannot have."""
    if isinstance(unique, bool) or unique == PENDING:
        return
    seconds = as_seconds(unique)
    if isinstance(seconds, int | float) and 0 < seconds <= MAX_DELAY:
        return
    raise InvalidParameterError(
        f"task {name}: unique must be True or False, 'pending', or above 0 seconds (at most 366 days), not {unique!r}"
    )


@dataclass(frozen=True)
class Debounce:
    """How long a call waits for a later one: ``wait`` seconds after each, at most ``most`` after the first."""

    wait: float
    most: float

    @classmethod
    def of(cls, name: str, given: Any) -> Debounce | None:
        """Return what ``debounce=`` means: seconds, or those and the most. Raise :class:`ConfigError` for what it cannot be."""
        if given is None:
            return None
        wait, most = given if isinstance(given, tuple) and len(given) == 2 else (given, None)
        wait, most = as_seconds(wait), as_seconds(most)
        try:
            check_seconds(f"task {name}: debounce", wait, MAX_DELAY)
            most = min(wait * MOST_WAITS, MAX_DELAY) if most is None else most
            check_seconds(f"task {name}: the most of debounce", most, MAX_DELAY)
        except InvalidParameterError as error:
            raise ConfigError(str(error)) from None
        if not 0 < wait <= most:
            raise ConfigError(
                f"task {name}: debounce must be above 0 seconds, or (seconds, most seconds), not {given!r}"
            )
        return cls(float(wait), float(most))


def key_of(task: Task[..., Any], call: TaskCall) -> str:
    """Return what makes two calls the same: the key that was given, that of the task, or the task with all its arguments.

    :raises InvalidParameterError: the key is no text of 1 to 512 characters.
    """
    key = given_key(task, call.arguments)
    if key is not None:
        return f"{task.name}:{key}"
    task.parameters.check(call.arguments)
    arguments = json.loads(task.parameters.encode(task.parameters.without_defaults(call.arguments)))
    in_one_order = json.dumps(arguments, sort_keys=True).encode()
    return f"{task.name}:{hashlib.sha256(in_one_order).hexdigest()}"


# ----------------------------------------------------------------------------------------------------------- sending


async def send_once(task: Task[..., Any], envelope: Envelope, key: str) -> str:
    """Send a call by ``unique="pending"`` or a time, unless another stands for its key. Return the id of the call that does."""
    backend, unique = task.tasks.mailbox.backend, task.sending.unique
    if unique != PENDING:
        life: float = as_seconds(unique)
        while True:
            if await _stand(backend, UNIQUE, key, envelope, life, 0, envelope.message_id.encode()):
                return envelope.message_id
            for record in await backend.find_records(UNIQUE, [key]):
                return record.value.decode()
    while True:
        found = await backend.find_records(UNIQUE, [key])
        version = 0
        for record in found:
            version = record.version
            for known in await backend.find([record.value.decode()]):
                if known.place is not MessagePlace.IN_FLIGHT:
                    return known.message.message_id
        life = RECORD_LIFE + envelope.delay
        if await _stand(backend, UNIQUE, key, envelope, life, version, envelope.message_id.encode()):
            return envelope.message_id


async def send_debounced(task: Task[..., Any], envelope: Envelope, call: bytes, key: str, wait: float) -> str:
    """Let a call (as JSON) be the latest of its key. Return the id of the message that will run it."""
    backend = task.tasks.mailbox.backend
    while True:
        now = clock.utc_now().timestamp()
        latest = await _latest(backend, key)
        if latest is not None and await backend.find([latest.message_id]):
            if await _keep(backend, key, replace(latest, sent=now, call=call)):
                return latest.message_id
            continue
        envelope.delay = wait
        version = 0 if latest is None else latest.version
        value = _LatestCall(envelope.message_id, now, now, call, version).value
        if await _stand(backend, DEBOUNCE, key, envelope, MAX_DELAY, version, value):
            return envelope.message_id


async def _stand(
    backend: Backend, kind: str, key: str, envelope: Envelope, life: float, version: int, value: bytes
) -> bool:
    """Send a call and let it stand for its key, if that has still this version. Return True if it was sent."""
    write = RecordWrite(kind, key, value, min(life, MAX_DELAY), version)
    return await backend.write_record(write, [envelope]) is not None


@dataclass(frozen=True)
class _LatestCall:
    """The latest call of a key, as its record has it."""

    message_id: str
    first: float
    """When the first of the calls that it stands for was sent."""
    sent: float
    call: bytes
    version: int

    def due(self, debounce: Debounce) -> float:
        """Return when it may run."""
        return min(self.sent + debounce.wait, self.first + debounce.most)

    @property
    def value(self) -> bytes:
        """The value of the record. Raise :class:`SerializationError` if it is larger than a record may be."""
        head = json.dumps({"id": self.message_id, "first": self.first, "sent": self.sent}).encode()
        value = head[:-1] + b', "call":' + self.call + b"}"
        check_size("a debounced call", value)
        return value


async def _keep(backend: Backend, key: str, latest: _LatestCall) -> bool:
    """Write the record of the latest call, if it has still this version. Return True if it had."""
    write = RecordWrite(DEBOUNCE, key, latest.value, MAX_DELAY, latest.version)
    return await backend.write_record(write) is not None


def _read(record: Record) -> _LatestCall:
    head, _, call = record.value.partition(b', "call":')
    said = json.loads(head + b"}")
    return _LatestCall(said["id"], said["first"], said["sent"], call[:-1], record.version)


async def _latest(backend: Backend, key: str) -> _LatestCall | None:
    for record in await backend.find_records(DEBOUNCE, [key]):
        return _read(record)
    return None


# ----------------------------------------------------------------------------------------------------------- running


def latest_call(
    task: Task[..., Any], debounce: Debounce
) -> Callable[[Message[Any, Any], Callable[[], Awaitable[Any]]], Awaitable[Any]]:
    """Return the wrapper that runs the latest call of a message's key, once its time has come."""
    mailbox = task.tasks.mailbox

    async def run_latest(message: Message[Any, Any], call: Callable[[], Awaitable[Any]]) -> Any:
        key = header_of(message.headers, DEBOUNCE_KEY)
        if key is None:
            return await call()
        latest = await _latest(mailbox.backend, key)
        if latest is None or latest.message_id != message.id:
            return ALREADY_DONE  # its worker died before it was acknowledged
        began = clock.utc_now().timestamp()
        early = latest.due(debounce) - began
        if early > 0:
            raise Retry(delay=early, charge=False)
        message.body.arguments = mailbox.codec.decode(latest.call).arguments
        result = await call()
        delete = RecordWrite(DEBOUNCE, key, None, if_version=latest.version)
        if await mailbox.backend.write_record(delete) is None:
            raise Retry(delay=await _delay_of_update(mailbox.backend, key, began, debounce), charge=False)
        return result

    return run_latest


async def _delay_of_update(backend: Backend, key: str, began: float, debounce: Debounce) -> float:
    """Return the seconds until the run of a call that came while another ran. It waits as if none had come before."""
    while (latest := await _latest(backend, key)) is not None:
        update = replace(latest, first=max(latest.first, began))
        if await _keep(backend, key, update):
            return max(0.0, update.due(debounce) - clock.utc_now().timestamp())
    return 0.0
