"""``SimulatedSpawner``: supervised services without processes, in virtual time, and a record of all that was started.

A *program* is an async function that is given its :class:`SimulatedProcess`; :class:`SimulatedProgram` makes the usual ones
from values. A process runs as a task. The process that was launched and all that it forks are one *family*: the family ends
when nothing of it is left. A cancellation of the supervisor does not reach a process, as it would not reach a real one.
"""

from __future__ import annotations

import math
import random
import signal
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, NoReturn, TypeAlias

import anyio

from mainspring.services.spawning import ProcessEnd, SpawnError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from mainspring.services.spawning import Launch, ProcessListener, SpawnedProcess, Stream

_HARMLESS = frozenset({signal.SIGCHLD, signal.SIGCONT, signal.SIGURG, signal.SIGWINCH})
FIRST_PID = 1_000


class SignalSent(NamedTuple):
    """A signal that the supervisor sent to a process. ``at``: the instant. ``family``: it went to all that was left."""

    at: float
    signum: int
    family: bool = False


@dataclass(slots=True, eq=False)
class ProcessRecord:
    """What became of a simulated process. Instants are of the event loop's clock; None: it has not happened.

    ``family`` is the pid of the process that was launched: its own, or that of the process from which it descends.
    ``ready_at``: when it first notified READY. ``returncode``: its exit status, or minus the signal that ended it.
    ``abandoned``: it still ran when the spawner was left.
    """

    launch: Launch
    pid: int
    family: int
    started_at: float
    ready_at: float | None = None
    ended_at: float | None = None
    returncode: int | None = None
    signals: list[SignalSent] = field(default_factory=list)
    abandoned: bool = False

    @property
    def was_launched(self) -> bool:
        """True if the supervisor launched it, False if another process forked it."""
        return self.pid == self.family

    @property
    def name(self) -> str:
        """The replica whose process it is, as in ``web.1``."""
        return f"{self.launch.service}.{self.launch.replica}"

    @property
    def killed_at(self) -> float | None:
        """When it was first sent SIGKILL."""
        return next((sent.at for sent in self.signals if sent.signum == signal.SIGKILL), None)

    @property
    def told_at(self) -> float | None:
        """When it was first sent SIGTERM."""
        return next((sent.at for sent in self.signals if sent.signum == signal.SIGTERM), None)

    def __str__(self) -> str:
        end = "runs" if self.ended_at is None else f"to {self.ended_at:g} s, ended with {self.returncode}"
        sent = "".join(f", {signal.Signals(each.signum).name} at {each.at:g} s" for each in self.signals)
        kind = "" if self.was_launched else f" of {self.family}"
        return f"{self.name} {self.launch.command[0]} [{self.pid}{kind}] from {self.started_at:g} s {end}{sent}"


class _SimulatedExit(BaseException):
    def __init__(self, returncode: int, limit: str | None) -> None:
        super().__init__(returncode)
        self.end = ProcessEnd(returncode, limit)


class SimulatedProcess:
    """A process as its program sees it. Signals end it by default, as they do a real one.

    ``random`` is its own generator, which follows from the spawner's seed and the process's place in its replica's life.
    """

    def __init__(self, member: _FamilyMember, rng: random.Random) -> None:
        self.launch = member.record.launch
        self.pid = member.record.pid
        self.random = rng
        self.memory = 1 << 20
        """Its resident bytes, as the supervisor reads them; set it to simulate a leak."""
        self.dies_in = 0.0
        """Seconds for which it is still there after a signal has ended it, as where it waits for a disk."""
        self._member = member

    def __repr__(self) -> str:
        return f"<SimulatedProcess {self._member.record}>"

    def write(self, line: str, stream: Stream = "stdout") -> None:
        """Write a line."""
        self._member.family.tell_listener(lambda listener: listener.on_line(stream, line))

    def notify(self, **news: str) -> None:
        """Notify the supervisor as ``sd_notify`` does: ``notify(READY="1")``."""
        record = self._member.record
        if news.get("READY") == "1" and record.ready_at is None:
            record.ready_at = anyio.current_time()
        self._member.family.tell_listener(lambda listener: listener.on_notify(news))

    def ignore(self, *signums: int) -> None:
        """Ignore these signals from now on. SIGKILL cannot be ignored."""
        self._member.ignored.update(signums)

    def handle(self, *signums: int) -> None:
        """Take these signals by :meth:`next_signal` from now on. SIGKILL cannot be handled."""
        self._member.handled.update(signums)

    async def next_signal(self) -> int:
        """Wait for a signal that it handles, and return it."""
        return await self._member.next_signal()

    def fork(self, program: Program) -> SimulatedProcess:
        """Start another process of the family, which goes on when this one has ended."""
        return self._member.family.add(program, self.launch).process

    def exit(self, status: int = 0) -> NoReturn:
        """End with an exit status. A program that returns ends with what it returns, or 0; one that raises ends with 1."""
        raise _SimulatedExit(status, None)

    def die(self, signum: int = signal.SIGSEGV, limit: str | None = None) -> NoReturn:
        """End by a signal from elsewhere; ``limit`` names the limit that it reached."""
        raise _SimulatedExit(-signum, limit)


