"""The real spawner: what a process is started with, how its end is told, and that nothing is left of it."""

from __future__ import annotations

import os
import pwd
import signal
import subprocess
import sys
from pathlib import Path

import anyio
import pytest

from mainspring.services.spawner import ProcessSpawner
from mainspring.services.spawner_main import own_cgroup
from mainspring.services.spawning import Launch, ProcessEnd, SpawnError
from mainspring.services.spec import Resources
from spawner_support import Heard, descriptors, runs, shell, until_gone

pytestmark = pytest.mark.anyio


@pytest.fixture(params=[False, True], ids=["no_cgroups", "cgroups"])
def cgroups(request):
    """Return whether a test's spawner may use cgroups."""
    own = own_cgroup()
    if request.param and (own is None or not os.access(own, os.W_OK)):
        pytest.skip("cgroups (version 2) cannot be written here")
    return request.param


@pytest.mark.every_loop
async def test_it_tells_lines_the_last_half_line_and_the_end():
    heard = Heard()
    async with ProcessSpawner() as spawner:
        spawned = await spawner.spawn(shell("echo one; echo two >&2; printf half; exit 3"), heard)
        assert await spawned.wait() == await spawned.wait() == ProcessEnd(3)
        assert heard.of("stdout") == ["one", "half"]
        assert heard.of("stderr") == ["two"]
        assert spawned.memory is None
        await spawned.wait_empty()


@pytest.mark.every_loop
async def test_a_signal_ends_it_and_kill_ends_what_has_left_its_session(cgroups):
    heard = Heard()
    async with ProcessSpawner(cgroups=cgroups) as spawner:
        script = "sleep 1000 & echo $!; setsid sh -c 'echo $$; exec sleep 1000' & sleep 0.05; echo up; wait"
        spawned = await spawner.spawn(shell(script), heard)
        await heard.wait_for("up")
        group, escaped = map(int, heard.of("stdout")[:2])
        assert spawned.memory > 0
        assert os.getsid(spawned.pid) == os.getpgid(group) == spawned.pid != os.getsid(escaped)
        spawned.send_signal(signal.SIGTERM)
        assert await spawned.wait() == ProcessEnd(-signal.SIGTERM)
        assert runs(group)
        assert runs(escaped)
        spawned.kill()
        await spawned.wait_empty()
        assert not runs(group)
        assert not runs(escaped)


async def test_a_signal_after_its_end_goes_to_all_that_is_left(cgroups):
    heard = Heard()
    async with ProcessSpawner(cgroups=cgroups) as spawner:
        spawned = await spawner.spawn(shell("setsid sleep 1000 & sleep 1000 & sleep 0.05"), heard)
        assert await spawned.wait() == ProcessEnd(0)
        spawned.send_signal(signal.SIGTERM)
        await spawned.wait_empty()


async def test_it_is_empty_only_when_a_double_fork_without_environment_has_ended(cgroups):
    """The daemon has lost its parent and its session; the spawner knows it by what was there when it started."""
    heard = Heard()
    async with ProcessSpawner(cgroups=cgroups) as spawner:
        script = "(setsid env -i sh -c 'echo $$; (echo daemon; exec sleep 1000) & exit 0'); exit 0"
        spawned = await spawner.spawn(shell(script), heard)
        assert await spawned.wait() == ProcessEnd(0)
        await heard.wait_for("daemon")
        with anyio.move_on_after(0.1) as waited:
            await spawned.wait_empty()
        assert waited.cancelled_caught
        spawned.kill()
        await spawned.wait_empty()


async def test_of_two_services_each_keeps_its_own_escapees(cgroups):
    async with ProcessSpawner(cgroups=cgroups) as spawner:
        heard = [Heard(), Heard()]
        script = "setsid sh -c 'echo $$; exec sleep 1000' & sleep 0.05; echo up"
        one, other = [await spawner.spawn(shell(script), each) for each in heard]
        for each in heard:
            await each.wait_for("up")
        escaped = [int(each.of("stdout")[0]) for each in heard]
        await one.wait()
        await other.wait()
        one.kill()
        await one.wait_empty()
        assert [runs(each) for each in escaped] == [False, True]


