"""The spawner: a small process that starts the processes of services, reaps all that is left to it, and tells how they end.

It runs by path, on the standard library alone (``python -I -S spawner_main.py …``), so it stays small, forks
quickly, and shares no fate with the supervisor. The two talk by JSON over a pair of sequenced-packet sockets. A launch
comes as a file in memory, with the descriptors that the process is to have.

All that a service starts stays below the spawner, as that is its subreaper: also what has left its session by ``setsid`` or
a double fork. Where cgroups (version 2) can be written each service has one, which tells what belongs to it. Elsewhere
``Belongings`` does. A service is *empty* when its main process is reaped and no living process belongs to it.

When the socket or the supervisor ends, the spawner stops everything: SIGTERM to each main process, and to what that has left
when it ends; SIGKILL to a whole service when its stop time is over; and at last SIGKILL to all that is below the spawner. Until
then it reads the output, as the processes would end by SIGPIPE otherwise.

Pids are reused. So only a process that is not reaped yet is signalled by its pid, and any other by a pidfd, after a look at its
start time.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import gc
import json
import os
import resource
import select
import signal
import socket
import sys
import time  # noqa: TID251 - this file cannot import the package's clock
from contextlib import suppress
from typing import NamedTuple, NoReturn, TypedDict

MAX_PACKET = 65_536
"""Bytes of a packet, at most. A launch is not in the packet but in a file."""
MAX_DESCRIPTORS = 250
"""Descriptors of a packet, at most (the kernel takes 253)."""
INSTANCE = "MAINSPRING_INSTANCE"
"""The environment variable that says what a process belongs to. Of nested supervisors it has a part each, joined by ``/``."""
SET_CHILD_SUBREAPER, GET_CHILD_SUBREAPER = 36, 37
LOOKS = (0.1, 1.0, 10.0)
"""Seconds after a launch until the processes below it are looked at; then again after the last of them, for ever."""
FIRST_KILL, LAST_KILL = 0.005, 0.25
"""Seconds between two looks for what is left to be killed: they double from the first to the last."""
HARD_CPU_SECONDS = 5
"""Seconds of processor time between SIGXCPU and SIGKILL."""


def set_subreaper(on: bool) -> bool:
    """Have the orphans among this process's descendants become its children, or not. Return what held before."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    before = ctypes.c_int()
    prctl(GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
    prctl(SET_CHILD_SUBREAPER, ctypes.c_ulong(on), 0, 0, 0)
    return bool(before.value)


# ---- the processes of the machine


class ProcessStat(NamedTuple):
    """What ``/proc/PID/stat`` says. ``start`` is in ticks since the machine booted: with the pid it names one process."""

    pid: int
    parent: int
    session: int
    start: int
    zombie: bool


def read_process(pid: int) -> ProcessStat | None:
    """Return what a process is, or None where there is none."""
    try:
        descriptor = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
        try:
            text = os.read(descriptor, 4096)
        finally:
            os.close(descriptor)
        fields = text.rpartition(b")")[2].split()
        return ProcessStat(pid, int(fields[1]), int(fields[3]), int(fields[19]), fields[0] in b"ZX")
    except (OSError, IndexError, ValueError):
        return None


def descendants(root: int) -> list[ProcessStat]:
    """Return all living descendants of a process, each after its parent."""
    below: dict[int, list[ProcessStat]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and (process := read_process(int(name))) is not None:
            below.setdefault(process.parent, []).append(process)
    found = below.get(root, [])[:]
    for process in found:  # it grows
        found.extend(below.get(process.pid, ()))
    return [process for process in found if not process.zombie]


def instance_of(pid: int) -> list[str]:
    """Return the parts of the instance in the environment that a process was started with."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            environment = file.read()
    except OSError:
        return []
    for entry in environment.split(b"\0"):
        name, _, value = entry.partition(b"=")
        if name == INSTANCE.encode():
            return value.decode("utf-8", "replace").split("/")
    return []


def send_to(process: ProcessStat, signum: int) -> None:
    """Send a signal to this very process, not to a later one of the same pid."""
    try:
        descriptor = os.pidfd_open(process.pid)
    except OSError:
        return
    try:
        now = read_process(process.pid)
        if now is not None and now.start == process.start:
            signal.pidfd_send_signal(descriptor, signum)
    except OSError:
        pass
    finally:
        os.close(descriptor)


# ---- cgroups


def own_cgroup() -> str | None:
    """Return the folder of the cgroup (version 2) that this process is in, or None where there is none."""
    try:
        with open("/proc/self/cgroup", encoding="utf-8") as file:
            inside = next(line[3:].rstrip("\n") for line in file if line.startswith("0::"))
        with open("/proc/self/mountinfo", encoding="utf-8") as file:
            mounts = [line.split(" - ") for line in file]
        root, folder = next(before.split()[3:5] for before, after in mounts if after.split()[0] == "cgroup2")
    except (OSError, StopIteration, ValueError):
        return None
    relative = os.path.relpath(inside, root)
    return None if relative.startswith("..") else os.path.normpath(os.path.join(folder, relative))


def write_file(path: str, text: str) -> bool:
    """Write a text to a file of the kernel. Return False where that is refused."""
    try:
        with open(path, "w", encoding="ascii") as file:
            file.write(text)
    except OSError:
        return False
    return True


def count_in(path: str, name: str) -> int:
    """Return a number out of a file with lines of a name and a number; 0 where there is none."""
    try:
        with open(path, encoding="ascii") as file:
            return next((int(line.split()[1]) for line in file if line.split()[0] == name), 0)
    except (OSError, ValueError, IndexError):
        return 0


def cgroup_pids(path: str) -> list[int]:
    """Return the pids of all processes in a cgroup and in those below."""
    found: list[int] = []
    for folder, _, _ in os.walk(path):
        with suppress(OSError), open(f"{folder}/cgroup.procs", encoding="ascii") as file:
            found.extend(int(line) for line in file)
    return found


def remove_cgroup(path: str) -> None:
    """Remove a cgroup and those below, as far as they are empty."""
    for folder, _, _ in os.walk(path, topdown=False):
        with suppress(OSError):
            os.rmdir(folder)


class Cgroups:
    """Makes a cgroup for each service, below the one that this program is in. ``path`` is None where that cannot be."""

    LEAF = "mainspring-supervisor"
    """The cgroup to which supervisor and spawner move: a cgroup with processes can give no limits to those below."""

    def __init__(self, own: str | None, supervisor: int) -> None:
        if own is not None and os.path.basename(own) == self.LEAF:
            own = os.path.dirname(own)
        self.path: str | None = None
        self.controllers: list[str] = []
        if own is None:
            return
        path = f"{own}/mainspring-{os.getpid()}"
        with suppress(OSError):
            os.makedirs(f"{path}/test")
            if self._can_join(f"{path}/test"):
                self.path = path
                self.controllers = [each for each in ("memory", "pids") if self._enable(own, path, each, supervisor)]
        remove_cgroup(path if self.path is None else f"{path}/test")

    def make(self, number: int, limits: dict[str, int]) -> tuple[str | None, list[str]]:
        """Make a cgroup. Return its path, or None, and the names of the limits that it holds."""
        if self.path is None:
            return None, []
        path = f"{self.path}/{number}"
        try:
            os.mkdir(path)
        except OSError:
            return None, []
        held = []
        for name, controller, file in (("memory", "memory", "memory.max"), ("processes", "pids", "pids.max")):
            if name in limits and controller in self.controllers and write_file(f"{path}/{file}", str(limits[name])):
                held.append(name)
        if "memory" in held:
            write_file(f"{path}/memory.oom.group", "1")  # all of a service, not a part without which it fails
            write_file(f"{path}/memory.swap.max", "0")  # it ends, rather than slow the machine down
        return path, held

    def close(self) -> None:
        """Remove all of it, as far as it is empty."""
        if self.path is not None:
            remove_cgroup(self.path)
        self.path = None

    def _can_join(self, path: str) -> bool:
        pid = os.fork()
        if pid == 0:
            os._exit(0 if write_file(f"{path}/cgroup.procs", "0") else 1)
        return os.waitpid(pid, 0)[1] == 0

    def _enable(self, own: str, path: str, controller: str, supervisor: int) -> bool:
        control = f"{own}/cgroup.subtree_control"
        if not write_file(control, f"+{controller}"):
            here = {os.getpid(), supervisor}
            leaf = f"{own}/{self.LEAF}"
            try:
                with open(f"{own}/cgroup.controllers", encoding="ascii") as file:
                    known = controller in file.read().split()
                with open(f"{own}/cgroup.procs", encoding="ascii") as file:
                    alone = {int(line) for line in file} == here
                if known and alone:
                    os.makedirs(leaf, exist_ok=True)
            except OSError:
                return False
            if not all(write_file(f"{leaf}/cgroup.procs", str(pid)) for pid in here if known and alone):
                return False
            if not write_file(control, f"+{controller}"):
                return False
        return write_file(f"{path}/cgroup.subtree_control", f"+{controller}")


# ---- services


class LaunchRequest(TypedDict):
    """What a process is started with. ``user``: its uid, gid and groups."""

    command: list[str]
    environment: dict[str, str]
    directory: str | None
    user: tuple[int, int, list[int]] | None
    limits: dict[str, int]
    niceness: int | None
    instance: str
    stop_timeout: float


class Service:
    """A launched process, and all that belongs to it."""

    def __init__(self, number: int, pid: int, instance: str, stop_timeout: float = 0.0) -> None:
        self.number = number
        self.pid = pid
        self.instance = instance
        self.stop_timeout = stop_timeout
        self.outputs: list[int] = []
        """The reading ends of its output: kept open, as writing fails without them."""
        process = read_process(pid)
        self.start = process.start if process is not None else 0
        self.cpu_seconds = 0
        self.cgroup: str | None = None
        self.limited_by: dict[str, str] = {}
        self.events = -1
        """The file of the cgroup that says whether it holds processes: it can be waited for."""
        self.sessions = {pid}
        self.members: dict[int, ProcessStat] = {}
        self.started = False
        self.reaped = False
        self.killed = False
        self.rest_told = False
        """True if what its main process has left was told to end, as the supervisor is gone."""
        self.kill_at = 0.0
        """When all of it is to be killed, once it was told to end and the supervisor is gone."""

    @property
    def is_empty(self) -> bool:
        """True if nothing of it was left when its members were looked at."""
        if self.cgroup is None:
            return self.reaped and not self.members
        return self.reaped and not count_in(f"{self.cgroup}/cgroup.events", "populated")

    def look_at_cgroup(self) -> None:
        """Set the members out of the cgroup."""
        found = map(read_process, cgroup_pids(self.cgroup or ""))
        self.members = {each.pid: each for each in found if each is not None and not each.zombie}

    def limit_reached(self, returncode: int, cpu_seconds: float) -> str | None:
        """Return the limit that ended the main process, if one did. ``cpu_seconds``: what it had used."""
        was_killed = returncode == -signal.SIGKILL and not self.killed
        if was_killed and self.cgroup and count_in(f"{self.cgroup}/memory.events", "oom_kill"):
            return "memory"
        used_up = returncode == -signal.SIGXCPU or (was_killed and cpu_seconds >= self.cpu_seconds)
        return "cpu_seconds" if self.cpu_seconds and used_up else None


class Belongings:
    """Tells which service each process below the spawner belongs to.

    A process belongs to the service of its session, of its parent, to which it was seen to belong before, or that its
    environment names. Another one (it has left its session, lost its parent and cleared its environment between two looks)
    belongs to the only service that was there when it started, if just one was and ``guess`` is True. Else it is nothing's,
    and ends with the spawner.
    """

    def __init__(self, guess: bool = True) -> None:
        self._guess = guess
        self.strangers: list[ProcessStat] = []
        """Those that belong to nothing."""

    def sort(self, services: list[Service], processes: list[ProcessStat]) -> None:
        """Set the living members of each service."""
        seen = {(pid, process.start): each for each in services for pid, process in each.members.items()}
        by_session = {session: each for each in services for session in each.sessions}
        by_instance = {each.instance: each for each in services}
        owners: dict[int, Service] = {each.pid: each for each in services if not each.reaped}
        for each in services:
            each.members = {}
        self.strangers = []
        for process in processes:
            owner = (
                owners.get(process.pid)
                or seen.get((process.pid, process.start))
                or by_session.get(process.session)
                or owners.get(process.parent)
                or next(filter(None, map(by_instance.get, instance_of(process.pid))), None)
                or self._only_one(services, process)
            )
            if owner is None:
                self.strangers.append(process)
            else:
                owners[process.pid] = owner
                owner.members[process.pid] = process
                if process.session not in by_session and process.session != os.getsid(0):
                    owner.sessions.add(process.session)
                    by_session[process.session] = owner

    def _only_one(self, services: list[Service], process: ProcessStat) -> Service | None:
        candidates = [each for each in services if each.start <= process.start]
        return candidates[0] if self._guess and len(candidates) == 1 else None


# ---- what becomes of the forked child


class Child:
    """The forked child, until its program runs. What fails is written to ``report`` as ``[stage, errno, detail]``."""

    def __init__(self, launch: LaunchRequest, cgroup: str | None, descriptors: list[int], report: int) -> None:
        self._launch = launch
        self._cgroup = cgroup
        self._descriptors = descriptors
        self._report = report
        self._stage = "session"

    def run(self) -> NoReturn:
        """Become the program. It never returns."""
        try:
            self._become()
        except BaseException as error:
            said = [error.errno or 0, error.strerror or ""] if isinstance(error, OSError) else [0, repr(error)]
            os.write(self._report, json.dumps([self._stage, *said]).encode())
        finally:
            os._exit(127)

    def _become(self) -> None:
        launch = self._launch
        os.setsid()
        if self._cgroup is not None:
            self._stage = "cgroup"
            with open(f"{self._cgroup}/cgroup.procs", "w", encoding="ascii") as file:
                file.write("0")
        self._place_descriptors()
        for number in signal.valid_signals():
            if number not in (signal.SIGKILL, signal.SIGSTOP):
                signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        self._stage = "niceness"
        if launch["niceness"] is not None:
            os.setpriority(os.PRIO_PROCESS, 0, launch["niceness"])
        self._stage = "limits"
        for name, most in launch["limits"].items():
            self._limit(name, most)
        self._stage = "user"
        if launch["user"] is not None:
            uid, gid, groups = launch["user"]
            os.setgroups(groups)
            os.setresgid(gid, gid, gid)
            os.setresuid(uid, uid, uid)
        self._stage = "directory"
        if launch["directory"] is not None:
            os.chdir(launch["directory"])
        self._stage = "program"
        environment = launch["environment"]
        if "LISTEN_FDS" in environment:
            environment["LISTEN_PID"] = str(os.getpid())
        self._execute(launch["command"], environment)

    def _place_descriptors(self) -> None:
        """Make the launch's descriptors 0, 1, 2, 3 and so on. The others close when the program begins."""
        above = len(self._descriptors) + 1
        self._report = fcntl.fcntl(self._report, fcntl.F_DUPFD_CLOEXEC, above)
        high = [fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, above) for each in self._descriptors]
        null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        for place, descriptor in enumerate([null, *high]):
            if place == descriptor:
                os.set_inheritable(descriptor, True)
            else:
                os.dup2(descriptor, place)

    def _limit(self, name: str, most: int) -> None:
        self._stage = f"limits {name}"
        which = {
            "memory": resource.RLIMIT_DATA,
            "cpu_seconds": resource.RLIMIT_CPU,
            "open_files": resource.RLIMIT_NOFILE,
            "processes": resource.RLIMIT_NPROC,
        }[name]
        hard = most + HARD_CPU_SECONDS if name == "cpu_seconds" else most
        above = resource.getrlimit(which)[1]
        if name == "cpu_seconds" and above != resource.RLIM_INFINITY:
            hard = min(hard, max(above, most))
        resource.setrlimit(which, (most, hard))

    def _execute(self, command: list[str], environment: dict[str, str]) -> None:
        """Run the program. Where it is none, report the path of the first that has its name."""
        program = command[0]
        folders = [""] if "/" in program else environment.get("PATH", os.defpath).split(":")
        worst = OSError(errno.ENOENT, "")
        for folder in folders:
            path = os.path.join(folder, program)
            try:
                os.execve(path, command, environment)  # noqa: S606 - what is run is the user's choice
            except OSError as error:
                if not worst.strerror and (error.errno not in (errno.ENOENT, errno.ENOTDIR) or os.path.lexists(path)):
                    worst = OSError(error.errno, path)
        raise worst


# ---- the spawner


class SpawnerProgram:
    """Does what the supervisor asks for until that is gone, and then ends everything."""

    def __init__(self, connection: socket.socket, supervisor: int, cgroups: Cgroups) -> None:
        self._connection = connection
        self._cgroups = cgroups
        self._services: dict[int, Service] = {}
        self._by_pid: dict[int, Service] = {}
        self._reports: dict[int, Service] = {}
        self._draining: set[int] = set()
        self._events: set[int] = set()
        self._belongings = Belongings()
        self._unsent: list[bytes] = []
        self._gone = False
        self._look_at = float("inf")
        self._looks: set[float] = set()
        self._kill_after = FIRST_KILL
        self._poll = select.epoll()
        connection.setblocking(False)
        self._poll.register(connection, select.EPOLLIN)
        self._woken, wake = os.pipe()
        for end in (self._woken, wake):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._poll.register(self._woken, select.EPOLLIN)
        self._supervisor = os.pidfd_open(supervisor)
        self._poll.register(self._supervisor, select.EPOLLIN)
        self._tell(number=0, cgroup=cgroups.path)
        if os.getppid() != supervisor:
            self._lose_supervisor()

    def run(self) -> None:
        """Return once the supervisor is gone and nothing is left below."""
        while True:
            wait = max(0.0, self._look_at - time.monotonic())
            for descriptor, events in self._poll.poll(None if wait == float("inf") else wait):
                self._handle(descriptor, events)
            self._reap()
            if time.monotonic() >= self._look_at:
                self._look()
                if self._gone and not self._services and not self._kill_strangers():
                    self._cgroups.close()
                    return

    def tell_crash(self, error: Exception) -> None:
        """Tell the supervisor what ended this program. It then kills what is left."""
        self._tell(number=0, crashed=f"{type(error).__name__}: {error}")

    def _handle(self, descriptor: int, events: int) -> None:
        if descriptor == self._woken:
            os.read(self._woken, 4096)
        elif descriptor == self._supervisor:
            self._lose_supervisor()
        elif descriptor == self._connection.fileno():
            if events & select.EPOLLOUT:
                self._flush()
            if events & ~select.EPOLLOUT:
                self._take_requests()
        elif descriptor in self._reports:
            self._end_start(descriptor)
        elif descriptor in self._events:
            os.pread(descriptor, 4096, 0)
            self._look_at = 0.0
        elif descriptor in self._draining and not self._drop_output(descriptor):
            self._poll.unregister(descriptor)
            self._draining.discard(descriptor)

    # -- the supervisor

    def _take_requests(self) -> None:
        while not self._gone:
            try:
                packet, descriptors = receive(self._connection)
            except BlockingIOError:
                return
            except OSError:
                packet, descriptors = b"", []
            if not packet:
                self._lose_supervisor()
            else:
                self._serve(json.loads(packet), descriptors)

    def _serve(self, request: dict[str, int], descriptors: list[int]) -> None:
        number = request["number"]
        if "launch" in request:
            self._launch(number, descriptors)
            return
        service = self._services.get(number)
        if service is None:
            return
        if "kill" in request:
            self._kill(service)
        else:
            self._signal(service, request["signal"])

    def _signal(self, service: Service, number: int) -> None:
        """Send a signal to the main process, or, where it has ended, to all that is left."""
        if not service.reaped:
            os.kill(service.pid, number)
        else:
            self._find_members()
            for process in service.members.values():
                send_to(process, number)
        if number == signal.SIGTERM and not service.kill_at:
            service.kill_at = time.monotonic() + service.stop_timeout

    def _tell(self, **news: object) -> None:
        if not self._gone:
            self._unsent.append(json.dumps(news).encode())
            if len(self._unsent) == 1:
                self._flush()

    def _flush(self) -> None:
        while self._unsent:
            try:
                self._connection.send(self._unsent[0])
            except BlockingIOError:
                break
            except OSError:
                self._lose_supervisor()
                return
            del self._unsent[0]
        self._poll.modify(self._connection, select.EPOLLIN | (select.EPOLLOUT if self._unsent else 0))

    def _lose_supervisor(self) -> None:
        if self._gone:
            return
        self._gone = True
        self._poll.unregister(self._connection)
        self._poll.unregister(self._supervisor)
        self._connection.close()
        self._unsent.clear()
        self._look_at = time.monotonic()
        for service in self._services.values():
            if not service.kill_at:
                self._signal(service, signal.SIGTERM)
            for output in service.outputs:
                self._poll.register(output, select.EPOLLIN)
                self._draining.add(output)

    def _drop_output(self, descriptor: int) -> bool:
        try:
            return bool(os.read(descriptor, 65_536))
        except BlockingIOError:
            return True

    # -- launches

    def _launch(self, number: int, descriptors: list[int]) -> None:
        file, descriptors = descriptors[0], descriptors[1:]
        launch: LaunchRequest = json.loads(os.pread(file, os.fstat(file).st_size, 0))
        os.close(file)
        outputs, given = descriptors[:2], descriptors[2:]
        limited_by = dict.fromkeys(launch["limits"], "rlimit")
        cgroup, held = self._cgroups.make(number, launch["limits"])
        for name in held:
            del launch["limits"][name]
            limited_by[name] = "cgroup"
        try:
            report, writing = os.pipe()
            pid = os.fork()
            if pid == 0:
                Child(launch, cgroup, given, writing).run()
        except OSError as error:
            self._tell(number=number, failed=["fork", error.errno, error.strerror])
            self._tell(number=number, empty=True)
            remove_cgroup(cgroup or "")
            for each in descriptors:
                os.close(each)
            return
        for each in (writing, *given):
            os.close(each)
        service = Service(number, pid, launch["instance"], launch["stop_timeout"])
        service.outputs, service.cgroup, service.limited_by = outputs, cgroup, limited_by
        if cgroup is not None:
            service.events = os.open(f"{cgroup}/cgroup.events", os.O_RDONLY | os.O_CLOEXEC)
            self._events.add(service.events)
            self._poll.register(service.events, select.EPOLLPRI)
        service.cpu_seconds = launch["limits"].get("cpu_seconds", 0)
        for other in self._services.values():
            other.sessions.discard(pid)  # of a session that has ended, or its number would not have come again
        self._services[number] = self._by_pid[pid] = self._reports[report] = service
        self._poll.register(report, select.EPOLLIN)

    def _end_start(self, report: int) -> None:
        """Tell that the program runs, or why it does not: the report ends as the program begins."""
        service = self._reports.pop(report)
        self._poll.unregister(report)
        failure = os.read(report, MAX_PACKET)
        os.close(report)
        if failure:
            self._tell(number=service.number, failed=json.loads(failure))
            return
        service.started = True
        self._tell(number=service.number, started=service.pid, limited_by=service.limited_by)
        if service.cgroup is not None:
            return
        now = time.monotonic()
        self._looks.update(round(now + after + LOOKS[0] / 2, 1) for after in LOOKS[:-1])  # many launches share one
        self._look_at = min(self._look_at, *self._looks)

    # -- ends

    def _reap(self) -> None:
        while True:
            try:
                pid, status, used = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self._look_at = 0.0
            service = self._by_pid.pop(pid, None)
            if service is None:
                continue
            for report in [each for each, starting in self._reports.items() if starting is service]:
                self._end_start(report)
            service.reaped = True
            if service.started:
                returncode = os.waitstatus_to_exitcode(status)
                limit = service.limit_reached(returncode, used.ru_utime + used.ru_stime)
                self._tell(number=service.number, ended=returncode, limit=limit)

    def _kill(self, service: Service) -> None:
        service.killed = True
        self._kill_after = FIRST_KILL
        self._look_at = 0.0
        if service.cgroup is not None:
            write_file(
                f"{service.cgroup}/cgroup.kill", "1"
            )  # since Linux 5.14; its members are killed one by one as well
        if not service.reaped:
            os.kill(service.pid, signal.SIGKILL)  # not in a session of its own yet, maybe
            with suppress(OSError):
                os.killpg(service.pid, signal.SIGKILL)

    def _look(self) -> None:
        """Look what is left of each service, kill what is to be killed, and tell what is empty."""
        now = time.monotonic()
        services = list(self._services.values())
        self._find_members()
        for service in services:
            if self._gone and now >= service.kill_at and not service.killed:
                self._kill(service)
            elif self._gone and service.reaped and not service.rest_told:
                service.rest_told = True
                for process in service.members.values():
                    send_to(process, signal.SIGTERM)
            if service.killed:
                for process in service.members.values():
                    send_to(process, signal.SIGKILL)
            if service.is_empty:
                self._forget(service)
        self._plan(now)

    def _find_members(self) -> None:
        services = self._services.values()
        for service in services:
            if service.cgroup is not None and (service.reaped or service.killed):
                service.look_at_cgroup()
        without = [service for service in services if service.cgroup is None]
        if without:
            self._belongings.sort(without, descendants(os.getpid()))

    def _forget(self, service: Service) -> None:
        del self._services[service.number]
        for output in service.outputs:
            if output in self._draining:
                self._poll.unregister(output)
                self._draining.discard(output)
            os.close(output)
        if service.cgroup is not None:
            self._events.discard(service.events)
            self._poll.unregister(service.events)
            os.close(service.events)
            remove_cgroup(service.cgroup)
        self._tell(number=service.number, empty=True)

    def _plan(self, now: float) -> None:
        """Set the instant of the next look."""
        self._looks = {at for at in self._looks if at > now}
        services = self._services.values()
        instants = [*self._looks]
        if any(service.cgroup is None for service in services):
            instants.append(now + LOOKS[-1])
        if any(service.reaped for service in services):
            instants.append(now + LOOKS[1])
        if self._gone or any(service.killed for service in services):
            instants.append(now + self._kill_after)
            self._kill_after = min(self._kill_after * 2, LAST_KILL)
        self._look_at = min(instants, default=float("inf"))

    def _kill_strangers(self) -> bool:
        """Kill all that is left below. True if anything is."""
        strangers = descendants(os.getpid())
        for process in strangers:
            send_to(process, signal.SIGKILL)
        return bool(strangers)


def receive(connection: socket.socket) -> tuple[bytes, list[int]]:
    """Return a packet and its descriptors, which no other program inherits.

    :raises OSError: there is none, or the connection is broken.
    """
    room = socket.CMSG_SPACE(MAX_DESCRIPTORS * 4)
    packet, messages, _, _ = connection.recvmsg(MAX_PACKET, room, socket.MSG_CMSG_CLOEXEC)
    descriptors: list[int] = []
    for level, kind, content in messages:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.extend(memoryview(content[: len(content) // 4 * 4]).cast("i"))
    return packet, descriptors


def main(arguments: list[str]) -> None:
    """Run with ``SOCKET_FD SUPERVISOR_PID CGROUPS``, all given by the supervisor (``CGROUPS`` is 0 where none are wanted)."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # only the supervisor says when it is over
    write_file("/proc/self/comm", "ms-spawner")
    set_subreaper(True)
    descriptor, supervisor, cgroups = map(int, arguments)
    os.set_inheritable(descriptor, False)
    groups = Cgroups(own_cgroup() if cgroups else None, supervisor)
    spawner = SpawnerProgram(socket.socket(fileno=descriptor), supervisor, groups)
    gc.collect()
    gc.freeze()
    try:
        spawner.run()
    except Exception as error:
        spawner.tell_crash(error)
        raise


if __name__ == "__main__":
    main(sys.argv[1:])
    os._exit(0)
