"""``mainspring run --processes`` and ``--reload`` as processes: replaced, stopped together, never orphaned."""

from __future__ import annotations

import os
import re
import signal
from dataclasses import dataclass
from textwrap import dedent
from typing import TYPE_CHECKING

import anyio
import pytest
from cli_helpers import Command, alive, only_line, run, started, wait_until, wait_until_gone

from mainspring.cli.run import RunOptions
from mainspring.cli.supervise import Supervisor
from mainspring.cli.worker_process import NUMBER
from mainspring.policies import RestartPolicy
from ports import neighbours

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow

SERVICE = """
import os, sys
import anyio
from mainspring import Heartbeat, LoopGroup

class Own:
    running = False
    heartbeat = Heartbeat()

    async def run(self) -> None:
        sys.stderr.write(f"pid {os.getpid()} runs\\n")
        await self.work()

    async def work(self) -> None:
        self.stop = anyio.Event()
        await self.stop.wait()

    async def shutdown(self, *, timeout: float = 30.0) -> bool:
        self.stop.set()
        return True

group = LoopGroup([Own()], name="own", shutdown_timeout=5, cancel_grace=1)
"""

RUN_TWO = ("run", "app:group", "--processes", "2", "--log-level", "ERROR")


def write(directory: Path, text: str = SERVICE) -> None:
    (directory / "app.py").write_text(dedent(text), encoding="utf-8")


def new_pid(command: Command) -> int:
    return int(command.expect(r"^pid (\d+) runs").group(1))


def test_a_signal_stops_all_workers(tmp_path: Path) -> None:
    write(tmp_path)
    with started(*RUN_TWO, cwd=tmp_path) as command:
        pids = {new_pid(command), new_pid(command)}
        assert len(pids) == 2
        command.send(signal.SIGTERM)
        assert command.wait() == 0
        assert not any(alive(pid) for pid in pids)
        assert "all workers have ended; exit status 0" in command.text
        for number in (1, 2):
            assert f"mainspring: worker.{number}: own: shutdown (SIGTERM)" in command.text


def test_the_exit_status_of_workers_is_known_where_a_parent_ignored_their_ends(tmp_path: Path) -> None:
    write(tmp_path)
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        command = Command(*RUN_TWO, cwd=tmp_path)
    finally:
        signal.signal(signal.SIGCHLD, before)
    try:
        new_pid(command), new_pid(command)
        command.send(signal.SIGTERM)
        assert command.wait() == 0, command.text
    finally:
        command.close()


def test_ctrl_c_while_the_interpreter_of_a_worker_starts_ends_it_without_a_word(tmp_path: Path) -> None:
    """It was a KeyboardInterrupt there: a traceback of Python's own start, and the exit status 1."""
    write(tmp_path)
    slow = f"""
    import os, sys, time
    if {NUMBER!r} in os.environ:
        sys.stderr.write("a worker starts\\n")
        sys.stderr.flush()
        time.sleep(60)
    """
    (tmp_path / "sitecustomize.py").write_text(dedent(slow), encoding="utf-8")
    with started(*RUN_TWO, cwd=tmp_path, PYTHONPATH=str(tmp_path)) as command:
        command.expect("a worker starts")
        command.expect("a worker starts")
        command.send(signal.SIGINT)
        assert command.wait() == 0
        assert "Traceback" not in command.text
        assert "all workers have ended; exit status 0" in command.text


def test_a_killed_worker_is_replaced_with_backoff(tmp_path: Path) -> None:
    write(tmp_path)
    with started(*RUN_TWO, cwd=tmp_path) as command:
        first, second = new_pid(command), new_pid(command)
        os.kill(first, signal.SIGKILL)
        command.expect(rf"\(pid {first}\) has ended, killed by SIGKILL; starting another one .*\(restart 1 of 5\)")
        third = new_pid(command)
        assert third not in {first, second}
        assert alive(second)
        command.send(signal.SIGTERM)
        assert command.wait() == 0


def test_a_worker_that_somebody_else_told_to_stop_is_replaced(tmp_path: Path) -> None:
    write(tmp_path)
    with started(*RUN_TWO, cwd=tmp_path) as command:
        first, _ = new_pid(command), new_pid(command)
        os.kill(first, signal.SIGTERM)
        command.expect(rf"\(pid {first}\) has ended, exit status 0; starting another one .*\(restart 1 of 5\)$")
        new_pid(command)
        command.send(signal.SIGINT)
        assert command.wait() == 0


def test_workers_whose_loops_have_ended_are_not_started_again(tmp_path: Path) -> None:
    write(tmp_path, SERVICE.replace("await self.work()", "pass"))
    ended = run(*RUN_TWO, cwd=tmp_path)
    assert ended.returncode == 0
    assert ended.stderr.count(" runs\n") == 2
    assert "starting another one" not in ended.stderr