async def test_leaving_it_kills_all_that_it_has_started(cgroups):
    heard = Heard()
    async with ProcessSpawner(cgroups=cgroups) as spawner:
        spawned = await spawner.spawn(
            shell("trap '' TERM; echo $$; setsid sleep 1000 & echo up; while :; do sleep 9; done"), heard
        )
        await heard.wait_for("up")
        program = spawner.pid
    assert not runs(spawned.pid)
    assert not runs(program)
    assert await spawned.wait() == ProcessEnd(-signal.SIGKILL)
    await spawned.wait_empty()


@pytest.mark.every_loop
async def test_a_cancelled_owner_kills_all_that_it_has_started():
    heard = Heard()
    with anyio.CancelScope() as scope:
        async with ProcessSpawner() as spawner:
            spawned = await spawner.spawn(shell("echo up; setsid sleep 1000; :"), heard)
            await heard.wait_for("up")
            scope.cancel()
            await anyio.sleep_forever()
    assert not runs(spawned.pid)
    assert await spawned.wait() == ProcessEnd(-signal.SIGKILL)


async def test_a_cancelled_spawn_leaves_no_process(tmp_path, cgroups):
    async with ProcessSpawner(cgroups=cgroups) as spawner:
        await (await spawner.spawn(shell(":"), Heard())).wait_empty()
        with anyio.CancelScope() as scope:
            scope.cancel()
            await spawner.spawn(shell(f"sleep 0.1; echo > {tmp_path}/file; sleep 1000"), Heard())
        spawned = await spawner.spawn(shell("sleep 0.2"), Heard())
        await spawned.wait_empty()
    assert not list(tmp_path.iterdir())


@pytest.mark.every_loop
async def test_when_the_program_is_killed_all_is_killed_and_told_and_a_later_spawn_works(cgroups):
    heard = Heard()
    async with ProcessSpawner(cgroups=cgroups) as spawner:
        script = "sleep 1000 & setsid sh -c 'echo $$; exec sleep 1000' & sleep 0.05; echo up; wait"
        spawned = await spawner.spawn(shell(script), heard)
        await heard.wait_for("up")
        escaped = int(heard.of("stdout")[0])
        os.kill(spawner.pid, signal.SIGKILL)
        with anyio.fail_after(5):
            assert await spawned.wait() == ProcessEnd(-signal.SIGKILL)
            await spawned.wait_empty()
        assert not runs(escaped)
        again = await spawner.spawn(shell("exit 4"), Heard())
        assert await again.wait() == ProcessEnd(4)


async def test_the_end_of_the_program_leaves_other_children_alone(cgroups):
    child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    try:
        async with ProcessSpawner(cgroups=cgroups) as spawner:
            spawned = await spawner.spawn(shell("sleep 1000"), Heard())
            os.kill(spawner.pid, signal.SIGKILL)
            await spawned.wait_empty()
        assert runs(child.pid)
    finally:
        child.kill()
        child.wait()


async def test_the_program_ignores_signals_that_end_others():
    async with ProcessSpawner() as spawner:
        spawned = await spawner.spawn(shell("sleep 1000"), Heard())
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            os.kill(spawner.pid, number)
        spawned.kill()
        assert await spawned.wait() == ProcessEnd(-signal.SIGKILL)


async def test_signals_are_as_a_program_expects_them():
    """Neither ignored nor blocked, though the spawner's are."""
    heard = Heard()
    async with ProcessSpawner() as spawner:
        spawned = await spawner.spawn(shell("grep -E '^Sig(Blk|Ign)' /proc/self/status"), heard)
        await spawned.wait()
    own = (
        1 << 31 | 1 << 32
    )  # signals 32 and 33 are the C library's: a program that it has spawned ignores them for ever
    assert [int(line.split()[1], 16) & ~own for line in heard.of("stdout")] == [0, 0]