Program: TypeAlias = "Callable[[SimulatedProcess], Awaitable[int | None]]"
"""What a simulated process does. What it returns is its exit status; None is 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedProgram:
    """A program made of values. Times are in seconds.

    :param ready_in: it notifies READY after that time. None: never.
    :param lines: it writes these first.
    :param ready_line: it writes this when it is ready.
    :param lives: it ends by itself that long after it was ready, or after its start where it is never ready.
    :param crashes_every: it ends by SIGSEGV at random, that often on average.
    :param returncode: how it then ends: an exit status, or minus a signal.
    :param stops_in: how long it takes to end with status 0 after a SIGTERM. None: it ignores SIGTERM.
    :param dies_in: how long it is still there after a signal has ended it.
    :param children: processes that it forks at its start. They go on when it ends.
    """

    ready_in: float | None = 0.0
    lines: tuple[str, ...] = ()
    ready_line: str | None = None
    lives: float = math.inf
    crashes_every: float = math.inf
    returncode: int = 0
    stops_in: float | None = 0.0
    dies_in: float = 0.0
    children: tuple[SimulatedProgram, ...] = ()

    async def __call__(self, process: SimulatedProcess) -> int:
        """Run as ``process``."""
        process.dies_in = self.dies_in
        if self.stops_in is None:
            process.ignore(signal.SIGTERM)
        else:
            process.handle(signal.SIGTERM)
        for child in self.children:
            process.fork(child)
        for line in self.lines:
            process.write(line)
        crash_at = anyio.current_time() + (
            process.random.expovariate(1 / self.crashes_every) if self.crashes_every < math.inf else math.inf
        )
        if self.ready_in is not None:
            if await self._told_to_stop(process, self.ready_in, crash_at):
                return 0
            if self.ready_line is not None:
                process.write(self.ready_line)
            process.notify(READY="1")
        if await self._told_to_stop(process, self.lives, crash_at):
            return 0
        if self.returncode < 0:
            process.die(-self.returncode)
        return self.returncode

    async def _told_to_stop(self, process: SimulatedProcess, seconds: float, crash_at: float) -> bool:
        """Wait. Return True if it was told to stop, and has cleaned up. It may crash meanwhile."""
        told = False
        with anyio.CancelScope(deadline=crash_at):
            with anyio.move_on_after(seconds):
                await process.next_signal()
                told = True
            if told:
                await anyio.sleep(self.stops_in or 0.0)
        if crash_at <= anyio.current_time():
            process.die()
        return told


class _FamilyMember:
    """A process as its family and the system see it."""

    def __init__(self, family: _SimulatedFamily, record: ProcessRecord, rng: random.Random) -> None:
        self.family = family
        self.record = record
        self.process = SimulatedProcess(self, rng)
        self.handled: set[int] = set()
        self.ignored: set[int] = set()
        self._scope = anyio.CancelScope(shield=True)
        self._waiting: deque[int] = deque()
        self._news = anyio.Event()
        self._end: ProcessEnd | None = None

    @property
    def ended(self) -> bool:
        """True if it has ended, and nothing is left of it."""
        return self.record.ended_at is not None

    async def next_signal(self) -> int:
        while not self._waiting:
            await self._news.wait()
        return self._waiting.popleft()

    def take(self, sent: SignalSent) -> None:
        """Take a signal from the supervisor."""
        if self.ended:
            return
        self.record.signals.append(sent)
        is_kill = sent.signum == signal.SIGKILL
        if not is_kill and sent.signum in self.ignored | _HARMLESS:
            return
        if not is_kill and sent.signum in self.handled:
            self._waiting.append(sent.signum)
            self._news.set()
            self._news = anyio.Event()
            return
        self._end = self._end or ProcessEnd(-sent.signum)
        self._scope.cancel()

    async def run(self, program: Program) -> None:
        """Run the program to its end, and note the end."""
        end = ProcessEnd(0)
        with self._scope:
            try:
                end = ProcessEnd(await program(self.process) or 0)
            except _SimulatedExit as exit_:
                end = exit_.end
            except Exception as error:
                if error is self.family.listener_error:
                    raise
                self.process.write(f"{type(error).__name__}: {error}", "stderr")
                end = ProcessEnd(1)
        if self._end is None:
            self._end = end
        with anyio.CancelScope(shield=True):
            if self._scope.cancel_called and self.process.dies_in:
                await anyio.sleep(self.process.dies_in)
            self.record.ended_at = anyio.current_time()
            self.record.returncode = self._end.returncode
            await self.family.tell(self, self._end)


class _SimulatedFamily:
    """A process that was launched, and all that descends from it. It is the :class:`SpawnedProcess` of the simulation."""

    def __init__(self, system: _SimulatedSystem, listener: ProcessListener) -> None:
        self.listener_error: Exception | None = None
        """What the listener raised, which is no error of the program."""
        self._listener = listener
        self._system = system
        self._members: list[_FamilyMember] = []
        self._ended: ProcessEnd | None = None
        self._told = anyio.Event()
        self._empty = anyio.Event()
        self._killed: SignalSent | None = None

    @property
    def pid(self) -> int:
        return self._members[0].record.pid

    @property
    def memory(self) -> int | None:
        return None if self._members[0].ended else self._members[0].process.memory

    @property
    def limited_by(self) -> Mapping[str, str]:
        return {}

    async def wait(self) -> ProcessEnd:
        await self._told.wait()
        assert self._ended is not None
        return self._ended

    async def wait_empty(self) -> None:
        await self._empty.wait()

    def send_signal(self, signum: int) -> None:
        first = self._members[0]
        sent = SignalSent(anyio.current_time(), int(signum), first.ended)
        for member in self._left() if first.ended else [first]:
            member.take(sent)

    def kill(self) -> None:
        if self._killed is None:
            self._killed = SignalSent(anyio.current_time(), signal.SIGKILL, family=True)
            for member in self._left():
                member.take(self._killed)

    def add(self, program: Program, launch: Launch) -> _FamilyMember:
        """Start a process of the family. One that appears while the family is being killed is killed too."""
        member = self._system.start(self, program, launch, self.pid if self._members else None)
        self._members.append(member)
        if self._killed is not None:
            member.take(self._killed)
        return member

    def tell_listener(self, tell: Callable[[ProcessListener], object]) -> None:
        """Tell the listener something."""
        try:
            tell(self._listener)
        except Exception as error:
            self.listener_error = error
            raise

    async def tell(self, member: _FamilyMember, end: ProcessEnd) -> None:
        """Take the end of a process, and tell of it: a little later, where the spawner has latency."""
        await self._system.pause()
        if member is self._members[0]:
            self._ended = end
            self._told.set()
        if not self._left():
            self._empty.set()

    def _left(self) -> list[_FamilyMember]:
        return [member for member in self._members if not member.ended]


class _SimulatedSystem:
    """Starts processes, and keeps the record of them."""

    def __init__(self, records: list[ProcessRecord], seed: int, latency: Callable[[], float] | None) -> None:
        self.tasks: anyio.abc.TaskGroup | None = None
        self._records = records
        self._started: Counter[tuple[str, int]] = Counter()
        self._seed = seed
        self._latency = latency

    async def pause(self) -> None:
        """Wait for as long as something takes."""
        await anyio.sleep(0.0 if self._latency is None else self._latency())

    def start(self, family: _SimulatedFamily, program: Program, launch: Launch, of: int | None) -> _FamilyMember:
        """Start a process of a family; ``of`` is the pid of the family's first."""
        if self.tasks is None:
            raise SpawnError("the spawner was left")
        pid = FIRST_PID + len(self._records)
        tag = launch.service, launch.replica
        self._started[tag] += 1
        rng = random.Random(f"{self._seed} {tag} {self._started[tag]}")  # noqa: S311 - to be reproducible
        member = _FamilyMember(family, ProcessRecord(launch, pid, of or pid, anyio.current_time()), rng)
        self._records.append(member.record)
        self.tasks.start_soon(member.run, program, name=f"process {pid}")
        return member


