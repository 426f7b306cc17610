"""One worker or one sender of a chaotic run: ``python chaos_program.py work|send SETUP NAME``.

``SETUP`` is a file of JSON: ``url`` of the plain mailbox, ``calls`` (the URL of the mailbox of tasks and schedules),
``options``, ``settings``, ``table`` (of the effects, where the mailboxes have transactions), ``directory`` (of the journals).
``NAME`` is the journal's.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import defaultdict
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
from chaos_journal import Journal, Reader
from chaos_plan import Fate, Job, Settings, job
from chaos_tasks import declare, tasks_on

from mainspring import (
    Context,
    DeadLetterPolicy,
    LoopGroup,
    MailboxConnectionError,
    MainLoop,
    Reject,
    RetryPolicy,
    open_mailbox,
)
from mainspring.core.state_machine import GroupState
from mainspring.events import GroupStateChanged, MessageFinished

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from mainspring import Mailbox, Tasks

ATTEMPTS = 25
"""More than a message can lose to faults: the dead letters are those that were rejected."""
AT_ONCE = 64
"""Sends of a sender that are out at the same time."""


class Setup:
    """What a process was told."""

    def __init__(self, path: Path, name: str) -> None:
        given = json.loads(path.read_text())
        self.settings = Settings(**given["settings"])
        self.table: str | None = given["table"]
        self.journal_path = Path(given["directory"]) / f"{name}.jsonl"
        self.given = given

    def mailbox(self) -> Mailbox[Job, None]:
        return open_mailbox(self.given["url"], body=Job, **self.given["options"])

    def calls(self) -> Mailbox[Any, Any]:
        return open_mailbox(self.given["calls"], **self.given["options"])


class Handler:
    """Writes down each run of its: what it began with, how it ended, and its effect."""

    def __init__(self, journal: Journal, table: str | None) -> None:
        self._journal = journal
        self._table = table
        self._runs = 0
        self._ahead = time.monotonic() - anyio.current_time()  # of the event loop's clock, as leases are told by it

    async def handle(self, in_hand: Callable[[], int], job: Job | str, ctx: Context) -> None:
        """Do a job, or note that the schedule of a name has ticked."""
        message = ctx.message
        leased = None if message.leased_at is None else message.leased_at + self._ahead
        self._runs = run = self._runs + 1
        facts = {"id": message.id, "receipt": ctx.run_id, "delivery": message.delivery_count, "leased": leased}
        facts["hand"] = in_hand()
        if isinstance(job, str):
            assert ctx.scheduled_for is not None
            facts |= {"schedule": job, "tick": ctx.scheduled_for.timestamp()}
        elif job.task is not None:
            facts |= {"task": job.task, "key": job.key, "number": job.number}
        self._journal.note("begun", run=run, **facts)
        how = "cancelled"
        try:
            if isinstance(job, str):
                self._journal.note("ticked", run=run)
                await self._journal.secure()
            else:
                await self._work(job, ctx, run)
            how = "done"
        except Exception as error:
            how = f"failed: {type(error).__name__}"
            raise
        finally:
            self._journal.note("ended", run=run, how=how)

    async def _work(self, job: Job, ctx: Context, run: int) -> None:
        if job.fate is Fate.REJECTED or not job.whole:
            raise Reject("as it is meant to be")
        if job.fate is Fate.SECOND and ctx.message.delivery_count == 1:
            raise ValueError("as it is meant to be")
        if self._table is None or job.quick:
            await anyio.sleep(job.takes)
            self._journal.note("effect", run=run)
            await self._journal.secure()
        else:
            await anyio.sleep(job.takes / 2)
            async with ctx.transaction() as connection:
                await connection.execute(f"INSERT INTO {self._table} VALUES (%s, %s)", (ctx.request_id, ctx.run_id))
                await anyio.sleep(job.takes / 2)
                self._journal.note("committing", run=run)
            self._journal.note("effect", run=run, committed=True)


async def work(setup: Setup, name: str) -> int:
    """Work until a signal; the exit status."""
    settings, journal = setup.settings, Journal(setup.journal_path)
    ready = False

    async def handle(job: Job, ctx: Context) -> None:
        await handler.handle(lambda: loop.in_flight, job, ctx)

    async def handle_call(job: Job | str, ctx: Context) -> None:
        await handler.handle(lambda: of_tasks.in_flight, job, ctx)

    def finished(event: MessageFinished) -> None:
        journal.note("outcome", id=event.message_id, receipt=event.run_id, outcome=event.outcome)

    def moved(event: GroupStateChanged) -> None:
        nonlocal ready
        if event.new is GroupState.RUNNING:
            journal.note("ready", handlers=handlers)
            ready = True

    handlers = settings.handlers(int(name.rpartition("-")[2]))
    handler = Handler(journal, setup.table)
    policies: Any = {
        "retry": RetryPolicy(initial_delay=0.05, max_delay=1.0),
        "dead_letter": DeadLetterPolicy(max_attempts=ATTEMPTS, max_crashes=ATTEMPTS),
    }
    of_loop: Any = {"concurrency": handlers, "visibility_timeout": settings.lease, "wait_time_seconds": 5}
    tasks = tasks_on(setup.calls(), settings, handle_call, **policies)
    declare(tasks)
    loop = MainLoop(setup.mailbox(), handle, **of_loop, **policies)
    of_tasks = tasks.loop(**of_loop)
    group = LoopGroup([loop, of_tasks], shutdown_timeout=settings.shutdown_timeout, cancel_grace=settings.cancel_grace)
    group.dispatcher.subscribe(MessageFinished, finished)
    group.dispatcher.subscribe(GroupStateChanged, moved)
    try:
        report = await group.run()
    except MailboxConnectionError as error:
        if ready:
            raise
        sys.stderr.write(f"the mailbox cannot be opened: {error}\n")
        return os.EX_TEMPFAIL  # a supervisor starts it again
    journal.note("stopped", report=str(report))
    return report.exit_status


class Sender:
    """Sends its share of the numbers, each until it is accepted; what its journal says is accepted it does not send again."""

    def __init__(self, setup: Setup, numbers: range, mailbox: Mailbox[Job, None], tasks: Tasks) -> None:
        known = {line["number"] for line in Reader(setup.journal_path).lines() if line["what"] == "accepted"}
        self._settings = setup.settings
        self._journal = Journal(setup.journal_path)
        self._numbers = iter([number for number in numbers if number not in known])
        self._mailbox = mailbox
        self._tasks = tasks
        self._in_turn: defaultdict[tuple[str, str], anyio.Lock] = defaultdict(anyio.Lock)

    async def run(self) -> None:
        """Send all."""
        self._journal.note("ready")
        async with anyio.create_task_group() as tasks:
            for _ in range(AT_ONCE):
                tasks.start_soon(self._send_some)

    async def _send_some(self) -> None:
        for number in self._numbers:
            body, delay = job(self._settings, number)
            if body.task is None:
                await self._send(body, partial(self._mailbox.send, body, delay=delay, dedup_key=str(number)))
            else:
                task = self._tasks.registered[body.task].options(delay=delay, dedup_key=str(number))
                async with self._in_turn[body.task, body.key]:  # of one key in the order of the numbers
                    await self._send(body, partial(task.send, body.key, body))
            if number % 200 < self._settings.senders:
                while await self._until_it_works(self._waiting) > self._settings.ahead:
                    await anyio.sleep(0.05)

    async def _send(self, body: Job, send: Callable[[], Awaitable[Any]]) -> None:
        sent = await self._until_it_works(send)
        self._journal.note("accepted", number=body.number, id=getattr(sent, "id", sent))

    async def _waiting(self) -> int:
        return await self._mailbox.approximate_count() + await self._tasks.mailbox.approximate_count()

    async def _until_it_works(self, call: Any) -> Any:
        while True:
            try:
                return await call()
            except MailboxConnectionError as error:
                self._journal.note("refused", error=str(error))
                await anyio.sleep(0.1)


async def send(setup: Setup, name: str) -> int:
    """Send this sender's share."""
    settings = setup.settings
    numbers = range(int(name.rpartition("-")[2]), settings.messages, settings.senders)
    mailbox, tasks = setup.mailbox(), tasks_on(setup.calls(), settings, _no_handler)
    async with AsyncExitStack() as stack:
        for opened in (mailbox, tasks):
            await _opened(opened, stack)
        await Sender(setup, numbers, mailbox, tasks).run()
    return 0


async def _opened(opened: Mailbox[Any, Any] | Tasks, stack: AsyncExitStack) -> None:
    while True:
        try:
            await stack.enter_async_context(opened)
        except MailboxConnectionError:
            await anyio.sleep(0.1)
        else:
            return


async def _no_handler(job: Job | str, ctx: Context) -> None:
    """A sender runs nothing."""


def main(verb: str, path: str, name: str) -> int:
    setup = Setup(Path(path), name)
    call = partial(work if verb == "work" else send, setup, name)
    backend, options = setup.given["loops"][int(name.rpartition("-")[2]) % len(setup.given["loops"])]
    return anyio.run(call, backend=backend, backend_options=options)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
