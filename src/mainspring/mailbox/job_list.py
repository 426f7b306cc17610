"""Lists of jobs: the messages of a mailbox and the ends that it keeps, page by page, and the purge of listed jobs.

A list goes through the places of a mailbox in the order in which a job passes them: delayed, pending and in flight, the dead
letters, the results that are kept, and the chains. Of each place it reads pages of bounded size. The store finds a task, a
key and a date among unfinished messages, and a task among dead letters; all else is looked for in each job of a page.

The unfinished messages of a task may all be in another place than the list reads. The store then says so after a bounded
number of messages, and the list goes on with the next place before it comes back.

The last job of a page is handed out when the next page was read. So a caller may remove each job as it comes: the next page
still begins behind a job that is there.
"""

from __future__ import annotations

import json
from base64 import urlsafe_b64decode, urlsafe_b64encode
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self, TypeAlias

import anyio

from mainspring.core import clock
from mainspring.errors import InvalidParameterError
from mainspring.mailbox.codec import Unserialized
from mainspring.mailbox.jobs import (
    JobState,
    JobStatus,
    outcome_of_record,
    status_of_chain,
    status_of_dead,
    status_of_unfinished,
    with_progress,
)
from mainspring.mailbox.limits import check_seconds, check_text, is_name
from mainspring.mailbox.message import CancelOutcome, MessagePlace, MessageQuery
from mainspring.mailbox.records import CHAIN, RESULT, RecordWrite
from mainspring.validation import Seconds, as_seconds, is_whole

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from mainspring.mailbox.mailbox import Mailbox
    from mainspring.mailbox.message import ClaimedMessage, Dead
    from mainspring.mailbox.records import Record

States: TypeAlias = "JobState | str | Iterable[JobState | str]"
"""One state of a job, or several, each as a :class:`JobState` or its text."""

PAGE: Final = 500
"""The most jobs that are read at once."""
FIRST_PAGE: Final = 100
"""How many jobs a list with a limit reads first, where some of them may not fit."""
LONGEST_AGO: Final = 1e10
"""The most seconds before now that a filter takes: three centuries."""

UNFINISHED: Final = frozenset({JobState.SCHEDULED, JobState.PENDING, JobState.RUNNING})
DEAD: Final = "dead"
_PLACES: Final = {
    MessagePlace.DELAYED: {JobState.SCHEDULED},
    MessagePlace.PENDING: {JobState.PENDING},
    MessagePlace.IN_FLIGHT: {JobState.RUNNING},
    DEAD: {JobState.DEAD, JobState.EXPIRED},
    RESULT: {JobState.DONE, JobState.FAILED, JobState.CANCELLED},
    CHAIN: {JobState.RUNNING, JobState.DONE, JobState.CANCELLED},
}
"""Which states the jobs of each place have."""
_ROUNDS: Final[tuple[tuple[str, ...], ...]] = (tuple(MessagePlace), (DEAD,), (RESULT,), (CHAIN,))
"""The order of a list: a round is over when each of its places is."""