async def test_it_gets_its_descriptors_directory_and_environment_and_nothing_else(tmp_path):
    heard = Heard()
    reading, writing = os.pipe()
    async with ProcessSpawner() as spawner:
        other = await spawner.spawn(shell("sleep 1000"), Heard())
        script = "echo given >&3; pwd; echo $LISTEN_FDS $((LISTEN_PID - $$)) $COLOUR; exec ls /proc/self/fd"
        environment = {"PATH": os.environ["PATH"], "LISTEN_FDS": "1", "COLOUR": "red"}
        launch = shell(script, environment=environment, directory=str(tmp_path), descriptors=(writing,))
        spawned = await spawner.spawn(launch, heard)
        assert await spawned.wait() == ProcessEnd(0)
        other.kill()
    os.close(writing)
    assert os.read(reading, 100) == b"given\n"
    os.close(reading)
    assert heard.of("stdout") == [str(tmp_path), "1 0 red", "0", "1", "2", "3", "4"]  # 4 is that of ls itself


async def test_a_relative_command_is_looked_for_below_its_directory(tmp_path):
    (tmp_path / "run.sh").write_text("#!/bin/sh\nexit 9\n")
    (tmp_path / "run.sh").chmod(0o755)
    async with ProcessSpawner() as spawner:
        spawned = await spawner.spawn(Launch("shop", 1, ("./run.sh",), directory=str(tmp_path)), Heard())
        assert await spawned.wait() == ProcessEnd(9)


async def test_limits_and_niceness_hold_before_the_program_starts():
    heard = Heard()
    limits = Resources(memory=1 << 30, cpu_seconds=7, open_files=50, processes=60, niceness=19)
    async with ProcessSpawner() as spawner:
        script = "ulimit -d; ulimit -t; ulimit -n; ulimit -u; nice"
        spawned = await spawner.spawn(
            Launch("shop", 1, ("bash", "-c", script), dict(os.environ), resources=limits), heard
        )
        await spawned.wait()
        assert set(spawned.limited_by) == {"memory", "cpu_seconds", "open_files", "processes"}
    assert heard.of("stdout") == ["1048576", "7", "50", "60", "19"]


@pytest.mark.slow
async def test_a_process_that_has_used_up_its_cpu_seconds_is_named_so():
    async with ProcessSpawner() as spawner:
        launch = shell("while :; do :; done", resources=Resources(cpu_seconds=1))
        spawned = await spawner.spawn(launch, Heard())
        assert await spawned.wait() == ProcessEnd(-signal.SIGXCPU, "cpu_seconds")


GREEDY = (sys.executable, "-S", "-c", "data = bytearray(200 << 20); print('got it')")


async def test_a_limit_of_memory_holds_by_rlimit_where_there_are_no_cgroups():
    heard = Heard()
    async with ProcessSpawner(cgroups=False) as spawner:
        spawned = await spawner.spawn(Launch("shop", 1, GREEDY, resources=Resources(memory=64 << 20)), heard)
        assert spawned.limited_by == {"memory": "rlimit"}
        assert await spawned.wait() == ProcessEnd(1)
        assert heard.of("stderr")[-1] == "MemoryError"


async def test_a_process_that_the_kernel_killed_for_its_memory_is_named_so():
    async with ProcessSpawner() as spawner:
        spawned = await spawner.spawn(Launch("shop", 1, GREEDY, resources=Resources(memory=64 << 20)), Heard())
        if spawned.limited_by != {"memory": "cgroup"}:
            pytest.skip("the memory of cgroups (version 2) cannot be limited here")
        assert await spawned.wait() == ProcessEnd(-signal.SIGKILL, "memory")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can change the user")