class SimulatedSpawner:
    """A spawner whose processes are simulated, for tests of services in virtual time. An async context manager.

    ``records`` tells of every process, in the order in which they were started, also after the spawner was left.

    :param programs: what runs, by the first word of a command. A change counts for what is started from then on. A command that
        is not in it cannot be started, as a program that does not exist; an exception in it is raised by :meth:`spawn`.
    :param seed: of each process's own generator.
    :param latency: called for the seconds that each start takes, and each news of an end; None: no time.
    """

    def __init__(
        self,
        programs: Mapping[str, Program | Exception],
        *,
        seed: int = 0,
        latency: Callable[[], float] | None = None,
    ) -> None:
        self.programs = dict(programs)
        self.records: list[ProcessRecord] = []
        self._system = _SimulatedSystem(self.records, seed, latency)
        self._families: list[_SimulatedFamily] = []

    def __repr__(self) -> str:
        return f"<SimulatedSpawner {len(self.running())} of {len(self.records)} processes run>"

    async def __aenter__(self) -> SimulatedSpawner:
        tasks = self._system.tasks = anyio.create_task_group()
        await tasks.__aenter__()
        return self

    async def __aexit__(self, *exc: object) -> bool | None:
        tasks, self._system.tasks = self._system.tasks, None
        assert tasks is not None
        for record in self.running():
            record.abandoned = True
        for family in self._families:
            family.kill()
        return await tasks.__aexit__(*exc)  # type: ignore[arg-type]

    async def spawn(self, launch: Launch, listener: ProcessListener) -> SpawnedProcess:
        """Start the program of a command. See :class:`mainspring.services.spawning.Spawner`.

        :raises SpawnError: there is no such program, or the spawner is not entered.
        """
        await self._system.pause()
        name = launch.command[0]
        program = self.programs.get(name)
        if program is None:
            raise SpawnError(f"{name}: there is no such program")
        if isinstance(program, Exception):
            raise program
        if self._system.tasks is None:
            raise SpawnError(f"{name}: the spawner was left")
        family = _SimulatedFamily(self._system, listener)
        family.add(program, launch)
        self._families.append(family)
        try:
            await self._system.pause()
        except BaseException:
            family.kill()
            raise
        return family

    # ------------------------------------------------------------------------------------------------ what has happened

    def running(self, service: str | None = None) -> list[ProcessRecord]:
        """Return the processes that run now: all, or those of one service."""
        return [each for each in self.of(service) if each.ended_at is None]

    def of(self, service: str | None = None, *, launched: bool = False) -> list[ProcessRecord]:
        """Return all processes of a service, or of all services. ``launched``: only those that were not forked."""
        return [
            each
            for each in self.records
            if (service is None or each.launch.service == service) and (each.was_launched or not launched)
        ]

    def doubles(self) -> list[tuple[ProcessRecord, ProcessRecord]]:
        """Return the pairs of families that ran the same command of the same replica at the same time. It should be empty."""
        until: dict[int, float] = {}
        for record in self.records:
            ended_at = math.inf if record.ended_at is None else record.ended_at
            until[record.family] = max(ended_at, until.get(record.family, 0.0))
        last: dict[tuple[str, int, tuple[str, ...]], ProcessRecord] = {}
        found = []
        for record in self.of(launched=True):
            key = (record.launch.service, record.launch.replica, record.launch.command)
            if key in last and until[last[key].family] > record.started_at:
                found.append((last[key], record))
            last[key] = record
        return found
