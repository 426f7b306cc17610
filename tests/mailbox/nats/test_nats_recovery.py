"""What a killed NATS server has left behind, as a stand-in of it tells: the real one is killed in tests/integration."""

from __future__ import annotations

from types import SimpleNamespace

import anyio
import pytest

pytest.importorskip("nats", reason="the extra 'nats' is not installed")

from mainspring.errors import MailboxConnectionError
from mainspring.mailbox.nats import scheduler as nats_recovery
from mainspring.mailbox.nats.messages import StoredMessage
from mainspring.mailbox.nats.names import Names
from mainspring.mailbox.nats.scheduler import Recovery
from mainspring.mailbox.nats.streams import Added, ReadWriteLock, Stored
from mainspring.testing import run_virtual

NAMES = Names.of("jobs")


class Server:
    """A stream of one queue: what is in it, what its consumer has out, all below ``delivered`` delivered."""

    def __init__(self, there: set[int], out: set[int], delivered: int) -> None:
        self.there, self.out, self.last = there, out, delivered
        self.delivered = delivered
        self.away = 0
        self.numberless = 0
        self.requests = 0
        self.looks_at_limits = 0
        self.is_new = False
        self.ensured = 0
        self.names, self.lock, self.connection = NAMES, ReadWriteLock(), self
        self.made = set(NAMES.streams)

    async def api(self, subject: str, request: object = None) -> dict[str, object]:
        if self.away:
            self.away -= 1
            raise MailboxConnectionError("away")
        if NAMES.queue not in subject:
            return {
                "delivered": {"consumer_seq": 0, "stream_seq": 0},
                "num_pending": 0,
                "num_ack_pending": 0,
                "state": {"messages": 0, "last_seq": 0},
            }
        if subject.startswith("CONSUMER"):
            if self.numberless:  # seen of NATS 2.9.10 on a busy machine
                self.numberless -= 1
                return {"config": {}}
            pending = sum(number > self.delivered for number in self.there)
            return {
                "delivered": {"consumer_seq": self.delivered, "stream_seq": self.delivered},
                "ack_floor": {"stream_seq": min(self.out, default=self.delivered + 1) - 1},
                "num_pending": pending,
                "num_ack_pending": len(self.out),
            }
        first = min(self.there, default=self.last + 1)
        gone = sorted(set(range(first, self.last + 1)) - self.there)
        return {
            "state": {"messages": len(self.there), "first_seq": first, "last_seq": self.last, "deleted": gone},
        }

    async def request_all(self, requests: list[object]) -> None:
        for request in requests:
            self.requests += 1
            self.out.discard(int(request.subject.split(".")[5]))

    async def next(self, stream: str, number: int, subject: str) -> Stored | None:
        found = min((other for other in self.there if other >= number), default=None)
        return (
            None if found is None else Stored(found, StoredMessage(f"m{found}", b"1", 0.0).encode(), 0.0, f"q.{found}")
        )

    async def add_all(self, adds: list[object]) -> list[Added]:
        for add in adds:
            self.there.discard(add.expect)
            self.last += 1
            self.there.add(self.last)
        return [Added(self.last) for _ in adds]

    async def count_moves(self, count: int = 1) -> None:
        pass

    def note(self, stream: str) -> None:
        pass

    async def check_identity(self) -> None:
        pass

    async def ensure(self, names: Names) -> None:
        self.is_new = False
        self.ensured += 1

    async def check(self, consumer: dict[str, object]) -> None:
        self.looks_at_limits += 1


def recovery(server: Server) -> Recovery:
    records = SimpleNamespace(tend=anyio.lowlevel.checkpoint)
    return Recovery(server, SimpleNamespace(after_lost_lease=lambda record: record), records, server)


@pytest.mark.anyio
async def test_a_message_that_is_out_for_ever_does_not_hide_one_that_is_passed_over():
    """The consumer has 5 out, which is gone, and passes over 7, which is there: one message, one out, all seems well."""
    server = Server({7}, {5}, 9)
    checks = recovery(server)
    await checks.check()
    assert (server.there, server.out) == ({7}, {5})
    await checks.check(closely=True)
    assert server.out == set()
    await checks.check()
    assert server.there == {10}


