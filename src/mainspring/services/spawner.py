"""The real spawner: starts processes through a small program, and is told by that how they end.

:class:`ProcessSpawner` starts the program (``spawner_main``) at its first launch, and another one after that has died. One task
serves the program's socket, the output and the notifications of all processes.

When the program dies, its descendants become this process's, which is a subreaper for as long as the spawner is open. Each that
belongs to a launch is killed. Until nothing is left of them, no other program is started.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
from collections import deque
from contextlib import ExitStack, suppress
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread

from mainspring.core import process
from mainspring.services import spawner_main
from mainspring.services.accounts import find_account
from mainspring.services.notify_socket import NotifySocket
from mainspring.services.output import OutputLines, Readiness
from mainspring.services.spawn_failures import cause_of, spawn_error
from mainspring.services.spawning import ProcessEnd

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from mainspring.services.accounts import UserAccount
    from mainspring.services.spawning import Launch, ProcessListener

LAUNCHES_AT_ONCE = 32
"""Launches that the program has not answered yet, at most."""
MOST_DESCRIPTORS = spawner_main.MAX_DESCRIPTORS - 5
LIMITS = ("memory", "cpu_seconds", "open_files", "processes")


class LaunchedProcess:
    """A process that the program has started, as its supervisor sees it."""

    def __init__(self, program: Program, number: int, launch: Launch, listener: ProcessListener) -> None:
        self.instance = f"{program.token}.{number}"
        self.is_empty = False
        self._program = program
        self._number = number
        self._launch = launch
        self._listener = listener
        self._pid = 0
        self._limited_by: dict[str, str] = {}
        self._failure: str | None = None
        self._end: ProcessEnd | None = None
        self._started = anyio.Event()
        self._ended = anyio.Event()
        self._empty = anyio.Event()
        self._outputs: list[OutputLines] = []
        self._notify: NotifySocket | None = None

    def __repr__(self) -> str:
        state = "empty" if self.is_empty else "ended" if self._end is not None else "running"
        return f"<LaunchedProcess {self._launch.service}.{self._launch.replica} pid={self._pid} {state}>"

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._pid

    @property
    def has_end(self) -> bool:
        """True if the news of its end has come."""
        return self._end is not None

    @property
    def memory(self) -> int | None:
        """Resident bytes of the process; None where it has ended."""
        if self._end is not None:
            return None
        try:
            with open(f"/proc/{self._pid}/statm", "rb") as file:
                return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")
        except (OSError, IndexError):
            return None

    @property
    def limited_by(self) -> Mapping[str, str]:
        """What holds each limit that was asked for."""
        return MappingProxyType(self._limited_by)

    async def wait(self) -> ProcessEnd:
        """Wait until the process has ended, and all that it wrote until then was told."""
        await self._ended.wait()
        assert self._end is not None
        return self._end

    async def wait_empty(self) -> None:
        """Wait until nothing is left of it."""
        await self._empty.wait()

    async def wait_started(self) -> None:
        """Wait until its program runs.

        :raises SpawnError: it cannot.
        """
        await self._started.wait()
        if self._failure is not None:
            raise spawn_error(self._launch, self._failure)

    def send_signal(self, signum: int) -> None:
        """Send a signal to the process. Where it has ended, send it to all that is left of it."""
        if not self.is_empty:
            self._program.send({"number": self._number, "signal": int(signum)})

    def kill(self) -> None:
        """Send SIGKILL to all that is left of it, and to what appears until nothing is left."""
        if not self.is_empty:
            self._program.send({"number": self._number, "kill": True})

    # -- for the program

    def open(
        self, readiness: Readiness, stack: ExitStack, account: UserAccount | None
    ) -> tuple[list[int], dict[str, str]]:
        """Open its pipes and its notify socket.

        Return the descriptors that the program gets (those for reading, those for writing) and the environment.
        """
        launch = self._launch
        reading, writing = [], []
        for stream in ("stdout", "stderr"):
            read, write = os.pipe()
            stack.callback(os.close, write)
            writing.append(write)
            os.set_blocking(read, False)
            lines = OutputLines(read, partial(self._listener.on_line, stream))
            self._outputs.append(lines)
            reading.append(read)
            readiness.add(read, partial(self._read, lines))
        environment = {**({} if account is None else account.environment), **launch.environment}
        outer = environment.get(spawner_main.INSTANCE)
        environment[spawner_main.INSTANCE] = f"{outer}/{self.instance}" if outer else self.instance
        if launch.notify:
            users = {0, os.geteuid()} | (set() if account is None else {account.ids[0]})
            self._notify = NotifySocket(
                f"mainspring/{self.instance}/{secrets.token_hex(8)}", users, self._listener.on_notify
            )
            readiness.add(self._notify.fileno(), self._notify.step)
            environment["NOTIFY_SOCKET"] = self._notify.name
        return [*reading, *writing], environment

    def has_started(self, pid: int, limited_by: dict[str, str]) -> None:
        """Take the news that its program runs."""
        self._pid = pid
        self._limited_by = limited_by
        if self._notify is not None:
            self._notify.pid = pid
        self._started.set()

    def has_failed(self, stage: str, number: int, detail: str) -> None:
        """Take the news that it cannot be started."""
        if not self._started.is_set():
            self._failure = cause_of(self._launch, stage, number, detail)
            self._started.set()

    def has_ended(self, returncode: int, limit: str | None) -> None:
        """Take the news of its end: it is told when all that was written before it was."""
        if self._end is None:
            self._end = ProcessEnd(returncode, limit)
            self._settle(self._ended)

    def has_emptied(self) -> None:
        """Take the news that nothing is left of it."""
        if not self.is_empty:
            self.is_empty = True
            self._settle(self._empty)

    def close(self) -> None:
        """Close its pipes and its notify socket (idempotent). What waits for it goes on."""
        for lines in self._outputs:
            self._program.readiness.remove(lines.descriptor)
            os.close(lines.descriptor)
        self._outputs.clear()
        if self._notify is not None:
            self._program.readiness.remove(self._notify.fileno())
            self._notify.close()
            self._notify = None

    def _read(self, lines: OutputLines) -> bool:
        more = lines.step()
        if lines.at_end:
            self._program.readiness.remove(lines.descriptor)
        return more

    def _settle(self, told: anyio.Event) -> None:
        """Set the event when all was told that is in the pipes and the notify socket now."""
        if self._notify is not None:
            self._notify.step()
        waiting = len(self._outputs)

        def settled() -> None:
            nonlocal waiting
            waiting -= 1
            if waiting <= 0:
                told.set()
                if self._empty.is_set():
                    self.close()

        for lines in self._outputs:
            lines.settle(settled)
        if not self._outputs:
            settled()


class Program:
    """The running program: its socket, its end, and what it has started."""

    def __init__(self, readiness: Readiness, *, cgroups: bool) -> None:
        self.readiness = readiness
        self.cgroup: str | None = None
        """The folder of the cgroup below which that of each process is."""
        self.token = secrets.token_hex(8)
        self.processes: dict[int, LaunchedProcess] = {}
        self.lost = anyio.Event()
        """Set when it answers no longer."""
        self.buried = anyio.Event()
        """Set when nothing is left of it and of all that it had started."""
        self.crash = ""
        self._count = 0
        self._unsent: deque[tuple[bytes, list[int]]] = deque()
        flags = socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, flags)
        with theirs:
            try:
                self.child = subprocess.Popen(
                    [
                        _interpreter(),
                        "-I",
                        "-S",
                        spawner_main.__file__,
                        str(theirs.fileno()),
                        str(os.getpid()),
                        str(int(cgroups)),
                    ],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(),),
                    cwd="/",
                    start_new_session=True,
                )
                self._end = os.pidfd_open(self.child.pid)
            except BaseException:
                self._socket.close()
                raise
        readiness.add(self._socket.fileno(), self._step)

    def launch(self, launch: Launch, listener: ProcessListener, account: UserAccount | None) -> LaunchedProcess:
        """Ask for a process. Its ``wait_started`` tells what came of it.

        :raises OSError: there are no descriptors left.
        """
        self._count += 1
        number = self._count
        launched = LaunchedProcess(self, number, launch, listener)
        with ExitStack() as stack:
            stack.callback(launched.close)
            with ExitStack() as writing:
                descriptors, environment = launched.open(self.readiness, writing, account)
                request: spawner_main.LaunchRequest = {
                    "command": list(launch.command),
                    "environment": environment,
                    "directory": _directory(launch),
                    "user": None if account is None or account.is_own else account.ids,
                    "limits": {
                        name: value for name in LIMITS if (value := getattr(launch.resources, name)) is not None
                    },
                    "niceness": launch.resources.niceness,
                    "instance": launched.instance,
                    "stop_timeout": launch.stop_timeout,
                }
                file = os.memfd_create("mainspring-launch")
                writing.callback(os.close, file)
                with open(file, "wb", closefd=False) as text:
                    text.write(json.dumps(request).encode())
                sent: list[int] = []
                for descriptor in (file, *descriptors, *launch.descriptors):
                    sent.append(os.dup(descriptor))
                    stack.callback(os.close, sent[-1])
            stack.pop_all()
        self.processes[number] = launched
        self.send({"number": number, "launch": True}, sent)
        return launched

    def send(self, request: dict[str, Any], descriptors: list[int] | None = None) -> None:
        """Send a request when the socket takes it. The descriptors are closed then."""
        self._unsent.append((json.dumps(request).encode(), descriptors or []))
        self._flush()

    async def wait_end(self) -> None:
        """Wait until the program has ended, and reap it."""
        while True:
            await anyio.wait_readable(self._end)
            if self.child.poll() is not None:
                return

    def stop(self) -> None:
        """Have it end all that it has started, and then itself. It can be asked for nothing more."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection to a program that has ended."""
        for launched in self.processes.values():
            launched.close()
        self._drop_unsent()
        self.readiness.remove(self._socket.fileno())
        self._socket.close()
        os.close(self._end)

    def _drop_unsent(self) -> None:
        while self._unsent:
            for descriptor in self._unsent.popleft()[1]:
                os.close(descriptor)

    def _flush(self) -> None:
        if self.lost.is_set():
            self._drop_unsent()
            return
        while self._unsent:
            packet, descriptors = self._unsent[0]
            try:
                socket.send_fds(self._socket, [packet], descriptors)
            except BlockingIOError:
                break
            except OSError:
                self._lose()
                return
            self._unsent.popleft()
            for descriptor in descriptors:
                os.close(descriptor)
        self.readiness.want_write(self._socket.fileno(), bool(self._unsent))

    def _step(self) -> bool:
        if self._unsent:
            self._flush()
        for _ in range(16):
            try:
                packet = self._socket.recv(spawner_main.MAX_PACKET)
            except BlockingIOError:
                return False
            except OSError:
                packet = b""
            if not packet:
                self._lose()
                return False
            self._take(json.loads(packet))
        return True

    def _lose(self) -> None:
        self.readiness.remove(self._socket.fileno())
        self.lost.set()
        self._drop_unsent()

    def _take(self, news: dict[str, Any]) -> None:
        self.crash = news.get("crashed", self.crash)
        self.cgroup = news.get("cgroup", self.cgroup)
        launched = self.processes.get(news["number"])
        if launched is None:
            return
        if "started" in news:
            launched.has_started(news["started"], news["limited_by"])
        elif "failed" in news:
            launched.has_failed(*news["failed"])
        elif "ended" in news:
            launched.has_ended(news["ended"], news["limit"])
        elif "empty" in news:
            del self.processes[news["number"]]
            launched.has_emptied()


