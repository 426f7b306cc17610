"""Carries a run out: starts server, proxy, workers and senders, hurts them as planned, drains in peace, keeps the history."""

from __future__ import annotations

import json
import os
import random
import secrets
import signal
import sys
import time
from contextlib import AsyncExitStack, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread
import psutil
from chaos_backends import effects, make_table
from chaos_calls import Due
from chaos_history import Progress, given_back, read_runs
from chaos_judge import History, Life, Trouble
from chaos_plan import SCHEDULES, Fate, Fault, Kind, Settings, faults, job
from chaos_proxy import Proxy
from chaos_tasks import schedule_of, tasks_on

from mainspring import MailboxConnectionError, open_mailbox

if TYPE_CHECKING:
    from collections.abc import Callable

    from anyio.abc import Process
    from chaos_backends import Backend
    from chaos_plan import Job

    from mainspring import Context, Mailbox, Tasks
    from servers import Program

PROGRAM = Path(__file__).with_name("chaos_program.py")
MARK = "MAINSPRING_CHAOS_RUN"
"""In the environment of all processes of a run: their children are found by it."""
PLAIN, CALLS = "chaos", "calls"
"""The mailboxes of a run: of messages, and of the calls of tasks and schedules."""
START = 60.0
"""How long a server may take to come back, a process to say that it is ready, an end to come where it is only to be seen."""


class Member:
    """A process, and what is known of it."""

    def __init__(self, life: Life, process: Process) -> None:
        self.life = life
        self.process = process
        self.frozen = False

    def signal(self, number: int) -> bool:
        """Send a signal, if it has not ended; whether that was so.

        Not by the process object, which would take the exit status away from the event loop that waits for it too.
        """
        if self.life.ended is not None or self.process.returncode is not None:
            return False
        with suppress(ProcessLookupError):
            os.kill(self.process.pid, number)
            return True
        return False


