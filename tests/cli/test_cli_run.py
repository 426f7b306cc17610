"""``mainspring run`` as a process: targets, signals before and during the run, exit statuses."""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from textwrap import dedent
from typing import TYPE_CHECKING

import httpx
import pytest
from cli_helpers import MAINSPRING, PATIENCE, only_line, run, started

from mainspring.cli.app import call

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.own_time(2)

GROUP = """
from mainspring import InMemoryMailbox, LoopGroup, MainLoop

async def handle(number: int) -> None: ...

group = LoopGroup([MainLoop(InMemoryMailbox("jobs"), handle)], name="shop")
"""


def write(directory: Path, text: str, name: str = "app.py") -> None:
    (directory / name).write_text(dedent(text), encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("loop", ["asyncio", "uvloop", "trio", "auto"])
def test_it_runs_until_sigterm_and_reports(tmp_path: Path, loop: str) -> None:
    write(tmp_path, GROUP)
    with started("run", "app:group", "--loop", loop, cwd=tmp_path) as command:
        command.expect("shop: running")
        command.send(signal.SIGTERM)
        assert command.wait() == 0
        assert "mainspring: shop: shutdown (SIGTERM)" in command.text
        assert command.text.count("handle: finished") == 1


@pytest.mark.slow
def test_a_function_that_returns_the_group_and_ctrl_c(tmp_path: Path) -> None:
    write(tmp_path, GROUP + "\ndef make() -> LoopGroup:\n    return group\n")
    with started("run", "app:make", cwd=tmp_path) as command:
        command.expect("shop: running")
        command.send(signal.SIGINT)
        assert command.wait() == 0
        assert "shutdown (SIGINT)" in command.text


@pytest.mark.slow
def test_a_dotted_module_and_attribute(tmp_path: Path) -> None:
    (tmp_path / "shop").mkdir()
    write(tmp_path / "shop", "")
    write(tmp_path / "shop", GROUP + "\nclass Settings:\n    main = group\n", "jobs.py")
    with started("run", "shop.jobs:Settings.main", cwd=tmp_path) as command:
        command.expect("shop: running")
        command.send(signal.SIGTERM)
        assert command.wait() == 0


WRONG = {
    "no colon": ("app", "", "'app' is no target; write MODULE:ATTR, for example app:group"),
    "a file name": ("app.py:group", "", "names a file; write the module's name instead: app:group"),
    "a path": ("./shop/app.py:group", "", "write the module's name instead: shop.app:group"),
    "no module": ("nowhere:group", "", "there is no module 'nowhere' in"),
    "no submodule": ("app.jobs:group", "", "there is no module 'app.jobs' in"),
    "a missing import": (
        "app:group",
        "import os\nimport not_there\n",
        "app.py:2: ModuleNotFoundError: No module named 'not_there'",
    ),
    "a syntax error": (
        "app:group",
        "x = 1\ndef broken(:\n",
        "app does not import: app.py:2: SyntaxError: invalid syntax",
    ),
    "an error in a function": (
        "app:group",
        "import json\ndef load():\n    return json.loads('nope')\nload()\n",
        "app does not import: app.py:3: JSONDecodeError: Expecting value",
    ),
    "sys.exit": ("app:group", "import sys\nsys.exit(3)\n", "it calls sys.exit(3); keep that under `if __name__"),
    "a wrong constructor value": (
        "app:group",
        GROUP.replace("group = LoopGroup", "group = LoopGroup([], name='x') or LoopGroup"),
        "app does not import: app.py:6: ConfigError: LoopGroup: it needs at least one loop",
    ),
    "no attribute": ("app:grp", GROUP, "app:grp: app has no 'grp'; it has app:group"),
    "no attribute, no group": ("app:grp", "x = 1", "app has no 'grp'; define one there: group = LoopGroup([…])"),
    "another object": (
        "app:x",
        "x = 1",
        "app:x is an object of type int, not a LoopGroup; name a LoopGroup or a function",
    ),
    "tasks": (
        "app:tasks",
        "from mainspring import Tasks\ntasks = Tasks('memory://jobs')\n",
        "not a LoopGroup; wrap its loop: group = LoopGroup([tasks.loop()])",
    ),
    "a loop": ("app:loop", GROUP + "\nloop = group.loops[0]\n", "not a LoopGroup; wrap it: group = LoopGroup([loop])"),
    "an async function": (
        "app:make",
        "async def make(): ...",
        "is an async function; a plain one must return the LoopGroup",
    ),
    "a function with parameters": ("app:make", "def make(x): ...", "cannot be called without arguments"),
    "a function that returns nothing": ("app:make", "def make(): ...", "app:make is None, not a LoopGroup"),
    "a function that fails": (
        "app:make",
        "def make():\n    return 1 / 0",
        "app:make() failed: app.py:2: ZeroDivisionError",
    ),
    "a function that exits": ("app:make", "def make():\n    raise SystemExit(1)", "app:make() calls sys.exit(1)"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_target_is_one_line_and_status_2(tmp_path: Path, case: str) -> None:
    target, source, expected = WRONG[case]
    write(tmp_path, source)
    ended = run("run", target, cwd=tmp_path)
    assert ended.returncode == 2, ended.stderr
    assert expected in only_line(ended.stderr)
    assert ended.stdout == ""


@pytest.mark.parametrize("case", WRONG)
def test_so_it_is_for_check(
    tmp_path: Path, case: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this process: that a status and a line come out of one is shown above."""
    target, source, expected = WRONG[case]
    write(tmp_path, source)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    monkeypatch.setitem(sys.modules, "app", None)  # afterwards there is none of this test's
    del sys.modules["app"]
    assert call(["check", target]) == 2
    printed = capsys.readouterr()
    assert expected in only_line(printed.err)
    assert printed.out == ""


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["run"], "Missing argument 'MODULE:ATTR'; see `mainspring run --help`"),
        (["run", "app:group", "--processes", "0"], "'--processes'"),
        (["run", "app:group", "--health-port", "70000"], "'--health-port'"),
        (["run", "app:group", "--loop", "curio"], "'--loop'"),
        (["run", "app:group", "--log-level", "LOUD"], "log level must be one of DEBUG"),
        (["run", "app:group", "--frob"], "No such option"),
        (["frob"], "No such command 'frob'; see `mainspring --help`"),
    ],
)
def test_wrong_options_are_one_line_and_status_2(tmp_path: Path, arguments: list[str], expected: str) -> None:
    write(tmp_path, GROUP)
    ended = run(*arguments, cwd=tmp_path)
    assert ended.returncode == 2
    assert expected in only_line(ended.stderr)


@pytest.mark.parametrize(
    "arguments", [["run", "json:dumps"], ["check", "json:dumps"], ["send", "sqlite:///jobs.db?name=jobs", "1"]]
)
def test_a_working_directory_that_is_gone_is_one_line_and_status_2(tmp_path: Path, arguments: list[str]) -> None:
    program = f"mkdir gone && cd gone && rmdir ../gone && exec {shlex.join([*MAINSPRING, *arguments])}"
    ended = subprocess.run(
        ["sh", "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert ended.returncode == 2
    assert only_line(ended.stderr) == "mainspring: the working directory has been removed; change to one that exists"


def test_no_verb_shows_the_help_and_is_wrong_use(tmp_path: Path) -> None:
    ended = run(cwd=tmp_path)
    assert ended.returncode == 2
    assert "Usage: mainspring" in ended.stdout


@pytest.mark.parametrize("verb", ["run", "send", "check", "demo"])
def test_every_verb_has_help_with_an_example(tmp_path: Path, verb: str) -> None:
    ended = run(verb, "--help", cwd=tmp_path)
    assert ended.returncode == 0
    assert f"Example: mainspring {verb}" in ended.stdout


def test_the_version(tmp_path: Path) -> None:
    from mainspring import __version__

    assert run("--version", cwd=tmp_path).stdout == f"mainspring {__version__}\n"


SLOW_IMPORT = """
import sys, time
print("importing", file=sys.stderr, flush=True)
while True:
    time.sleep(0.05)  # a signal between the last check for one and a long sleep would not end that
"""

DEAF_IMPORT = (
    """
import sys, time
try:
    print("importing", file=sys.stderr, flush=True)
    while True:
        time.sleep(0.05)  # as above
except BaseException:
    print("swallowed", file=sys.stderr, flush=True)
"""
    + GROUP
)


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("source", [SLOW_IMPORT, DEAF_IMPORT], ids=["slow", "deaf"])
def test_a_signal_during_the_import_ends_it_cleanly(tmp_path: Path, signum: signal.Signals, source: str) -> None:
    write(tmp_path, source)
    with started("run", "app:group", cwd=tmp_path) as command:
        command.expect("importing")
        command.send(signum)
        assert command.wait() == 0
        assert f"mainspring: {signum.name} before the start; nothing was running" in command.text
        assert "Traceback" not in command.text


@pytest.mark.slow
def test_a_second_signal_ends_an_import_that_swallowed_the_first(tmp_path: Path) -> None:
    write(
        tmp_path,
        DEAF_IMPORT.replace(
            'print("swallowed", file=sys.stderr, flush=True)',
            'print("swallowed", file=sys.stderr, flush=True)\n    while True: time.sleep(0.05)',
        ),
    )
    with started("run", "app:group", cwd=tmp_path) as command:
        command.expect("importing")
        command.send(signal.SIGTERM)
        command.expect("swallowed")
        command.send(signal.SIGTERM)
        assert command.wait() == 128 + signal.SIGTERM


BETWEEN = """
import os, signal
from mainspring import InMemoryMailbox, LoopGroup, MainLoop

class Between(LoopGroup):
    async def run(self, **keywords):
        os.kill(os.getpid(), signal.{signum})  # the event loop turns, but the group's receiver is not open yet
        return await super().run(**keywords)

async def handle(number: int) -> None: ...

group = Between([MainLoop(InMemoryMailbox("jobs"), handle)])
"""


@pytest.mark.slow
@pytest.mark.parametrize("signum", ["SIGTERM", "SIGINT"])
@pytest.mark.parametrize("loop", ["asyncio", "uvloop", "trio"])
def test_a_signal_between_import_and_start_is_not_lost(tmp_path: Path, loop: str, signum: str) -> None:
    write(tmp_path, BETWEEN.format(signum=signum))
    ended = run("run", "app:group", "--loop", loop, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert f"shutdown ({signum})" in ended.stderr


OWN_LOOP = """
import anyio
from mainspring import Heartbeat, LoopGroup

class Own:
    running = False
    heartbeat = Heartbeat()
    async def run(self) -> None:
        {body}
    async def shutdown(self, *, timeout: float = 30.0) -> bool:
        return True

group = LoopGroup([Own()], name="own", shutdown_timeout=0.1, cancel_grace=1)
"""


def test_a_crashed_loop_is_status_1_with_its_traceback(tmp_path: Path) -> None:
    write(tmp_path, OWN_LOOP.format(body="raise RuntimeError('out of coal')"))
    ended = run("run", "app:group", cwd=tmp_path)
    assert ended.returncode == 1
    assert "RuntimeError: out of coal" in ended.stderr
    assert ended.stderr.count("shutdown (loop 'Own' crashed)") == 1
    assert "app.py" in ended.stderr


def test_loops_that_end_by_themselves_end_the_run(tmp_path: Path) -> None:
    write(tmp_path, OWN_LOOP.format(body="await anyio.sleep(0)"))
    ended = run("run", "app:group", cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert "shutdown (all loops ended)" in ended.stderr
    assert "\n  phases: " in ended.stderr  # the report keeps its lines


@pytest.mark.slow
def test_work_that_had_to_be_cancelled_is_status_70(tmp_path: Path) -> None:
    write(tmp_path, OWN_LOOP.format(body="await anyio.sleep(600)"))
    with started("run", "app:group", cwd=tmp_path) as command:
        command.expect("own: running")
        command.send(signal.SIGTERM)
        assert command.wait() == 70
        assert "not clean, exit status 70" in command.text


@pytest.mark.slow
def test_a_third_ctrl_c_says_what_is_lost_in_memory(tmp_path: Path) -> None:
    source = """
        import sys
        import anyio
        from mainspring import InMemoryMailbox, LoopGroup, MainLoop

        mailbox = InMemoryMailbox("jobs")

        async def stay(number: int) -> None:
            sys.stderr.write("begun\\n")
            while True:
                try:
                    await anyio.sleep(600)
                except BaseException:
                    sys.stderr.write("swallowed\\n")
                    with anyio.CancelScope(shield=True):
                        await anyio.sleep(600)

        class Sender:
            heartbeat = None
            running = False

            async def run(self) -> None:
                await mailbox.send(1)

            def shutdown(self) -> bool:
                return True

        group = LoopGroup([MainLoop(mailbox, stay), Sender()])
    """
    write(tmp_path, source)
    with started("run", "app:group", cwd=tmp_path) as command:
        command.expect("begun")
        command.send(signal.SIGINT)
        command.expect("finish")
        command.send(signal.SIGINT)
        command.expect("swallowed")
        command.send(signal.SIGINT)
        assert command.wait() == 128 + signal.SIGINT
        assert "leaving at once: shutdown (SIGINT)" in command.text
        assert "in hand: 1 message; lost with this process's memory" in command.text


@pytest.mark.slow
def test_the_health_port_of_the_command_line(tmp_path: Path) -> None:
    write(tmp_path, GROUP)
    with started("run", "app:group", "--health-port", "0", cwd=tmp_path) as command:
        url = command.expect(r"health server at (http://127\.0\.0\.1:\d+)").group(1)
        with urllib.request.urlopen(f"{url}/health/live", timeout=20) as answer:
            assert answer.status == 200
        command.send(signal.SIGTERM)
        assert command.wait() == 0


@pytest.mark.slow
def test_the_probes_are_served_on_the_socket_of_a_supervisor(tmp_path: Path) -> None:
    write(tmp_path, GROUP)
    path = tmp_path / "probes.sock"
    with started("run", "app:group", cwd=tmp_path, MAINSPRING_SOCKET=str(path)) as command:
        command.expect("shop: running")
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path))) as client:
            assert client.get("http://group/health/ready").status_code == 200


@pytest.mark.slow
def test_the_health_host_of_the_command_line(tmp_path: Path) -> None:
    write(tmp_path, GROUP)
    with started("run", "app:group", "--health-port", "0", "--health-host", "127.0.0.2", cwd=tmp_path) as command:
        url = command.expect(r"health server at (http://127\.0\.0\.2:\d+)").group(1)
        with urllib.request.urlopen(f"{url}/health/live", timeout=20) as answer:
            assert answer.status == 200
        command.send(signal.SIGTERM)
        assert command.wait() == 0


def test_a_busy_port_is_one_clear_line_and_status_1(tmp_path: Path) -> None:
    write(tmp_path, GROUP)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ended = run("run", "app:group", "--health-port", str(port), "--log-level", "CRITICAL", cwd=tmp_path)
    assert ended.returncode == 1
    assert str(port) in only_line(ended.stderr)


NO_STORE = GROUP.replace("InMemoryMailbox(", "open_mailbox('postgresql://nobody@127.0.0.1:1/nothing', name=").replace(
    "import InMemoryMailbox", "import open_mailbox"
)


def test_a_store_that_can_never_be_opened_is_one_clear_line_and_status_2(tmp_path: Path) -> None:
    write(tmp_path, NO_STORE)
    ended = run("run", "app:group", "--loop", "trio", "--log-level", "CRITICAL", cwd=tmp_path)
    assert "runs on asyncio only" in only_line(ended.stderr)
    assert ended.returncode == 2


def test_a_store_that_is_away_is_one_clear_line_and_status_1(tmp_path: Path) -> None:
    write(tmp_path, NO_STORE)
    ended = run("run", "app:group", "--loop", "asyncio", "--log-level", "CRITICAL", cwd=tmp_path)
    assert "cannot be reached" in only_line(ended.stderr)
    assert ended.returncode == 1


def test_logs_as_json_lines_with_the_report_in_the_last_one(tmp_path: Path) -> None:
    import json

    write(tmp_path, OWN_LOOP.format(body="await anyio.sleep(0)"))
    ended = run("run", "app:group", "--log-json", cwd=tmp_path)
    assert ended.returncode == 0
    lines = [json.loads(line) for line in ended.stderr.splitlines()]
    assert lines[-1]["event"] == "GroupStopped"
    assert lines[-1]["exit_status"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("output", ["closed from the start", "gone meanwhile"])
def test_a_worker_that_nobody_hears_ends_with_its_own_status(output: str, tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(
        "from pathlib import Path\n"
        "from mainspring import InMemoryMailbox, LoopGroup, MainLoop\n"
        "from mainspring.events import GroupStateChanged\n"
        "async def handle(job: int) -> None: ...\n"
        "group = LoopGroup([MainLoop(InMemoryMailbox('jobs'), handle)])\n"
        "group.dispatcher.subscribe(GroupStateChanged, lambda event: Path(str(event.new)).touch())\n"
    )
    command = [*MAINSPRING, "run", "app:group"]
    read, write = os.pipe()
    if output == "closed from the start":
        command = ["/bin/sh", "-c", 'exec "$0" "$@" <&- >&- 2>&-', *command]
    process = subprocess.Popen(command, cwd=tmp_path, stdin=subprocess.DEVNULL, stdout=write, stderr=write)
    os.close(write)
    try:
        deadline = time.monotonic() + PATIENCE
        while not (tmp_path / "running").exists():
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
        os.close(read)
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0
    finally:
        process.kill()
        process.wait()
