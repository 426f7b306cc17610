"""The real world stays out: sockets, threads, processes, real sleep and blocking are named, and no run hangs."""

from __future__ import annotations

import signal
import socket
import subprocess
import threading
import time
from time import sleep as imported_sleep
from typing import TYPE_CHECKING, Any

import pytest

from mainspring import LoopGroup, MainLoop
from mainspring.testing import Faults, Simulation
from mainspring.testing.simulation import RealWorldError

if TYPE_CHECKING:
    from collections.abc import Callable


def opens_a_socket() -> None:
    socket.socket().close()


def resolves_and_connects() -> None:
    socket.create_connection(("127.0.0.1", 9))


def starts_a_thread() -> None:
    threading.Thread(target=print).start()


def starts_a_process() -> None:
    subprocess.run(["true"], check=True)


def sleeps() -> None:
    time.sleep(30)


def sleeps_by_another_name() -> None:
    imported_sleep(30)


def never_ends() -> None:
    while True:
        pass


CULPRITS = [
    (opens_a_socket, "opened a socket"),
    (resolves_and_connects, "opened a socket"),
    (starts_a_thread, "started a thread"),
    (starts_a_process, "started a process"),
    (sleeps, "slept in real time"),
    (sleeps_by_another_name, "blocked the event loop"),
    (never_ends, "blocked the event loop"),
]
SHORT = Simulation(duration=600, workers=1, faults=Faults.none(), patience=2)


@pytest.fixture(scope="module", autouse=True)
def imported() -> None:
    """Have all been imported that a run imports when it first needs it, which can take longer than that patience."""
    Simulation(duration=600, workers=1, faults=Faults.none(), patience=120).run(in_handler(int))


def in_build(culprit: Callable[[], None]) -> Callable[[Any], LoopGroup]:
    def build(mailbox: Any) -> LoopGroup:
        async def handle(job: int) -> None: ...

        culprit()
        return LoopGroup([MainLoop(mailbox, handle)])

    return build


def in_handler(culprit: Callable[[], None]) -> Callable[[Any], LoopGroup]:
    def build(mailbox: Any) -> LoopGroup:
        async def handle(job: int) -> None:
            culprit()

        return LoopGroup([MainLoop(mailbox, handle)])

    return build


def carefree(culprit: Callable[[], None]) -> Callable[[Any], LoopGroup]:
    """Whose code swallows whatever is raised."""

    def build(mailbox: Any) -> LoopGroup:
        async def handle(job: int) -> None:
            try:
                culprit()
            except BaseException:
                return

        return LoopGroup([MainLoop(mailbox, handle)])

    return build


@pytest.mark.slow
@pytest.mark.parametrize("place", [in_build, in_handler, carefree])
@pytest.mark.parametrize(("culprit", "what"), CULPRITS, ids=lambda value: getattr(value, "__name__", ""))
def test_the_culprit_is_named(culprit: Callable[[], None], what: str, place: Any) -> None:
    with pytest.raises(RealWorldError) as found:
        SHORT.run(place(culprit))
    assert what in str(found.value)
    assert "test_guards.py" in str(found.value)
    assert f"in {culprit.__name__}" in str(found.value)


def test_a_plain_handler_runs_in_a_thread_and_is_refused() -> None:
    def build(mailbox: Any) -> LoopGroup:
        def handle(job: int) -> None: ...

        return LoopGroup([MainLoop(mailbox, handle)])

    with pytest.raises(RealWorldError, match=r"started a thread.*make it `async def`"):
        SHORT.run(build)


@pytest.mark.slow
def test_a_task_that_spins_without_time_passing_is_found() -> None:
    import anyio

    def build(mailbox: Any) -> LoopGroup:
        async def handle(job: int) -> None:
            while True:
                await anyio.sleep(0)

        return LoopGroup([MainLoop(mailbox, handle)])

    with pytest.raises(RealWorldError, match=r"blocked the event loop for 2 real seconds"):
        SHORT.run(build)


def test_everything_is_as_before_afterwards() -> None:
    before = signal.getsignal(signal.SIGALRM)
    with pytest.raises(RealWorldError):
        SHORT.run(in_build(opens_a_socket))
    opens_a_socket()
    thread = threading.Thread(target=int)
    thread.start()
    thread.join()
    time.sleep(0)
    starts_a_process()
    assert signal.getsignal(signal.SIGALRM) is before


@pytest.mark.slow
def test_it_works_in_another_thread() -> None:
    errors: list[BaseException] = []

    def run() -> None:
        try:
            SHORT.run(in_handler(never_ends))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(120)
    assert not thread.is_alive()
    assert "blocked the event loop" in str(errors[0])