class ProcessSpawner:
    """Starts processes by way of a small program. See :class:`~mainspring.services.spawning.Spawner`.

    Leaving it kills all that it has started and waits up to ``close_timeout`` seconds until nothing is left. What is left then
    is still killed by the program.

    ``only_children``: True if this process starts none but by this spawner. Then, if the program dies, all descendants of this
    process are killed. Else those that can be recognized are: by their cgroup, session, parent or environment.

    ``cgroups``: True to have a cgroup for each process where cgroups (version 2) can be written.
    """

    def __init__(self, *, close_timeout: float = 5.0, only_children: bool = False, cgroups: bool = True) -> None:
        self._cgroups = cgroups
        self._close_timeout = close_timeout
        self._only_children = only_children
        self._program: Program | None = None
        self._scopes: list[anyio.CancelScope] = []

    async def __aenter__(self) -> ProcessSpawner:
        self._readiness = Readiness()
        self._limiter = anyio.Semaphore(LAUNCHES_AT_ONCE)
        self._subreaper = process.shared("spawner", "subreaper", Subreaper)
        self._subreaper.acquire()
        self._tasks = anyio.create_task_group()
        await self._tasks.__aenter__()
        self._tasks.start_soon(self._shielded, self._readiness.run)
        return self

    async def __aexit__(self, *exc: Any) -> bool | None:
        try:
            with anyio.CancelScope(shield=True):
                await self._close_program()
            for scope in self._scopes:
                scope.cancel()
            is_error = isinstance(exc[1], Exception)  # that goes on as it is, and not in a group
            return await self._tasks.__aexit__(*((None, None, None) if is_error else exc))
        finally:
            self._readiness.close()
            self._subreaper.release()

    @property
    def pid(self) -> int | None:
        """The process id of its program, while that runs."""
        return self._program.child.pid if self._program is not None else None

    @property
    def cgroup(self) -> str | None:
        """The folder of the cgroup below which each process has one of its own; None where there is none."""
        return self._program.cgroup if self._program is not None else None

    async def spawn(self, launch: Launch, listener: ProcessListener) -> LaunchedProcess:
        """Start a process in a session of its own. Return once its program runs.

        :raises SpawnError: it cannot be started. Cancelled, what was started is killed.
        """
        account = await find_account(launch)
        async with self._limiter:
            try:
                launched = (await self._running(launch)).launch(launch, listener, account)
            except (OSError, ValueError) as error:
                number = getattr(error, "errno", None) or 0
                raise spawn_error(launch, cause_of(launch, "descriptors", number, str(error))) from error
            try:
                await launched.wait_started()
            except anyio.get_cancelled_exc_class():
                launched.kill()
                raise
        return launched

    async def _running(self, launch: Launch) -> Program:
        while self._program is not None and self._program.lost.is_set():
            await self._program.buried.wait()
        if self._program is None:
            try:
                self._program = Program(self._readiness, cgroups=self._cgroups)
            except (OSError, ValueError) as error:
                raise spawn_error(launch, f"the program that starts processes cannot be started: {error}") from error
            self._tasks.start_soon(self._shielded, self._outlive, self._program)
        return self._program

    async def _shielded(self, run: Callable[..., Awaitable[None]], *arguments: object) -> None:
        """Run what must go on until all is killed, though this spawner's surroundings are cancelled."""
        with anyio.CancelScope(shield=True) as scope:
            self._scopes.append(scope)
            await run(*arguments)
        self._scopes.remove(scope)

    async def _close_program(self) -> None:
        program = self._program
        if program is None:
            return
        with anyio.move_on_after(self._close_timeout):
            for launched in list(program.processes.values()):
                launched.kill()
                await launched.wait_empty()
            program.stop()
            await program.buried.wait()
            return
        program.stop()

    async def _outlive(self, program: Program) -> None:
        """When the program is lost, kill what it has left, and make room for another one."""
        await program.lost.wait()
        said = f"the program that starts processes has ended ({program.crash or 'killed'}); try again"
        for launched in program.processes.values():
            launched.has_failed("program", 0, said)
        await program.wait_end()
        await Remains(program, self._only_children).kill()
        program.close()
        self._program = None
        program.buried.set()