async def test_it_runs_as_its_user_with_the_groups_of_that():
    heard = Heard()
    async with ProcessSpawner() as spawner:
        spawned = await spawner.spawn(shell("id -un; id -G", user="nobody", directory="/"), heard)
        await spawned.wait()
    assert heard.of("stdout") == ["nobody", subprocess.check_output(["id", "-G", "nobody"], text=True).strip()]


@pytest.mark.parametrize(("own", "home"), [({}, None), ({"HOME": "/srv"}, "/srv")])
async def test_its_home_and_its_name_are_those_of_its_user(own, home):
    heard = Heard()
    entry = pwd.getpwuid(os.geteuid()) if os.geteuid() != 0 else pwd.getpwnam("nobody")
    async with ProcessSpawner() as spawner:
        said = shell('echo "$HOME $USER $LOGNAME"', user=entry.pw_name, directory="/", environment=own)
        await (await spawner.spawn(said, heard)).wait()
    assert heard.of("stdout") == [f"{home or entry.pw_dir} {entry.pw_name} {entry.pw_name}"]


async def test_notifications_are_told_in_order_and_before_its_end():
    heard = Heard()
    program = (
        "import os, socket\n"
        "notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)\n"
        "notify.connect('\\0' + os.environ['NOTIFY_SOCKET'][1:])\n"
        "notify.send(b'STATUS=warming up')\n"
        "notify.send(b'READY=1\\nSTATUS=50% = half\\nnonsense')\n"
        "notify.send(b'\\xff')\n"
        "ends = os.pipe()\n"
        "socket.send_fds(notify, [b'BARRIER=1'], [ends[1]])\n"
        "os.close(ends[1])\n"
        "os.read(ends[0], 1)\n"
    )
    async with ProcessSpawner() as spawner:
        launch = Launch("shop", 1, (sys.executable, "-S", "-c", program))
        spawned = await spawner.spawn(launch, heard)
        assert await spawned.wait() == ProcessEnd(0)
    assert heard.news == [{"STATUS": "warming up"}, {"READY": "1", "STATUS": "50% = half"}, {"BARRIER": "1"}]


async def test_without_notify_there_is_no_socket():
    heard = Heard()
    async with ProcessSpawner() as spawner:
        launch = shell('echo "<$NOTIFY_SOCKET>"', environment={"PATH": os.environ["PATH"]}, notify=False)
        await (await spawner.spawn(launch, heard)).wait()
    assert heard.of("stdout") == ["<>"]


FAILURES = {
    "no program": (Launch("s", 0, ("nosuch",), {"PATH": "/bin"}), "there is no such program in PATH (/bin)"),
    "no path": (Launch("s", 0, ("/no/such",)), "there is no such program: install it, or correct 'command'"),
    "relative": (Launch("s", 0, ("./nosuch",), directory="/usr"), "there is no such program below '/usr'"),
    "plain file": (Launch("s", 0, ("/etc/passwd",)), "/etc/passwd is not executable (chmod +x)"),
    "a directory": (Launch("s", 0, ("/usr",)), "/usr is a directory"),
    "no directory": (Launch("s", 0, ("true",), directory="/no/such"), "there is no directory '/no/such': create it"),
    "no user": (Launch("s", 0, ("true",), user="no-such-user"), "there is no user 'no-such-user'"),
    "too long": (Launch("s", 0, ("true", "x" * 200_000)), "arguments and environment are too long"),
    "bad descriptor": (Launch("s", 0, ("true",), descriptors=(99_999,)), "Bad file descriptor"),
    "bad limit": (
        Launch("s", 0, ("true",), resources=Resources(open_files=1 << 40)),
        "limit open_files = 1099511627776 is",
    ),
}