def test_no_orphan_stays_when_the_supervisor_is_killed(tmp_path: Path) -> None:
    write(tmp_path)
    with started(*RUN_TWO, cwd=tmp_path) as command:
        pids = [new_pid(command), new_pid(command)]
        command.send(signal.SIGKILL)
        assert command.process.wait(60) == -signal.SIGKILL
        for pid in pids:
            wait_until_gone(pid)


def test_no_orphan_stays_that_was_still_importing(tmp_path: Path) -> None:
    write(
        tmp_path,
        "import os, sys, time\nsys.stderr.write(f'pid {os.getpid()} runs\\n')\ntime.sleep(600)\n",
    )
    with started(*RUN_TWO, cwd=tmp_path) as command:
        pids = [new_pid(command), new_pid(command)]
        command.send(signal.SIGKILL)
        for pid in pids:
            wait_until_gone(pid)


def test_a_mailbox_that_the_workers_do_not_share_is_warned_of_once(tmp_path: Path) -> None:
    write(
        tmp_path,
        """
        from mainspring import LoopGroup, MainLoop, open_mailbox

        async def handle(job: int) -> None: ...

        boxes = [open_mailbox(url) for url in ("memory://own", "memory://own", "sqlite:///jobs.db?name=shared")]
        group = LoopGroup([MainLoop(box, handle) for box in boxes])
        """,
    )
    with started("run", "app:group", "--processes", "2", cwd=tmp_path) as command:
        for _ in range(2):
            command.expect("mainspring: running")
        command.send(signal.SIGTERM)
        assert command.wait() == 0
        assert command.text.count("not shared") == 1
        assert "mailbox 'own' is not shared by the worker processes: each has one of its own" in command.text


def test_a_wrong_target_is_said_once_and_not_tried_again(tmp_path: Path) -> None:
    ended = run("run", "nowhere:group", "--processes", "3", cwd=tmp_path)
    assert ended.returncode == 2
    assert "there is no module 'nowhere'" in only_line(ended.stderr)


def test_a_second_signal_reaches_the_workers_too(tmp_path: Path) -> None:
    write(tmp_path, SERVICE.replace("        self.stop.set()\n", "        sys.stderr.write('asked\\n')\n"))
    with started(*RUN_TWO, cwd=tmp_path) as command:
        new_pid(command), new_pid(command)
        command.send(signal.SIGTERM)
        command.expect("asked")
        command.expect("asked")
        command.send(signal.SIGTERM)
        assert command.wait() == 128 + signal.SIGTERM
        assert "forced" in command.text or "exit status 143" in command.text


def test_a_third_signal_ends_all_of_it_at_once(tmp_path: Path) -> None:
    deaf = """
        sys.stderr.write('asked\\n')
        while True:
            try:
                await anyio.sleep(600)
            except BaseException:
                sys.stderr.write('swallowed\\n')
                with anyio.CancelScope(shield=True):
                    await anyio.sleep(600)
    """
    write(tmp_path, SERVICE.replace("        await self.work()\n", deaf).replace("self.stop.set()", "pass"))
    with started(*RUN_TWO, cwd=tmp_path) as command:
        pids = [new_pid(command), new_pid(command)]
        command.expect("asked")
        command.send(signal.SIGTERM)
        command.send(signal.SIGINT)
        command.expect("swallowed")
        command.send(signal.SIGTERM)
        assert command.wait() == 128 + signal.SIGTERM
        assert "the services were killed" in command.text
        for pid in pids:
            wait_until_gone(pid)


def test_a_worker_that_cannot_stop_is_killed_when_its_time_is_over(tmp_path: Path) -> None:
    write(tmp_path, SERVICE.replace("shutdown_timeout=5, cancel_grace=1", "shutdown_timeout=0, cancel_grace=0"))
    with started(*RUN_TWO, cwd=tmp_path) as command:
        first, second = new_pid(command), new_pid(command)
        os.kill(first, signal.SIGSTOP)
        command.send(signal.SIGTERM)
        command.expect(rf"\(pid {first}\) did not end in time, and was killed")
        assert command.wait() == 128 + signal.SIGKILL
        assert not alive(first)
        assert not alive(second)


def test_each_worker_has_a_health_port_of_its_own(tmp_path: Path) -> None:
    import urllib.request

    write(tmp_path)
    first, second = neighbours(2)
    with started("run", "app:group", "--processes", "2", "--health-port", str(first), cwd=tmp_path) as command:
        found = {command.expect(r"health server at http://127\.0\.0\.1:(\d+)").group(1) for _ in range(2)}
        assert found == {str(first), str(second)}
        with urllib.request.urlopen(f"http://127.0.0.1:{second}/health/live", timeout=20) as answer:
            assert answer.status == 200
        command.send(signal.SIGTERM)
        assert command.wait() == 0