class Fleet:
    """One run on one backend."""

    def __init__(self, backend: Backend, settings: Settings, directory: Path) -> None:
        self.backend = backend
        self.settings = settings
        self.directory = directory
        self.done = 0
        self.faults: dict[Kind, int] = dict.fromkeys(backend.kinds, 0)
        self.history = History(
            backend.name, settings.lease, settings.shutdown_budget, forgets=backend.forgets, two_steps=backend.two_steps,
            rate=settings.rate if backend.limits else None, must_claim_ahead=settings.must_claim_ahead,
        )  # fmt: skip
        self._chance = random.Random(f"{settings.seed} victims")
        self._mark = secrets.token_hex(8)
        self._members: list[Member] = []
        self._journals = Progress(directory)
        self._stopping = False
        self._restarting = anyio.Lock()
        self._server: Program | None = None
        self._proxy: Proxy | None = None
        self.began = self.ended = 0.0

    async def run(self) -> History:
        """All of it. What goes wrong stands in the history; only what cannot be tried at all is raised."""
        async with AsyncExitStack() as stack:
            if self.backend.server is not None:
                self._server = await anyio.to_thread.run_sync(self.backend.server)
                await anyio.to_thread.run_sync(self._server.__enter__)
                stack.callback(self._server.__exit__, None, None, None)
            async with anyio.create_task_group() as tasks:
                try:
                    if self._server is not None:
                        self._proxy = Proxy(self._server.port)
                        await tasks.start(self._proxy.serve)
                    self._set_up()
                    await self._make_schedules()
                    await self._chaos_and_peace()
                finally:
                    self._kill_all()
                    tasks.cancel_scope.cancel()
            await self._look_for_leftovers()
        self._read_journals()
        return self.history

    def _set_up(self) -> None:
        through = None if self._proxy is None else self._proxy.port
        if self.backend.table is not None:
            make_table(self._direct(PLAIN))
        self._options = self.backend.options(self.settings.lease, self.settings.call_timeout)
        setup = {
            "url": self.backend.url(self.directory, through, PLAIN),
            "calls": self.backend.url(self.directory, through, CALLS),
            "options": self._options,
            "settings": self.settings.as_json(),
            "table": self.backend.table,
            "directory": str(self.directory),
            "loops": self.backend.loops,
        }
        self._setup = self.directory / "setup.json"
        self._setup.write_text(json.dumps(setup))

    async def _make_schedules(self) -> None:
        """Make the schedules that no worker declares. Each of their ticks from then on has to have a call."""
        async with self._tasks() as tasks:
            for ticking in SCHEDULES:
                if not ticking.declared:
                    made = await tasks.schedules.add(schedule_of(ticking))
                    assert made.next_at is not None
                    self.history.due[ticking.name] = Due(made.next_at.timestamp(), ticking.period)

    async def _chaos_and_peace(self) -> None:
        self.began = time.monotonic()
        with anyio.move_on_after(self.settings.deadline) as whole:
            async with anyio.create_task_group() as tasks:
                senders = [anyio.Event() for _ in range(self.settings.senders)]
                for number, ended in enumerate(senders):
                    tasks.start_soon(self._keep_sender, number, ended)
                for slot in range(self.settings.workers):
                    tasks.start_soon(self._keep_worker, slot)
                with anyio.CancelScope() as quiet:
                    tasks.start_soon(self._watch, quiet)
                    await self._note_declared()
                    await self._hurt()
                    for ended in senders:
                        await ended.wait()
                    await self._pause_schedules()
                    await self._drained()
                self.ended = time.monotonic()
                if quiet.cancel_called:
                    self.history.hung.append(f"nothing was done for {self.settings.quiet:g} s")
                self._stopping = True
                for member in self._alive("worker"):
                    self._terminate(member)
                with anyio.move_on_after(self.settings.shutdown_budget + self.history.patience + 5):
                    while self._alive(""):
                        await anyio.sleep(0.05)
                tasks.cancel_scope.cancel()
        if whole.cancelled_caught:
            self.history.hung.append(f"the whole was not over after {self.settings.deadline:g} s")
        with anyio.CancelScope(shield=True, deadline=anyio.current_time() + START):
            await self._look_at_the_end()

    # -------------------------------------------------------------------------------------------------- the processes

    async def _keep_worker(self, slot: int) -> None:
        count = 0
        while not self._stopping:
            count += 1
            await self._live("work", f"worker-{count}-{slot}")
            await anyio.sleep(0.1)

    async def _keep_sender(self, number: int, ended: anyio.Event) -> None:
        count = 0
        while True:
            count += 1
            life = await self._live("send", f"sender-{number}", f"sender-{number} (life {count})")
            if life.status == 0:
                break
            await anyio.sleep(0.1)
        ended.set()

    async def _live(self, verb: str, name: str, title: str = "") -> Life:
        """A process from its start to its end."""
        life = Life(title or name, time.monotonic())
        errors = self.directory / f"{name}.err"
        with errors.open("ab") as output:
            process = await anyio.open_process(
                [sys.executable, str(PROGRAM), verb, str(self._setup), name],
                stdin=None,
                stdout=output,
                stderr=output,
                env={**os.environ, MARK: self._mark},
                start_new_session=True,
            )
        member = Member(life, process)
        self._members.append(member)
        self.history.lives.append(life)
        self._journals.follow(name, life)
        try:
            await process.wait()
        finally:
            if process.returncode is None:
                member.signal(signal.SIGKILL)
                with anyio.CancelScope(shield=True, deadline=anyio.current_time() + START):
                    await process.wait()
                life.killed = life.killed or time.monotonic()
            else:
                life.ended = time.monotonic()
            life.status = process.returncode
            life.said = errors.read_text(errors="replace")[-4_000:]
            with anyio.CancelScope(shield=True):
                await process.aclose()
        return life

    def _alive(self, role: str) -> list[Member]:
        return [each for each in self._members if each.life.ended is None and each.life.name.startswith(role)]

    def _kill_all(self) -> None:
        for member in self._alive(""):
            member.signal(signal.SIGKILL)

    async def _look_for_leftovers(self) -> None:
        """Whatever bears the mark, children that outlived their parents included, has an end."""
        until = time.monotonic() + START
        while found := await anyio.to_thread.run_sync(_marked, self._mark):
            if time.monotonic() > until:
                self.history.hung.append(f"processes that were left behind: {found}")
                for process in found:
                    with suppress(psutil.Error):
                        process.kill()
                return
            await anyio.sleep(0.2)

    # ------------------------------------------------------------------------------------------------------ the faults

    async def _hurt(self) -> None:
        """Each fault when its part of the work is done; those that last go on beside the next ones."""
        async with anyio.create_task_group() as tasks:
            for fault in faults(self.settings, self.backend.kinds):
                while self.done < fault.at * self.settings.messages:
                    await anyio.sleep(0.01)
                tasks.start_soon(self._do, fault)
                await anyio.sleep(0)

    async def _do(self, fault: Fault) -> None:
        acts: dict[Kind, Callable[[Fault], Any]] = {
            Kind.KILL: self._kill,
            Kind.TERM: self._term,
            Kind.FREEZE: self._freeze,
            Kind.SENDER: self._kill,
            Kind.SERVER: self._restart,
            Kind.CUT: self._cut,
            Kind.STALL: self._stall,
        }
        if await acts[fault.kind](fault):
            self.faults[fault.kind] += 1

    async def _victim(self, role: str) -> Member | None:
        """A process that is at work, and neither frozen nor told to end; there soon is one, as they are replaced."""
        with anyio.move_on_after(START):
            while True:
                fit = [
                    each
                    for each in self._alive(role)
                    if each.life.ready is not None and not each.frozen and each.life.terminated is None
                ]
                if fit:
                    return self._chance.choice(fit)
                if role == "sender" and not self._alive("sender"):
                    return None  # they have sent everything
                await anyio.sleep(0.02)
        self.history.hung.append(f"no {role} was ready for {START:g} s")
        return None

    async def _kill(self, fault: Fault) -> bool:
        member = await self._victim("sender" if fault.kind is Kind.SENDER else "worker")
        if member is None:
            return False
        member.life.killed = time.monotonic()
        return member.signal(signal.SIGKILL)

    async def _term(self, fault: Fault) -> bool:
        member = await self._victim("worker")
        return member is not None and self._terminate(member)

    def _terminate(self, member: Member) -> bool:
        if member.life.terminated is not None:
            return False
        member.life.terminated = time.monotonic()
        return member.signal(signal.SIGTERM)

    async def _freeze(self, fault: Fault) -> bool:
        member = await self._victim("worker")
        if member is None:
            return False
        member.frozen = True
        since = time.monotonic()
        frozen = member.signal(signal.SIGSTOP)
        try:
            await anyio.sleep(fault.seconds)
        finally:
            member.signal(signal.SIGCONT)
            member.life.freezes.append((since, time.monotonic()))
            member.frozen = False
        return frozen

    async def _restart(self, fault: Fault) -> bool:
        assert self._server is not None
        async with self._restarting:
            since = time.monotonic()
            try:
                with anyio.CancelScope(shield=True):  # a server is not left half-way
                    await anyio.to_thread.run_sync(self._server.stop, signal.SIGKILL)
                    await anyio.sleep(fault.seconds)
                    await anyio.to_thread.run_sync(_start_again, self._server)
                await self._answering()
            finally:
                self.history.troubles.append(Trouble("server", since, time.monotonic()))
        return True

    async def _answering(self) -> None:
        """Until the store can be used again: a server can listen long before it has read its files."""
        with anyio.move_on_after(START) as waiting:
            while True:
                try:
                    async with self._mailbox(PLAIN) as mailbox:
                        await mailbox.counts()
                    return
                except MailboxConnectionError:
                    await anyio.sleep(0.05)
        if waiting.cancelled_caught:
            self.history.hung.append(f"the server was not back {START:g} s after it was killed")

    async def _cut(self, fault: Fault) -> bool:
        assert self._proxy is not None
        since = time.monotonic()
        hit = await self._proxy.cut(fault.share, self._chance)
        self.history.troubles.append(Trouble("cut", since, time.monotonic()))
        return hit > 0

    async def _stall(self, fault: Fault) -> bool:
        assert self._proxy is not None
        since = time.monotonic()
        try:
            return await self._proxy.stall(fault.share, fault.seconds, self._chance) > 0
        finally:
            self.history.troubles.append(Trouble("stall", since, time.monotonic()))

    # --------------------------------------------------------------------------------------------------------- the end

    async def _watch(self, quiet: anyio.CancelScope) -> None:
        """Follow the journals; where they stand still for too long, call it off."""
        last = time.monotonic()
        while not self._stopping:
            done = await anyio.to_thread.run_sync(self._journals.look)
            if done != self.done:
                self.done, last = done, time.monotonic()
            elif time.monotonic() - last > self.settings.quiet:
                quiet.cancel()
                return
            await anyio.sleep(0.05)

    async def _drained(self) -> None:
        """Until nothing waits. It comes and goes meanwhile, as a deploy does: what a NATS server forgot is looked for then."""
        while True:
            async with self._mailbox(PLAIN) as mailbox, self._mailbox(CALLS) as calls:
                with anyio.move_on_after(self.settings.lease):
                    while (await mailbox.counts()).waiting or (await calls.counts()).waiting:
                        await anyio.sleep(0.1)
                    return

    async def _note_declared(self) -> None:
        """Wait until the workers have declared their schedules. From the next ticks on, each has to have a call."""
        periods = {ticking.name: ticking.period for ticking in SCHEDULES}
        due = self.history.due
        with anyio.move_on_after(START):
            async with self._tasks() as tasks:
                while len(due) < len(periods):
                    for found in await tasks.schedules.list():
                        if found.next_at is not None:
                            due.setdefault(found.name, Due(found.next_at.timestamp(), periods[found.name]))
                    await anyio.sleep(0.05)
        if missing := periods.keys() - due.keys():
            self.history.hung.append(f"schedules were not declared in {START:g} s: {', '.join(sorted(missing))}")

    async def _pause_schedules(self) -> None:
        """Pause all, once they have ticked twice and have caught up. Each tick before the next one has to have a call."""
        due = self.history.due
        async with self._tasks() as tasks:
            with anyio.move_on_after(START) as caught_up:
                while any(
                    found.next_at is None or found.next_at.timestamp() < max(time.time() - 1, due[found.name].after(2))
                    for found in await tasks.schedules.list()
                    if found.name in due
                ):
                    await anyio.sleep(0.1)
            if caught_up.cancelled_caught:
                self.history.hung.append(f"schedules did not tick any more: {await tasks.schedules.list()}")
            for name, ticks in due.items():
                paused = await tasks.schedules.pause(name)
                assert paused.next_at is not None
                ticks.end = paused.next_at.timestamp()

    def _direct(self, name: str) -> str:
        """The URL of a mailbox, past the proxy."""
        return self.backend.url(self.directory, None if self._server is None else self._server.port, name)

    def _mailbox(self, name: str) -> Mailbox[Any, Any]:
        return open_mailbox(self._direct(name), body=Any, **self._options)

    def _tasks(self) -> Tasks:
        async def handle(job: Job | str, ctx: Context) -> None:
            """No loop runs here."""

        return tasks_on(open_mailbox(self._direct(CALLS), **self._options), self.settings, handle)

    async def _look_at_the_end(self) -> None:
        history = self.history
        try:
            for name in (PLAIN, CALLS):
                async with self._mailbox(name) as mailbox:
                    counts = await mailbox.counts()
                    history.left += counts.waiting
                    history.counts += f"{name}: {counts} "
                    after = None
                    while letters := await mailbox.dead_letters(limit=1_000, after=after):
                        history.dead |= {letter.message_id for letter in letters}
                        after = letters[-1].message_id
            if self.backend.table is not None:
                history.effects = await anyio.to_thread.run_sync(effects, self._direct(PLAIN))
        except MailboxConnectionError as error:
            history.hung.append(f"the store could not be read at the end: {error}")

    def _read_journals(self) -> None:
        self._journals.look()
        accepted = self._journals.accepted
        self.history.accepted = {each: at for each, (_, at) in accepted.items()}
        numbers = {number for number, _ in accepted.values()}
        fates = {number: job(self.settings, number)[0].fate for number in numbers}
        self.history.rejected = {each for each, (number, _) in accepted.items() if fates[number] is Fate.REJECTED}
        if missing := set(range(self.settings.messages)) - numbers:
            self.history.hung.append(f"{len(missing)} messages were never accepted, as of number {min(missing)}")
        self.history.runs, self.history.given_back = read_runs(self.directory), given_back(self.directory)
        known = {"lives": [asdict(life) for life in self.history.lives], "troubles": self.history.troubles}
        (self.directory / "history.json").write_text(json.dumps(known, default=asdict, indent=1))


def _start_again(server: Program) -> None:
    """Start a server that was killed, as often as it takes: what is left of the old one can be in its way for a while."""
    until = time.monotonic() + START
    while True:
        try:
            server.start()
        except RuntimeError:
            server.stop()
            if time.monotonic() > until:
                raise
            time.sleep(0.1)
        else:
            return


def _marked(mark: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found