@pytest.mark.parametrize("failure", FAILURES)
async def test_a_failed_start_says_the_program_the_cause_and_what_to_do(failure):
    launch, said = FAILURES[failure]
    async with ProcessSpawner() as spawner:
        with pytest.raises(SpawnError) as raised:
            await spawner.spawn(launch, Heard())
        text = str(raised.value)
        assert said in text
        assert "\n" not in text
        assert text.startswith(f"service 's': {launch.command[0]!r} cannot be started: ")
        assert await (await spawner.spawn(Launch("s", 0, ("true",)), Heard())).wait() == ProcessEnd(0)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("#!/no/such/interpreter\n", "or its interpreter '/no/such/interpreter' cannot be read or run"),
        ("echo hello\n", "give it a first line such as #!/bin/sh"),
    ],
)
async def test_a_script_that_cannot_be_run_is_explained(tmp_path, content, said):
    (tmp_path / "run").write_text(content)
    (tmp_path / "run").chmod(0o755)
    async with ProcessSpawner() as spawner:
        with pytest.raises(SpawnError) as raised:
            await spawner.spawn(Launch("shop", 1, (str(tmp_path / "run"),)), Heard())
    assert said in str(raised.value)


async def test_failed_and_ended_processes_leave_no_descriptor(cgroups):
    async with ProcessSpawner(cgroups=cgroups) as spawner:
        await (await spawner.spawn(shell(":"), Heard())).wait_empty()
        before, programs = descriptors(), set(os.listdir(f"/proc/{spawner.pid}/fd"))
        for _ in range(5):
            with pytest.raises(SpawnError):
                await spawner.spawn(Launch("s", 0, ("nosuch",)), Heard())
            await (await spawner.spawn(shell("exit 1"), Heard())).wait_empty()
        assert descriptors() == before
        assert set(os.listdir(f"/proc/{spawner.pid}/fd")) == programs


@pytest.mark.slow
async def test_two_thousand_spawns_leave_no_descriptor_and_no_process(cgroups):
    async with ProcessSpawner(cgroups=cgroups) as spawner:
        await (await spawner.spawn(Launch("s", 0, ("true",)), Heard())).wait_empty()
        before, programs = descriptors(), set(os.listdir(f"/proc/{spawner.pid}/fd"))
        for _ in range(2000):
            await (await spawner.spawn(Launch("s", 0, ("true",)), Heard())).wait_empty()
        assert descriptors() == before
        assert set(os.listdir(f"/proc/{spawner.pid}/fd")) == programs


async def test_many_start_at_once():
    async with ProcessSpawner() as spawner, anyio.create_task_group() as tasks:
        ends = []

        async def one(status):
            ends.append(await (await spawner.spawn(shell(f"exit {status}"), Heard())).wait())

        for status in range(40):
            tasks.start_soon(one, status)
    assert sorted(end.returncode for end in ends) == list(range(40))


@pytest.mark.parametrize("cgroups", [True], indirect=True)
async def test_each_process_has_a_cgroup_that_is_removed_with_what_is_below_it(cgroups):
    heard = Heard()
    async with ProcessSpawner(cgroups=cgroups) as spawner:
        spawned = await spawner.spawn(shell("grep ^0:: /proc/self/cgroup; sleep 1000"), heard)
        folder = Path(spawner.cgroup)
        with anyio.fail_after(10):
            while not heard.lines:
                await anyio.sleep(0.005)
        (own,) = [each for each in folder.iterdir() if each.is_dir()]
        assert heard.of("stdout")[0].endswith(f"/{folder.name}/{own.name}")
        assert str(spawned.pid) in (own / "cgroup.procs").read_text().split()
        (own / "below").mkdir()
        spawned.kill()
        await spawned.wait_empty()
        assert not own.exists()
    assert not folder.exists()