def test_reload_starts_again_on_a_change_and_waits_where_the_source_is_broken(tmp_path: Path) -> None:
    write(tmp_path)
    with started("run", "app:group", "--reload", "--log-level", "ERROR", cwd=tmp_path) as command:
        first = new_pid(command)
        write(tmp_path, SERVICE + "\n# changed\n")
        command.expect("app.py has changed; starting again")
        second = new_pid(command)
        assert second != first
        write(tmp_path, SERVICE + "\ndef broken(:\n")
        command.expect("app.py has changed; starting again")
        command.expect("app does not import: app.py:.*SyntaxError")
        command.expect("exit status 2 before it was ready; waiting for a source file to change")
        write(tmp_path, SERVICE + "\n# mended\n")
        third = new_pid(command)
        assert third not in {first, second}
        command.send(signal.SIGTERM)
        assert command.wait() == 0
        assert not alive(third)


LEAKING = """
import os, sys
from pathlib import Path
import anyio
from mainspring import Context, LoopGroup, MainLoop, open_mailbox

async def handle(number: int, ctx: Context) -> None:
    await anyio.sleep(0.05)
    Path(f"done-{number}-{ctx.attempt}-{os.getpid()}").touch()
    if number < 0:
        Path("slow").touch()
        while not Path("go").exists():
            await anyio.sleep(0.01)

jobs = open_mailbox("sqlite:///jobs.db?name=jobs")
group = LoopGroup([MainLoop(jobs, handle, concurrency=2)], name="own", shutdown_timeout=30)
sys.stderr.write(f"pid {os.getpid()} runs\\n")
"""


def test_a_worker_that_has_handled_its_number_of_messages_is_replaced(tmp_path: Path) -> None:
    """One after the other, and nothing is lost or done twice."""
    write(tmp_path, LEAKING)
    run("send", "sqlite:///jobs.db?name=jobs", *map(str, range(30)), cwd=tmp_path)
    with started(*RUN_TWO, "--max-messages-per-process", "10", cwd=tmp_path) as command:
        new_pid(command), new_pid(command)
        for _ in range(2):
            new_pid(command)
        wait_until(lambda: len(list(tmp_path.glob("done-*"))) == 30)
        command.send(signal.SIGTERM)
        assert command.wait() == 0
    ran = [file.name.split("-") for file in tmp_path.glob("done-*")]
    assert sorted(int(number) for _, number, _, _ in ran) == list(range(30))
    assert {attempt for _, _, attempt, _ in ran} == {"1"}
    assert (
        len(
            re.findall(
                r"worker\.\d \(pid \d+\) has handled 10 messages; starting another one$", command.text, re.MULTILINE
            )
        )
        >= 2
    )
    ends = [found.start() for found in re.finditer("own: shutdown", command.text)]
    starts = [found.start() for found in re.finditer(r"^pid \d+ runs", command.text, re.MULTILINE)]
    assert ends[0] < starts[2] < ends[1], "both were replaced at once"
    assert "restart 1 of" not in command.text


SOMETIMES_SLOW = """
from pathlib import Path

import anyio

from mainspring import LoopGroup, MainLoop, open_mailbox


async def handle(number: int) -> None:
    Path(f"done-{number}").touch()
    if number % 100 == 99:
        await anyio.sleep(0.25)  # what was claimed ahead goes back


jobs = open_mailbox("sqlite:///jobs.db?name=jobs")
group = LoopGroup([MainLoop(jobs, handle)], name="own")
"""


def test_messages_that_were_only_claimed_ahead_do_not_count_as_handled(tmp_path: Path) -> None:
    write(tmp_path, SOMETIMES_SLOW)
    run("send", "sqlite:///jobs.db?name=jobs", *map(str, range(1_000)), cwd=tmp_path)
    with started("run", "app:group", "--max-messages-per-process", "500", cwd=tmp_path) as command:
        command.expect(r"has handled 500 messages; starting another one$")
        assert len(list(tmp_path.glob("done-*"))) >= 500
        command.send(signal.SIGTERM)
        assert command.wait() == 0


def test_a_signal_that_meets_a_worker_which_is_being_replaced_is_no_second_one(tmp_path: Path) -> None:
    write(tmp_path, LEAKING)
    run("send", "sqlite:///jobs.db?name=jobs", "--", "-1", "1", cwd=tmp_path)
    with started("run", "app:group", "--max-messages-per-process", "1", cwd=tmp_path) as command:
        command.expect(r"has handled 1 message; starting another one$")
        command.expect(r"own: .*SIGTERM")
        command.send(signal.SIGTERM)
        (tmp_path / "go").touch()
        assert command.wait() == 0
    assert len(list(tmp_path.glob("done-*"))) == 2


@dataclass(frozen=True)
class Missing(RunOptions):
    """Whose workers cannot be started, as while another version is being installed."""

    def worker_command(self, executable: str) -> list[str]:
        return [f"{executable}-gone"]


def test_a_worker_that_cannot_be_started_is_tried_again_and_then_given_up(capsys: pytest.CaptureFixture[str]) -> None:
    policy = RestartPolicy(max_retries=1, initial_delay=0.001)
    assert anyio.run(Supervisor(Missing("app:group", processes=2), policy).run) == 1
    said = capsys.readouterr().err
    assert "worker.1 has not started" in said
    assert "-gone' cannot be started" in said
    assert "(restart 1 of 1)" in said
