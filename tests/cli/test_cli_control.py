"""The verbs that talk to a running supervisor: ``mainspring up`` as a process, and the commands that find it."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from textwrap import dedent
from threading import Thread
from typing import TYPE_CHECKING

import pytest
from cli_helpers import MAINSPRING, PATIENCE, Command, alive, only_line, run, started, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

SERVICES = """
lifecycle:
  startup: {timeout: 20s, max_retries: 1}
  restart_policy: {initial_delay: 0, jitter: none}
services:
  web:
    command: [sh, -c, 'test -e broken && exit 3; echo "web pid $$ on"; exec sleep 600']
    ready_line: "on$"
    depends_on: [store]
    replicas: 2
  store:
    command: [sh, -c, 'echo "ERROR: store" >&2; exec sleep 600']
    ready_line: store
"""


def sockets() -> list[Path]:
    """The sockets that a command would find."""
    return sorted(Path(os.environ["MAINSPRING_RUNTIME_DIR"]).glob("*.sock"))


def pids(place: Path) -> dict[str, int | None]:
    """The processes of all replicas, by ``service.replica``."""
    status = json.loads(run("status", "--json", cwd=place).stdout)
    return {f"{s['name']}.{r['number']}": r["pid"] for s in status["services"] for r in s["replicas"]}


# ------------------------------------------------------------------------------------------------------------- finding


@pytest.mark.parametrize("verb", [["status"], ["restart"], ["stop", "web"], ["logs"], ["drain"]])
def test_where_nothing_runs_a_line_says_what_to_do(place: Path, verb: list[str]) -> None:
    ended = run(*verb, cwd=place)
    assert ended.returncode == 1
    assert "no supervisor of this user runs" in only_line(ended.stderr)
    assert "mainspring up FILE" in ended.stderr


@pytest.mark.parametrize(
    ("url", "status", "line"),
    [
        ("http://127.0.0.1:1", 1, "nothing listens on http://127.0.0.1:1"),
        ("unix:/nowhere/x.sock", 1, "there is no socket"),
        ("ftp://x", 2, "is no address of a supervisor"),
        ("http://h:port", 2, "is no address of a supervisor"),
        ("unix:", 2, "is no address of a supervisor"),
    ],
)
def test_an_address_where_no_supervisor_is(place: Path, url: str, status: int, line: str) -> None:
    ended = run("status", "--url", url, cwd=place)
    assert ended.returncode == status
    assert line in only_line(ended.stderr)


def test_a_directory_that_others_can_write_to_is_not_trusted(place: Path) -> None:
    directory = Path(os.environ["MAINSPRING_RUNTIME_DIR"])
    directory.mkdir(mode=0o777)
    directory.chmod(0o777)
    ended = run("status", cwd=place)
    assert ended.returncode == 2
    assert f"chmod 700 {directory}" in only_line(ended.stderr)
    directory.rmdir()
    directory.symlink_to(place)
    assert "is no directory" in only_line(run("status", cwd=place).stderr)


def answering(status: int, body: bytes | dict[str, bytes]) -> Iterator[tuple[str, list[str | None]]]:
    """Serve one answer to everything, or one to each path. Yield the URL and the credentials that came."""
    seen: list[str | None] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append(self.headers["Authorization"])
            self.send_response(status)
            content = body if isinstance(body, bytes) else body[self.path.partition("?")[0]]
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", seen
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize(
    ("status", "body", "line"),
    [
        (200, b"<html>hello</html>", "is no Mainspring"),
        (200, b'{"kind": "other"}', "is no Mainspring"),
        (404, b"Not Found", "404"),
        (500, b"broken\nmore", "status 500: broken"),
        (401, b"needs the header", "needs the header; set MAINSPRING_ADMIN_TOKEN"),
    ],
)
def test_an_answer_of_another_kind_is_one_line(place: Path, status: int, body: bytes, line: str) -> None:
    for url, _ in answering(status, body):
        ended = run("status", "--url", url, cwd=place)
        assert ended.returncode == 1
        assert line in only_line(ended.stderr)


def test_the_admin_token_is_sent_where_it_is_set(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAINSPRING_ADMIN_TOKEN", "geheim")
    for url, seen in answering(403, b"the bearer token is not that of MAINSPRING_ADMIN_TOKEN"):
        line = only_line(run("status", "--url", url, cwd=place).stderr)
        assert seen == ["Bearer geheim"]
        assert "set MAINSPRING_ADMIN_TOKEN" not in line


def test_a_group_is_shown_and_has_no_services(place: Path) -> None:
    loop = {"name": "mails", "state": "running", "paused": False, "ready": False, "in_flight": 2, "concurrency": 4}
    group = {
        "kind": "group", "name": "app", "state": "running", "state_seconds": 7265.0, "ready": False, "reasons": ["slow"],
        "loops": [{**loop, "uptime": 61.0, "restarts": 1, "mailbox": "m", "reason": "stalled \x1b[31m"}],
    }  # fmt: skip
    for url, _ in answering(200, json.dumps(group).encode()):
        ended = run("status", "--url", url, cwd=place)
        assert ended.returncode == 1
        assert "app: running for 2h 1m, not ready" in ended.stdout
        assert re.search(r"mails +running +no +2 of 4 +1m 1s +1 +m +stalled", ended.stdout)
        assert "\x1b" not in ended.stdout
        refused = run("restart", "web", "--url", url, cwd=place)
        assert refused.returncode == 2
        assert "is a group of loops" in only_line(refused.stderr)


# ----------------------------------------------------------------------------------------------------- the control socket


def test_the_path_of_a_socket_that_is_too_long_is_named(place: Path) -> None:
    ended = run("up", "services.yaml", "--control", "x" * 200, cwd=place)
    assert ended.returncode == 2
    assert "at most 107" in only_line(ended.stderr)


@pytest.mark.slow
def test_a_default_socket_that_cannot_be_made_is_a_warning(place: Path) -> None:
    directory = Path(os.environ["MAINSPRING_RUNTIME_DIR"])
    directory.write_text("a file")
    with started("up", "services.yaml", cwd=place) as command:
        command.expect("no control socket.*is no directory")
        command.expect("services: running")


@pytest.mark.slow
def test_an_explicit_socket_that_cannot_be_made_is_an_error(place: Path) -> None:
    ended = run("up", "services.yaml", "--control", "no/such/directory/x.sock", cwd=place)
    assert ended.returncode == 2
    assert "mainspring: cannot listen on unix:" in ended.stderr.splitlines()[-1]
    assert "Traceback" not in ended.stderr


@pytest.mark.slow
def test_sockets_of_dead_supervisors_are_passed_over_and_removed_by_the_next(place: Path) -> None:
    with started("up", "services.yaml", cwd=place) as command:
        command.expect("services: running")
        (left,) = sockets()
        assert left.stat().st_mode & 0o777 == 0o600
        assert left.parent.stat().st_mode & 0o777 == 0o700
        command.send(signal.SIGKILL)
        command.wait()
    assert left.exists()
    assert "no supervisor of this user runs" in run("status", cwd=place).stderr
    with started("up", "services.yaml", cwd=place) as command:
        command.expect("services: running")
        assert not left.exists()
        assert run("status", cwd=place).returncode == 0
        command.send(signal.SIGTERM)
        assert command.wait() == 0
    assert not sockets()


@pytest.mark.slow
def test_several_supervisors_are_listed_and_one_is_named(place: Path, up: Command) -> None:
    own = place / "own.sock"
    with started("up", "services.yaml", "--control", str(own), "--health-port", "0", cwd=place) as other:
        other.expect("services: running")
        assert run("status", "--url", f"unix:{own}", cwd=place).returncode == 0
        with started("up", "services.yaml", cwd=place) as third:
            third.expect("services: running")
            ended = run("status", cwd=place)
            assert ended.returncode == 2
            assert all(f"unix:{path}" in only_line(ended.stderr) for path in sockets())
            assert run("status", cwd=place, MAINSPRING_CONTROL=f"unix:{own}").returncode == 0
    assert up.process.poll() is None


# ------------------------------------------------------------------------------------------------------------ the verbs


@pytest.mark.slow
def test_status_shows_services_and_replicas_and_says_if_they_are_ready(place: Path, up: Command) -> None:
    ended = run("status", cwd=place)
    assert ended.returncode == 0
    assert re.search(r"^services: running for \d+s, ready", ended.stdout)
    assert re.search(r"^web +running +2 replicas", ended.stdout, re.MULTILINE)
    for name, pid in pids(place).items():
        assert re.search(rf"{name if name != 'store.1' else 'store'} +running +{pid} ", ended.stdout)
    assert run("stop", "store", cwd=place).stdout.splitlines()[-1] == "store stopped"
    ended = run("status", cwd=place)
    assert ended.returncode == 1
    assert "not ready: no replica of service 'store' works" in ended.stdout
    assert run("status", "web.1", cwd=place).returncode == 1
    for name, line in (("nix", "there are: web, store"), ("web.3", "there are: 1, 2"), ("web.x", "no replica 'x'")):
        ended = run("status", name, cwd=place)
        assert ended.returncode == 2
        assert line in only_line(ended.stderr)
    assert up.process.poll() is None


@pytest.mark.slow
def test_restart_replaces_one_replica_after_the_other_and_says_so(place: Path, up: Command) -> None:
    before = pids(place)
    ended = run("restart", "web", cwd=place)
    after = pids(place)
    assert ended.returncode == 0
    assert ended.stdout.splitlines() == [
        f"web.1 runs (pid {after['web.1']})",
        f"web.2 runs (pid {after['web.2']})",
        "web restarted",
    ]
    assert before["store.1"] == after["store.1"]
    assert not {before["web.1"], before["web.2"]} & {*after.values()}
    run("restart", "web.2", cwd=place)
    assert pids(place)["web.1"] == after["web.1"]
    assert run("restart", cwd=place).stdout.splitlines()[-1] == "all services restarted"
    assert not {*after.values()} & {*pids(place).values()}
    assert json.loads(run("restart", "store", "--json", cwd=place).stdout)["status"] == "restarted"
    assert up.process.poll() is None


@pytest.mark.slow
def test_a_replica_that_does_not_come_to_run_is_status_1_and_the_next_stays(place: Path, up: Command) -> None:
    before = pids(place)
    (place / "broken").touch()
    ended = run("restart", "web", cwd=place)
    assert ended.returncode == 1
    assert "'web.1' does not run" in only_line(ended.stderr)
    assert pids(place)["web.2"] == before["web.2"]
    (place / "broken").unlink()
    assert run("start", "web.1", cwd=place).stdout == f"web.1 runs (pid {pids(place)['web.1']})\nweb.1 started\n"
    assert up.process.poll() is None


@pytest.mark.slow
def test_ctrl_c_stops_waiting_and_the_operation_goes_on(place: Path) -> None:
    slow = SERVICES.replace("exec sleep 600'", 'trap "sleep 2; exit" TERM; while :; do sleep 0.1; done\'', 1)
    (place / "services.yaml").write_text(dedent(slow), encoding="utf-8")
    with started("up", "services.yaml", cwd=place) as up:
        up.expect("services: running")
        before = pids(place)
        ended = run("restart", "web", "--wait", "0.1", cwd=place)
        assert ended.returncode == 1
        assert "it goes on" in only_line(ended.stderr)
        with started("restart", "web", cwd=place) as command:
            wait_until(lambda: up.text.count("restart of service 'web' was requested") == 2)
            command.send(signal.SIGINT)
            assert command.wait() == 130
            assert "no longer waiting; restart of web goes on" in only_line(command.lines[0])
        wait_until(lambda: not {before["web.1"], before["web.2"]} & {*pids(place).values()})


@pytest.mark.slow
def test_a_file_that_cannot_be_read_to_its_end_keeps_nothing_else_waiting(place: Path, up: Command) -> None:
    (place / "services.yaml").unlink()
    os.mkfifo(place / "services.yaml")
    up.send(signal.SIGHUP)
    assert run("restart", "store", cwd=place).returncode == 0
    (place / "services.yaml").write_text(dedent(SERVICES))
    up.expect("services.yaml is in force")
    up.send(signal.SIGHUP)
    assert run("status", cwd=place).returncode == 0
    up.send(signal.SIGTERM)
    assert up.wait() == 0


@pytest.mark.slow
def test_logs_print_the_last_lines_and_follow(place: Path, up: Command) -> None:
    ended = run("logs", "web.2", "-n", "1", cwd=place)
    assert ended.stdout == f"web.2 | web pid {pids(place)['web.2']} on\n"
    assert "store.1 | ERROR: store\n" in run("logs", cwd=place).stdout
    line = json.loads(run("logs", "store", "--json", cwd=place).stdout)
    assert (line["service"], line["level"], line["stream"]) == ("store", "ERROR", "stderr")
    follow = subprocess.Popen(
        [*MAINSPRING, "logs", "store", "--follow"], cwd=place, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    with follow:
        assert follow.stdout is not None
        assert follow.stderr is not None
        assert follow.stdout.readline() == "store.1 | ERROR: store\n"
        assert run("restart", "store", cwd=place).returncode == 0
        assert follow.stdout.readline() == "store.1 | ERROR: store\n"
        ended = run("drain", "--wait", "60s", cwd=place)
        assert ended.returncode == 0
        assert ended.stdout == "services: draining\nservices: has ended\n"
        assert follow.wait(PATIENCE) == 0
        assert follow.stderr.read() == ""
    assert up.wait() == 0


@pytest.mark.slow
def test_what_waits_for_a_supervisor_that_is_killed_says_so(place: Path) -> None:
    stubborn = (
        "services: {web: {command: [sh, -c, 'trap \"\" TERM; echo on; while :; do sleep 0.1; done'], ready_line: on}}"
    )
    (place / "services.yaml").write_text(stubborn, encoding="utf-8")
    with started("up", "services.yaml", cwd=place) as up:
        up.expect("services: running")
        with started("logs", "--follow", cwd=place) as follow, started("restart", "web", cwd=place) as restart:
            up.expect("restart of service 'web' was requested")
            assert follow.process.stdout is not None
            follow.process.stdout.readline()
            up.send(signal.SIGKILL)
            assert (follow.wait(), restart.wait()) == (0, 1)
            assert "Traceback" not in follow.text
            assert "has closed the connection" in restart.lines[0]


@pytest.mark.slow
def test_a_follower_whose_reader_leaves_ends_in_silence(place: Path, up: Command) -> None:
    follow = subprocess.Popen(
        [*MAINSPRING, "logs", "--follow"], cwd=place, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    with follow:
        assert follow.stdout is not None
        assert follow.stderr is not None
        follow.stdout.readline()
        follow.stdout.close()
        run("restart", "store", cwd=place)
        assert follow.wait(PATIENCE) == 0
        assert follow.stderr.read() == ""
    assert up.process.poll() is None


def test_lost_lines_are_named(place: Path) -> None:
    status = b'{"kind": "orchestrator", "name": "app", "services": []}'
    line = b'{"time": "2026-01-01T00:00:00+00:00", "service": "web", "replica": 1, "stream": "stdout", "line": "half\\u001b"}'
    for url, _ in answering(200, {"/status": status, "/logs": b'{"lost": 7}\n' + line + b"\n"}):
        ended = run("logs", "--url", url, cwd=place)
        assert (ended.returncode, ended.stdout) == (0, "web.1 | half\x1b\n")
        assert "7 lines came too fast" in only_line(ended.stderr)
        ended = run("logs", "--json", "--url", url, cwd=place)
        assert [json.loads(each).get("lost") for each in ended.stdout.splitlines()] == [7, None]


@pytest.mark.slow
def test_the_workers_of_run_are_found_and_restarted(place: Path) -> None:
    code = """
    from mainspring import LoopGroup, Tasks
    tasks = Tasks("sqlite:///jobs.db?name=jobs")
    @tasks.task
    async def work() -> None: ...
    group = LoopGroup([tasks.loop()])
    """
    (place / "app.py").write_text(dedent(code), encoding="utf-8")
    with started("run", "app:group", "--processes", "2", cwd=place) as command:
        wait_until(lambda: bool(sockets()))
        wait_until(lambda: run("status", cwd=place).returncode == 0)
        wait_until(lambda: "worker.2  running" in run("status", cwd=place).stdout)
        before = pids(place)
        assert run("restart", "worker.2", cwd=place).returncode == 0
        after = pids(place)
        assert (before["worker.1"] == after["worker.1"], before["worker.2"] == after["worker.2"]) == (True, False)
        assert run("drain", "--wait", "60s", cwd=place).returncode == 0
        assert command.wait() == 0
        assert not any(alive(pid) for pid in after.values() if pid is not None)


def test_a_socket_that_is_left_of_a_dead_supervisor_is_passed_over(place: Path) -> None:
    directory = Path(os.environ["MAINSPRING_RUNTIME_DIR"])
    directory.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(directory / "dead.1.sock"))
    assert "no supervisor of this user runs" in only_line(run("status", cwd=place).stderr)


@pytest.mark.slow
def test_a_supervisor_that_does_not_answer_is_named(place: Path) -> None:
    directory = Path(os.environ["MAINSPRING_RUNTIME_DIR"])
    directory.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(directory / "stuck.1.sock"))
        listener.listen(0)
        listener.settimeout(PATIENCE)
        with started("status", cwd=place) as command:
            listener.accept()[0].close()  # the look whether it runs
            listener.accept()[0].close()  # the request
            assert command.wait() == 1
            assert "has closed the connection" in command.lines[0]


@pytest.mark.slow
def test_a_supervisor_with_a_full_queue_of_connections_is_waited_for(place: Path) -> None:
    path = place / "busy.sock"
    with socket.socket(socket.AF_UNIX) as listener, started("status", "--url", f"unix:{path}", cwd=place) as early:
        assert early.wait() == 1  # nothing is there yet; it also warms the command up
        listener.bind(str(path))
        listener.listen(0)
        waiting = fill_queue(path)
        with started("status", "--url", f"unix:{path}", cwd=place) as command:
            with pytest.raises(subprocess.TimeoutExpired):
                command.process.wait(1)
            for one in waiting:
                listener.accept()[0].close()
                one.close()
            answer_next(listener, {"kind": "other"})
            assert command.wait() == 1
            assert "is no Mainspring" in command.lines[0]


def test_a_supervisor_that_does_not_answer_has_not_ended(place: Path) -> None:
    path = place / "late.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(8)
        with started("drain", "--url", f"unix:{path}", "--wait", "0.3s", cwd=place) as command:
            answer_next(listener, {"status": "draining", "orchestrator": "late", "state": "running"})
            assert command.wait() == 1
            assert "late has not ended within 0.3 s" in command.text


def fill_queue(path: Path) -> list[socket.socket]:
    """Connect until the listener takes no more."""
    waiting = []
    while True:
        one = socket.socket(socket.AF_UNIX)
        one.setblocking(False)
        try:
            one.connect(str(path))
        except BlockingIOError:
            one.close()
            return waiting
        waiting.append(one)


def answer_next(listener: socket.socket, content: object) -> None:
    """Answer the next request with JSON."""
    body = json.dumps(content).encode()
    listener.settimeout(PATIENCE)
    connection, _ = listener.accept()
    with connection:
        connection.recv(65_536)
        connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))