@pytest.mark.anyio
async def test_what_is_passed_over_is_found_where_nothing_goes_on():
    """The same without a reconnection: nothing is done between two looks, then the second one is close, once."""
    server = Server({7}, {5}, 9)
    checks = recovery(server)
    for _ in range(2):
        await checks.check()
    assert (server.there, server.out) == ({7}, set())
    await checks.check()
    assert server.there == {10}
    busy = Server({5, 7}, {5, 7}, 9)
    checks = recovery(busy)
    for _ in range(3):
        await checks.check()
    asked = busy.requests
    await checks.check()
    assert (busy.there, busy.out, busy.requests) == ({5, 7}, {5, 7}, asked)


@pytest.mark.anyio
async def test_an_answer_about_a_consumer_without_numbers_is_asked_for_again():
    server = Server({7}, {5}, 9)
    server.numberless = 1
    checks = recovery(server)
    assert await checks.check(closely=True)  # soon
    assert (server.there, server.out) == ({7}, {5})
    await checks.check(closely=True)
    assert server.out == set()


def test_after_a_reconnection_it_looks_closely_and_then_again_soon():
    async def main() -> None:
        server = Server({7}, {5}, 9)
        server.away = 2
        checks = recovery(server)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(checks.run)
            await anyio.sleep(nats_recovery.EVERY * 2.5)
            assert server.there == {7}
            server.away = 1
            checks.after_reconnect()
            await anyio.sleep(3 * nats_recovery.SOON)
            tasks.cancel_scope.cancel()
        assert server.there == {10}

    run_virtual(main)


def test_of_a_mailbox_that_is_new_the_other_streams_are_looked_for_once_and_later():
    """There are some if an operator has deleted the queue alone."""

    async def main() -> None:
        server = Server(set(), set(), 0)
        server.is_new = True
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(recovery(server).run)
            await anyio.sleep(nats_recovery.EVERY - 1)
            assert (server.ensured, server.looks_at_limits) == (0, 0)
            await anyio.sleep(2 * nats_recovery.EVERY)
            assert (server.ensured, server.looks_at_limits) == (1, 2)
            tasks.cancel_scope.cancel()

    run_virtual(main)


def test_a_change_of_limits_that_was_not_heard_is_found_within_the_time_between_two_checks():
    async def main() -> None:
        server = Server(set(), set(), 0)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(recovery(server).run)
            for looks in (1, 2, 3):
                await anyio.sleep(1)
                assert server.looks_at_limits == looks
                await anyio.sleep(nats_recovery.EVERY - 1)
            tasks.cancel_scope.cancel()

    run_virtual(main)


def test_what_is_passed_over_comes_back_soon_after_all_that_was_out_is_back():
    """Before that it is not asked for again and again what is gone."""

    async def main() -> None:
        server = Server({7, 8}, {8}, 9)  # 7 is passed over, 8 is in hand
        checks = recovery(server)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(checks.run)
            await anyio.sleep(2)
            asked = server.requests
            await anyio.sleep(1)
            server.out.discard(8)
            server.there.discard(8)
            await anyio.sleep(5)
            assert server.there == {10}
            assert server.requests == asked
            tasks.cancel_scope.cancel()

    run_virtual(main)


def test_where_something_is_always_out_it_comes_back_after_all():
    async def main() -> None:
        server = Server({7, 8}, {8}, 9)
        checks = recovery(server)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(checks.run)
            await anyio.sleep(nats_recovery.PATIENCE - 10)
            assert server.there == {7, 8}
            await anyio.sleep(nats_recovery.EVERY + 10)
            assert 7 not in server.there
            tasks.cancel_scope.cancel()

    run_virtual(main)


@pytest.mark.anyio
async def test_messages_in_hand_are_left_alone():
    """Their holders are at work: what is out and there stays, however closely it is looked."""
    server = Server({7, 8, 11}, {7, 8}, 9)
    server.last = 11
    checks = recovery(server)
    await checks.check(closely=True)
    await checks.check()
    assert (server.there, server.out) == ({7, 8, 11}, {7, 8})