@dataclass(frozen=True, slots=True)
class JobFilter:
    """A filter of jobs: a job fits if it fits each field. None fits all jobs."""

    states: frozenset[JobState]
    task: str | None
    key: str | None
    since: float | None
    until: float | None
    search: str | None

    @classmethod
    def of(
        cls,
        call: str,
        state: States | None,
        task: str | None,
        key: str | None,
        since: datetime | Seconds | None,
        older_than: datetime | Seconds | None,
        search: str | None,
    ) -> Self:
        """Return the filter that the parameters of ``call`` say.

        :raises InvalidParameterError: one cannot be used.
        """
        for name, text in (("task", task), ("key", key), ("search", search)):
            if text is not None and not (isinstance(text, str) and text):
                raise InvalidParameterError(
                    f"{call}: {name} must be a text of at least one character, or None, not {text!r:.100}"
                )
            if text is not None:
                check_text(f"{call}: {name}", text)
        first, last = _instant(f"{call}: since", since), _instant(f"{call}: older_than", older_than)
        if first is not None and last is not None and last < first:
            raise InvalidParameterError(f"{call}: since must be before older_than: no time is between them")
        found = frozenset(JobState) if state is None else _states(call, state)
        return cls(found, task, key, first, last, None if search is None else search.casefold())

    def fits(self, found: _Found) -> bool:
        """True if a job that was read is meant."""
        job = found.job
        date = job.enqueued_at or job.finished_at
        sent = date.timestamp() if date else 0.0
        return (
            job.state in self.states
            and (self.task is None or found.is_of_task or job.task == self.task)
            and (self.key is None or job.key == self.key)
            and (self.since is None or sent >= self.since)
            and (self.until is None or sent <= self.until)
            and (self.search is None or any(self.search in text.casefold() for text in found.texts()))
        )

    def is_found_by_store(self, place: str) -> bool:
        """True if all jobs that the store lists for this filter fit, so that no more need be read than are wanted."""
        if self.until is not None or self.search is not None:
            return False
        narrowed = (self.task is not None and place != DEAD) or self.key is not None or self.since is not None
        return place in tuple(MessagePlace) or (not narrowed and _PLACES[place] <= self.states)


def _states(call: str, given: States) -> frozenset[JobState]:
    try:
        found = frozenset(JobState(each) for each in ([given] if isinstance(given, str) else given))
    except (TypeError, ValueError):
        found = frozenset()
    if not found:
        raise InvalidParameterError(
            f"{call}: state must be one or several of {', '.join(JobState)}, or None, not {given!r:.100}"
        )
    return found


def _instant(what: str, given: datetime | Seconds | None) -> float | None:
    """Return the POSIX seconds of a date, or of a time before now."""
    if given is None:
        return None
    if isinstance(given, datetime):
        if given.utcoffset() is None:
            raise InvalidParameterError(f"{what} must be a datetime with a time zone, or seconds ago, not {given!r}")
        return given.timestamp()
    ago = as_seconds(given)
    check_seconds(what, ago, LONGEST_AGO)
    return clock.utc_now().timestamp() - ago


class _Found(NamedTuple):
    """A job that was read. ``is_of_task`` says that the store has found it by its task."""

    job: JobStatus
    body: Any = b""
    is_of_task: bool = False
    after: str | None = None
    """Where a page begins behind it, if the store can tell."""

    def texts(self) -> Iterable[str]:
        job = self.job
        yield from (text for text in (job.id, job.task, job.key, job.last_error) if text)
        body = self.body
        yield repr(body.body) if isinstance(body, Unserialized) else body.decode(errors="replace")


class _JobPage(NamedTuple):
    jobs: list[_Found]
    after: str | None
    """Where the next page of the place begins; None: this is the last."""


class _Cursor(NamedTuple):
    """Where the next page of a place begins; None: at its beginning."""

    place: str
    after: str | None = None


class _Position(NamedTuple):
    """Where a list goes on: the places of the round that are not over, the next one first, and behind which id of its page."""

    cursors: tuple[_Cursor, ...]
    job_id: str | None = None

    def __str__(self) -> str:
        return urlsafe_b64encode(json.dumps(self, separators=(",", ":")).encode()).decode().rstrip("=")

    @property
    def round(self) -> int:
        """The number of the round."""
        return next(number for number, places in enumerate(_ROUNDS) if self.cursors[0].place in places)

    @classmethod
    def read(cls, text: str) -> Self:
        """Return the position that :attr:`JobStatus.position` says."""
        try:
            cursors, job_id = json.loads(urlsafe_b64decode(text + "=" * (-len(text) % 4)))
            found = cls(tuple(_Cursor(place, after) for place, after in cursors), job_id)
            texts = [text for text in (job_id, *(cursor.after for cursor in found.cursors)) if text is not None]
            for cursor in found.cursors:
                if cursor.place == DEAD:
                    float((cursor.after or "0").partition(" ")[0])
            if all(cursor.place in _ROUNDS[found.round] for cursor in found.cursors) and all(map(is_name, texts)):
                return found
        except (TypeError, ValueError, LookupError, AttributeError, StopIteration, RecursionError):
            pass
        raise InvalidParameterError(
            f"jobs: after must be the position of a job that was listed (JobStatus.position), not {text!r:.100}"
        )