@pytest.mark.parametrize("cgroups", [True], indirect=True)
async def test_when_the_program_is_killed_its_cgroups_are_emptied_and_removed(cgroups):
    """Also of what could be recognized by nothing else."""
    heard = Heard()
    async with ProcessSpawner(cgroups=cgroups) as spawner:
        spawned = await spawner.spawn(shell("(setsid env -i sh -c 'echo $$; exec sleep 1000' &); wait"), heard)
        with anyio.fail_after(10):
            while not heard.lines:
                await anyio.sleep(0.005)
        folder, escaped = Path(spawner.cgroup), int(heard.of("stdout")[0])
        os.kill(spawner.pid, signal.SIGKILL)
        await spawned.wait_empty()
        assert not runs(escaped)
        await (await spawner.spawn(shell(":"), Heard())).wait_empty()
        assert not folder.exists()


SUPERVISOR = """
import os, sys
import anyio
from mainspring.services.spawner import ProcessSpawner
from mainspring.services.spawning import Launch

class Listener:
    def on_line(self, stream, line):
        print(line, flush=True)

    def on_notify(self, news):
        pass

async def main():
    async with ProcessSpawner(cgroups=sys.argv[3] == '1') as spawner:
        launch = Launch("shop", 1, ("sh", "-c", sys.argv[1]), dict(os.environ), stop_timeout=float(sys.argv[2]))
        await spawner.spawn(launch, Listener())
        print("program", spawner.pid, flush=True)
        await anyio.sleep_forever()

anyio.run(main)
"""


async def killed_supervisor(script, stop_timeout, lines, cgroups):
    """Run a supervisor of its own until so many lines were read, and kill it. Return the lines, and the program's pid."""
    async with await anyio.open_process(
        [sys.executable, "-c", SUPERVISOR, script, str(stop_timeout), str(int(cgroups))]
    ) as supervisor:
        found, text = [], b""
        with anyio.fail_after(20):
            while len(found) < lines + 1:
                text += await supervisor.stdout.receive()
                found = text.decode().split("\n")[:-1]
        supervisor.kill()
    program = next(int(line.split()[1]) for line in found if line.startswith("program"))
    return [line for line in found if not line.startswith("program")], program


async def test_when_the_supervisor_is_killed_processes_may_drain_and_nothing_is_left(tmp_path, cgroups):
    """They can still write, and what they leave behind is killed when their time is over."""
    script = (
        f"trap 'echo draining; sleep 0.1; echo drained > {tmp_path}/file; exit' TERM\n"
        "setsid sh -c 'trap \"\" TERM; echo $$; while :; do sleep 1; done' & sleep 0.05; echo $$; while :; do sleep 0.05; done"
    )
    lines, program = await killed_supervisor(script, 0.35, 2, cgroups)
    await until_gone(program, *map(int, lines))
    assert (tmp_path / "file").read_text() == "drained\n"


async def test_when_the_supervisor_is_killed_what_ignores_sigterm_is_killed(cgroups):
    lines, program = await killed_supervisor("trap '' TERM; echo $$; while :; do sleep 0.05; done", 0.2, 1, cgroups)
    await until_gone(program, *map(int, lines))


async def test_when_the_supervisor_and_the_program_are_killed_together_the_grandparent_is_left_with_nothing(cgroups):
    """A supervisor under a supervisor: the outer one knows the processes by their environment."""
    heard = Heard()
    async with ProcessSpawner(cgroups=cgroups) as spawner:
        command = (sys.executable, "-c", SUPERVISOR, "echo $$; exec sleep 1000", "60", str(int(cgroups)))
        spawned = await spawner.spawn(Launch("outer", 1, command, dict(os.environ)), heard)
        with anyio.fail_after(20):
            while len(heard.lines) < 2:
                await anyio.sleep(0.01)
        inner = next(int(line) for line in heard.of("stdout") if line.isdigit())
        program = next(int(line.split()[1]) for line in heard.of("stdout") if line.startswith("program"))
        os.kill(program, signal.SIGSTOP)  # so that neither sees the other's end
        os.kill(spawned.pid, signal.SIGKILL)
        os.kill(program, signal.SIGKILL)
        await spawned.wait()
        assert runs(inner)
        spawned.kill()
        await spawned.wait_empty()
        assert not runs(inner)