class Subreaper:
    """Has this process adopt the orphans among its descendants, while a spawner is open."""

    def __init__(self) -> None:
        self._users = 0
        self._before = False

    def acquire(self) -> None:
        """Count one user more."""
        self._users += 1
        if self._users == 1:
            self._before = spawner_main.set_subreaper(True)

    def release(self) -> None:
        """Count one user less. The last one restores what held before."""
        self._users -= 1
        if self._users == 0:
            spawner_main.set_subreaper(self._before)


class Remains:
    """What a program has left that died: killed, reaped and told."""

    def __init__(self, program: Program, only_children: bool) -> None:
        self._only_children = only_children
        self._belongings = spawner_main.Belongings(guess=False)
        self._killed: set[int] = set()
        self._launched = dict(program.processes)
        self._program = program
        self._services = []
        for number, launched in self._launched.items():
            service = spawner_main.Service(number, launched.pid, launched.instance)
            service.reaped = launched.has_end or not launched.pid
            self._services.append(service)

    async def kill(self) -> None:
        """Return when nothing is left."""
        pause = spawner_main.FIRST_KILL
        while self._look():
            await anyio.sleep(pause)
            pause = min(pause * 2, spawner_main.LAST_KILL)
        if self._program.cgroup is not None:
            spawner_main.remove_cgroup(self._program.cgroup)

    def _look(self) -> bool:
        in_cgroup = spawner_main.cgroup_pids(self._program.cgroup) if self._program.cgroup is not None else []
        if in_cgroup:
            self._killed.update(in_cgroup)
            spawner_main.write_file(f"{self._program.cgroup}/cgroup.kill", "1")
        self._belongings.sort(self._services, spawner_main.descendants(os.getpid()))
        victims = [each for service in self._services for each in service.members.values()]
        victims += self._belongings.strangers if self._only_children else []
        for victim in victims:
            self._killed.add(victim.pid)
            spawner_main.send_to(victim, signal.SIGKILL)
        for service in self._services:
            if not service.reaped:
                service.reaped = self._reap(service.pid, self._launched[service.number])
        for pid in list(self._killed - {service.pid for service in self._services if not service.reaped}):
            self._reap(pid)
        for service in [each for each in self._services if each.reaped and not each.members and not in_cgroup]:
            self._services.remove(service)
            self._program.processes.pop(service.number).has_emptied()
        return bool(in_cgroup or victims or self._services)

    def _reap(self, pid: int, launched: LaunchedProcess | None = None) -> bool:
        """Reap an adopted child if it has ended. True if it is one no longer."""
        try:
            reaped, status = os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:  # another one's, until its parent dies; or reaped elsewhere
            reaped, status = pid, signal.SIGKILL
        if reaped and launched is not None:
            launched.has_ended(os.waitstatus_to_exitcode(status), None)
        return bool(reaped)


def _directory(launch: Launch) -> str | None:
    try:
        return os.path.join(os.getcwd(), launch.directory or "")
    except OSError:  # it was removed
        return launch.directory


def _interpreter() -> str:
    """Return the Python to run the program with. Raise for a frozen one, whose ``sys.executable`` is not Python."""
    executable = sys.executable or ""
    if getattr(sys, "frozen", False) or "py" not in os.path.basename(executable).lower():
        raise ValueError(f"{executable or 'this program'} is no Python interpreter")
    return executable