class JobList:
    """What :meth:`Mailbox.jobs` returns: an async iterator of :class:`JobStatus`. Each step may ask the store for a page.

    It is begun once, and holds nothing of the store: it can be left at any time. A step that raises or is cancelled can be
    made again.
    """

    def __init__(
        self,
        mailbox: Mailbox[Any, Any],
        which: JobFilter,
        limit: int | None = None,
        after: str | None = None,
        *,
        chains: bool = True,
    ) -> None:
        if limit is not None and not is_whole(limit, 1):
            raise InvalidParameterError(f"jobs: limit must be a whole number from 1, or None, not {limit!r:.100}")
        self._mailbox = mailbox
        self._which = which
        self._left = limit
        self._look_at = 0
        at = _Position(tuple(map(_Cursor, _ROUNDS[0]))) if after is None else _Position.read(after)
        left_out = {RESULT, CHAIN} if not mailbox.capabilities.records else set() if chains else {CHAIN}
        rounds = [at.cursors, *(tuple(map(_Cursor, places)) for places in _ROUNDS[at.round + 1 :])]
        self._rounds = [
            tuple(each for each in cursors if _PLACES[each.place] & which.states and each.place not in left_out)
            for cursors in rounds
        ]
        self._behind = at.job_id
        self._held: list[JobStatus] = []
        self._ready: list[JobStatus] = []

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> JobStatus:
        if not self._ready:
            self._ready = (await self.batch())[::-1]
            if not self._ready:
                raise StopAsyncIteration
        return self._ready.pop()

    async def batch(self) -> list[JobStatus]:
        """Return the next jobs, or none at the end."""
        self._mailbox.check_open()
        while True:
            page = await self._page()
            ready, self._held = self._held + page[:-1], page[-1:]
            if ready or not self._held:
                return ready

    async def _page(self) -> list[JobStatus]:
        """Return the jobs of the next page that has some which fit, or none at the end."""
        while self._rounds and self._left != 0:
            if not self._rounds[0]:
                self._rounds = self._rounds[1:]
                continue
            here, *others = self._rounds[0]
            size = self._size(here)
            page = await self._read(here.place, size, here.after)
            ids = [each.job.id for each in page.jobs]
            behind = ids.index(self._behind) + 1 if self._behind in ids else 0
            following = [] if page.after is None else [_Cursor(here.place, page.after)]
            cursors = (*following, *others) if len(ids) == size else (*others, *following)
            found = [
                self._placed(each, cursors if each is page.jobs[-1] else ())
                for each in page.jobs[behind:]
                if self._which.fits(each)
            ]
            found = await with_progress(self._mailbox.backend, found[: self._left])
            self._rounds, self._behind = [cursors, *self._rounds[1:]], None
            if self._left is not None:
                self._left -= len(found)
            if found:
                return found
        return []

    def _placed(self, found: _Found, following: tuple[_Cursor, ...]) -> JobStatus:
        """Return a job of the page that was read, with its position: before the cursors that follow, or within the page."""
        here, *others = self._rounds[0]
        if found.after is not None:
            position = _Position((_Cursor(here.place, found.after),))
        else:
            position = _Position(following) if following else _Position((here, *others), found.job.id)
        arguments = self._mailbox.codec.arguments_of(found.body)
        return replace(found.job, arguments=arguments, position=str(position))

    def _size(self, here: _Cursor) -> int:
        """Return how many jobs to read: no more than are wanted, where each job that is read is one of them.

        Else more with each page, as it may have few that fit.
        """
        if self._left is None or self._behind is not None:
            return PAGE
        if self._which.is_found_by_store(here.place):
            return min(PAGE, self._left)
        self._look_at = min(PAGE, 2 * self._look_at or max(FIRST_PAGE, self._left))
        return self._look_at

    async def _read(self, place: str, size: int, after: str | None) -> _JobPage:
        backend = self._mailbox.backend
        if place in (RESULT, CHAIN):
            records = await backend.list_records(place, size, after)
            of = status_of_chain if place == CHAIN else _status_of_result
            jobs = [_Found(of(record), after=record.key) for record in records]
            return _JobPage(jobs, records[-1].key if len(records) == size else None)
        if place == DEAD:
            return await self._read_dead(size, after)
        task_of, task = self._mailbox.codec.task_of, self._which.task
        query = MessageQuery(MessagePlace(place), size, after, task, self._which.key, self._which.since)
        messages, more = await backend.list_messages(query)
        jobs = [
            _Found(status_of_unfinished(each, task_of(each.message.body) or task), each.message.body, task is not None)
            for each in messages
        ]
        return _JobPage(jobs, more)

    async def _read_dead(self, size: int, after: str | None) -> _JobPage:
        """Read dead letters. ``after`` says the date of the last one and its id: it may have been replayed since."""
        backend, task_of, task = self._mailbox.backend, self._mailbox.codec.task_of, self._task_of_dead
        date, _, last_id = (after or "").partition(" ")
        died = float(date or 0)
        letters = await self._dead_letters(size, last_id or None)
        is_last = len(letters) < size
        if letters and letters[0][2] < died and not await backend.find_dead_letters([last_id]):
            while not is_last and letters[-1][2] < died:
                letters = await self._dead_letters(size, letters[-1][0].message_id)
                is_last = len(letters) < size
            letters = [letter for letter in letters if letter[2] >= died]
        jobs = [
            _Found(
                status_of_dead(message, dead, at, task_of(message.body) or task),
                message.body,
                is_of_task=task is not None,
                after=f"{at!r} {message.message_id}",
            )
            for message, dead, at in letters
        ]
        return _JobPage(jobs, None if is_last else jobs[-1].after)

    @property
    def _task_of_dead(self) -> str | None:
        """The task by which the store finds dead letters."""
        return self._which.task if self._mailbox.capabilities.listing else None

    async def _dead_letters(self, size: int, after: str | None) -> list[tuple[ClaimedMessage, Dead, float]]:
        backend, task = self._mailbox.backend, self._task_of_dead
        if task is None:
            return await backend.dead_letters(size, after)
        return await backend.dead_letters_of(task, size, after)


