"""Which servers the tests talk to, and when it is a failure that there is none."""

from __future__ import annotations

import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from typing import TYPE_CHECKING, ClassVar

import psutil
import psycopg
import pytest

import ports
import servers

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

OUTCOMES = (pytest.skip.Exception, pytest.fail.Exception)


@pytest.mark.parametrize(
    ("environment", "wanted"),
    [
        ({}, False),
        ({"CI": ""}, False),
        ({"CI": "false"}, False),
        ({"CI": "true"}, True),
        ({"CI": "1"}, True),
        ({"CI": "True", "MAINSPRING_REQUIRE_SERVERS": ""}, True),
        ({"MAINSPRING_REQUIRE_SERVERS": "1"}, True),
        ({"MAINSPRING_REQUIRE_SERVERS": "1", "CI": "false"}, True),
        ({"MAINSPRING_REQUIRE_SERVERS": "0"}, False),
        ({"MAINSPRING_REQUIRE_SERVERS": "0", "CI": "true"}, False),
    ],
)
def test_where_servers_are_required(environment: dict[str, str], wanted: bool) -> None:
    assert servers.required(environment) is wanted


@pytest.mark.parametrize(("said", "outcome"), [("0", pytest.skip.Exception), ("1", pytest.fail.Exception)])
@pytest.mark.parametrize("kind", [servers.RedisServer, servers.PostgresServer, servers.NatsServer])
def test_a_server_that_is_not_installed_skips_by_name_or_fails(
    monkeypatch: pytest.MonkeyPatch, kind: type[servers.Program], said: str, outcome: type[Exception]
) -> None:
    monkeypatch.setenv("MAINSPRING_REQUIRE_SERVERS", said)
    monkeypatch.setattr(servers, "find", lambda _: None)
    monkeypatch.setattr(servers, "_newest_postgres", lambda: None)
    # Caught as both: a skip that gets out of here would skip this test too.
    with pytest.raises(OUTCOMES, match=r"apt install .*MAINSPRING_\w+_URL") as raised:
        kind()
    assert raised.type is outcome
    assert kind.__name__.removesuffix("Server").lower() in str(raised.value).lower()


class Own(servers.Program):
    """A server of one's own that is not even started."""

    url = "own://"

    def __init__(self) -> None:
        pass

    def __enter__(self) -> Own:
        return self

    def __exit__(self, *_: object) -> None:
        pass


@pytest.mark.parametrize(
    ("given", "works", "url"),
    [
        ("given://", True, "given://"),
        ("given://", False, "given://"),
        ("", True, "local://"),
        ("", False, "own://"),
    ],
)
def test_the_environments_server_goes_before_that_of_the_machine_and_that_before_ones_own(
    monkeypatch: pytest.MonkeyPatch, given: str, works: bool, url: str
) -> None:
    monkeypatch.setenv("MAINSPRING_SOME_URL", given)
    with servers.server("MAINSPRING_SOME_URL", "local://", lambda: works, Own) as chosen:
        assert chosen == url


class Counted(Own):
    """A server that counts how many of its kind run."""

    running: ClassVar[list[Counted]] = []

    @property
    def url(self) -> str:
        return f"own://{id(self)}"

    def __enter__(self) -> Counted:
        self.running.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        self.running.remove(self)


def test_the_processes_of_a_run_share_a_server_until_the_last_one_ends(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("PYTEST_XDIST_TESTRUNUID", "one run")
    first, second, third = (ExitStack() for _ in range(3))
    with ThreadPoolExecutor(1) as ending, second, third:
        url = first.enter_context(servers.of_this_run("SOME", Counted))
        assert second.enter_context(servers.of_this_run("SOME", Counted)) == url
        ended = ending.submit(first.close)
        with pytest.raises(TimeoutError):
            ended.result(timeout=0.1)  # it waits for the second one, and a third one may still come
        assert third.enter_context(servers.of_this_run("SOME", Counted)) == url
        second.close()
        assert [one.url for one in Counted.running] == [url]
        third.close()
        ended.result(timeout=servers.PATIENCE)
        assert Counted.running == []
    with servers.of_this_run("SOME", Counted):
        assert len(Counted.running) == 1, "a process that comes after the last one starts another server"
    assert Counted.running == []
    assert list(tmp_path.iterdir()) == []


@contextmanager
def saying(words: bytes) -> Iterator[int]:
    """A port on which a server says ``words`` to whoever comes."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            wire, _ = listener.accept()
            with wire:
                wire.sendall(words)

        thread = threading.Thread(target=serve)
        thread.start()
        yield listener.getsockname()[1]
        thread.join()


@pytest.mark.parametrize(
    ("look", "words", "works"),
    [
        ("_redis_works", b"+PONG\r\n", True),
        ("_redis_works", b"-NOAUTH Authentication required.\r\n", False),
        ("_nats_works", b'INFO {"jetstream":true}\r\n', True),
        ("_nats_works", b'INFO {"version":"2.9.10"}\r\n', False),
        ("_nats_works", b'INFO {"jetstream":true,"auth_required":true}\r\n', False),
        ("_nats_works", b"SSH-2.0-OpenSSH_9.2\r\n", False),
    ],
)
def test_a_server_of_the_machine_that_cannot_be_used_is_passed_by(
    monkeypatch: pytest.MonkeyPatch, look: str, words: bytes, works: bool
) -> None:
    first_words = servers.first_words
    with saying(words) as port:
        monkeypatch.setattr(servers, "first_words", lambda _, said=b"": first_words(port, said))
        assert getattr(servers, look)() is works


def test_where_nobody_listens_nobody_says_anything() -> None:
    assert servers.first_words(ports.free_port(), b"PING\r\n") == b""


@pytest.mark.slow
def test_of_a_killed_server_nothing_is_left_that_answers() -> None:
    with servers.PostgresServer() as server, closing(psycopg.connect(server.url, autocommit=True)) as wire:
        at_work = psutil.Process(wire.info.backend_pid)
        wire.pgconn.send_query(b"DO 'BEGIN LOOP END LOOP; END'")  # it looks after nothing else meanwhile
        with psycopg.connect(server.url, autocommit=True) as other:
            asked = "SELECT state = 'active' FROM pg_stat_activity WHERE pid = %s"
            until = time.monotonic() + servers.PATIENCE
            while other.execute(asked, [at_work.pid]).fetchone() != (True,):
                assert time.monotonic() < until
                time.sleep(0.01)
        try:
            server.stop(signal.SIGKILL)
            assert not servers.runs(at_work)
            server.start()
        finally:
            with suppress(psutil.NoSuchProcess):
                at_work.kill()