def _status_of_result(record: Record) -> JobStatus:
    return outcome_of_record(record).status


async def purge(mailbox: Mailbox[Any, Any], which: JobFilter) -> int:
    """Drop the jobs that are meant; see :meth:`Mailbox.purge`. Return how many."""
    dropped = 0
    for states in (which.states - UNFINISHED, which.states & UNFINISHED):  # a cancelled job leaves a kept end
        jobs = JobList(mailbox, replace(which, states=states), chains=False)
        while batch := await jobs.batch():
            dropped += await _drop(mailbox, batch)
    return dropped


async def _drop(mailbox: Mailbox[Any, Any], batch: Collection[JobStatus]) -> int:
    """Drop jobs together, as stores join such calls. Raise an error when all have ended."""
    dropped: list[str] = []
    errors: list[Exception] = []

    async def drop(job: JobStatus) -> None:
        try:
            if job.state not in UNFINISHED:
                await mailbox.backend.write_record(RecordWrite(RESULT, job.id, None))
            elif await mailbox.cancel(job.id) is CancelOutcome.UNKNOWN:
                return
            dropped.append(job.id)
        except Exception as error:  # out of a task, the caller would be given a group
            errors.append(error)

    dead = [job.id for job in batch if job.state in _PLACES[DEAD]]
    async with anyio.create_task_group() as together:
        for job in batch:
            if job.state not in _PLACES[DEAD]:
                together.start_soon(drop, job)
    if errors:
        raise errors[0]
    return len(dropped) + (await mailbox.backend.purge_dead_letters(dead) if dead else 0)
