"""The Redis mailbox beside servers of its own: restarts, silence, logins, TLS, sentinels, a cluster."""

from __future__ import annotations

import logging
import shutil
import signal
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import islice
from uuid import uuid4

import anyio
import pytest

from mainspring import MailboxConnectionError, SerializationError, open_mailbox
from mainspring.errors import ConfigError
from mainspring.mailbox.limiters import LimitChange, TaskLimits
from mainspring.mailbox.message import Counts
from mainspring.testing import mailbox_contract
from ports import free_port
from redis_support import CALLS, Place, place, soon
from restarts import goes_on_after_a_restart
from servers import PATIENCE, RedisServer
from stopwatch import Stopwatch
from support import outcomes

pytestmark = pytest.mark.anyio
LOOPS = {
    "asyncio": {"backend": "asyncio", "backend_options": {"use_uvloop": False}},
    "uvloop": {"backend": "asyncio", "backend_options": {"use_uvloop": True}},
    "trio": {"backend": "trio"},
}


@pytest.fixture
def server():
    with RedisServer() as own:
        yield own


async def until(holds, what):
    """Wait until ``await holds()``."""
    with anyio.move_on_after(PATIENCE) as scope:
        while not await holds():
            await anyio.sleep(0.02)
    assert not scope.cancelled_caught, what


# ------------------------------------------------------------------------------------------------- a server that goes away


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
async def test_a_restart_loses_nothing_and_harms_no_handler(server, how, anyio_backend):
    with place(server.url) as here:
        await goes_on_after_a_restart(server, here.mailbox(body=int), how)


async def test_a_waiting_receive_hears_of_a_server_that_died(server, anyio_backend):
    with place(server.url) as here:
        async with here.mailbox() as mailbox:
            with anyio.fail_after(PATIENCE):
                async with anyio.create_task_group() as group:

                    async def wait():
                        with pytest.raises(MailboxConnectionError):
                            await mailbox.receive(wait_time_seconds=600)

                    group.start_soon(wait)
                    await anyio.wait_all_tasks_blocked()
                    server.stop(signal.SIGKILL)
        server.start()


async def test_a_waiting_receive_is_called_by_the_server_that_came_back(server, anyio_backend):
    """Its process is on no list of waiters after the restart: it looks for itself, and is on it again."""
    with place(server.url) as here:
        async with here.mailbox() as mailbox, here.mailbox() as other:
            server.stop()
            server.start()

            async def usable() -> bool:
                try:
                    await other.counts()
                except MailboxConnectionError:
                    return False
                return mailbox.statistics().connected

            await until(usable, "the connections after the restart")
            with Stopwatch() as watch:
                async with anyio.create_task_group() as group:

                    async def wait():
                        (message,) = await mailbox.receive(wait_time_seconds=600)
                        assert message.body == "x"

                    group.start_soon(wait)
                    await anyio.wait_all_tasks_blocked()
                    await other.send("x")
            assert watch.seconds < 2, "nobody has called: it was found by looking again"


@pytest.mark.slow
async def test_a_silent_server_ends_a_call_at_its_timeout(server, anyio_backend):
    with place(server.url) as here:
        async with here.mailbox(timeout=2) as mailbox:
            server.send_signal(signal.SIGSTOP)
            began = anyio.current_time()
            with Stopwatch() as watch, pytest.raises(MailboxConnectionError, match=r"did not answer within 2 s"):
                await mailbox.send("x")
            assert anyio.current_time() - began >= 1.9
            assert watch.seconds < 5
            server.send_signal(signal.SIGCONT)
            await mailbox.send("y")


@pytest.mark.slow
async def test_a_listener_to_whom_nobody_speaks_asks_whether_the_server_is_there(server, anyio_backend):
    """One that answers is kept; one that does not is left, and listened to again once it is back."""
    with place(server.url) as here:
        async with here.mailbox(timeout=0.5, silence=1) as mailbox, here.mailbox() as sender:
            await anyio.sleep(0.5)
            now = mailbox.statistics()
            assert (now.polling, now.reconnects) == (False, 0), "the connection is the same"
            server.send_signal(signal.SIGSTOP)
            await soon(lambda: mailbox.statistics().polling)
            server.send_signal(signal.SIGCONT)
            await soon(lambda: not mailbox.statistics().polling, 60)
            got: list = []

            async def receive() -> None:
                got.extend(await mailbox.receive(wait_time_seconds=10))

            async with anyio.create_task_group() as group:
                group.start_soon(receive)
                await soon(lambda: mailbox.statistics().waiting_receives)
                await sender.send("x")
            assert [message.body for message in got] == ["x"]


@pytest.mark.slow
async def test_a_call_whose_caller_was_cancelled_is_waited_for_and_no_longer_than_its_timeout(server, anyio_backend):
    """Its answer is not taken for that to another call; a claim is taken back; the connection stays."""
    with place(server.url) as here:
        async with here.mailbox(timeout=3) as mailbox:
            await mailbox.send("claimed")
            for call in (lambda: mailbox.send("sent"), mailbox.receive):
                server.send_signal(signal.SIGSTOP)
                with anyio.move_on_after(0.1):
                    await call()
                server.send_signal(signal.SIGCONT)
                await mailbox.counts()
            assert mailbox.statistics().reconnects == 0
            (message,) = await mailbox.receive()
            assert (message.body, message.delivery_count) == ("claimed", 1)
            await message.acknowledge()
            server.send_signal(signal.SIGSTOP)
            with anyio.move_on_after(0.1):
                await mailbox.send("nobody knows")
            with Stopwatch() as watch, pytest.raises(MailboxConnectionError):
                await mailbox.send("behind it")
            assert watch.seconds < 8
            server.send_signal(signal.SIGCONT)
            assert "sent" in [message.body for message in await mailbox.receive(max_messages=9, wait_time_seconds=5)]


async def test_a_server_that_is_not_there_is_a_connection_error(anyio_backend):
    port = free_port()
    with pytest.raises(MailboxConnectionError, match=str(port)):
        async with open_mailbox(f"redis://127.0.0.1:{port}/0?name=jobs"):
            pass


async def test_what_was_sent_survives_the_kill_of_the_server(server, anyio_backend):
    """With appendfsync=always a send that has returned is on disk, with its delay, key and lease."""
    with place(server.url) as here:
        async with here.mailbox() as mailbox:
            await mailbox.send("held")
            (held,) = await mailbox.receive(visibility_timeout=600)
            first = await mailbox.send("keyed", dedup_key="k")
            await mailbox.send("later", delay=3_600)
            server.stop(signal.SIGKILL)
            server.start()

            async def same() -> bool:
                try:
                    return await mailbox.send("keyed", dedup_key="k") == first
                except MailboxConnectionError:
                    return False

            await until(same, "the first one's id after the restart")
            counts = await mailbox.counts()
            assert (counts.delayed, counts.pending, counts.in_flight) == (1, 1, 1)
            await held.acknowledge()


async def test_limits_and_permits_survive_the_kill_of_the_server(server, anyio_backend):
    """Messages that wait for a limit still wait, and a message in flight still has its permit."""
    with place(server.url) as here:
        async with here.mailbox() as mailbox:
            await mailbox.backend.change_limits([LimitChange("t", TaskLimits(concurrency=1))])
            envelopes = [mailbox.prepare(number) for number in range(3)]
            for envelope in envelopes:
                envelope.task = "t"
            await mailbox.send_prepared(envelopes)
            (first,) = await mailbox.receive(max_messages=3, visibility_timeout=600)
            server.stop(signal.SIGKILL)
            server.start()

            async def back() -> bool:
                try:
                    return await mailbox.receive(max_messages=3) == []
                except MailboxConnectionError:
                    return False

            await until(back, "the server after its restart")
            await first.acknowledge()
            for number in (1, 2):
                (message,) = await mailbox.receive(max_messages=3, wait_time_seconds=PATIENCE)
                assert message.body == number
                await message.acknowledge()


# ---------------------------------------------------------------------------------------------------------- its settings


def lines(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "mainspring.mailbox"]


async def test_a_server_without_a_log_is_warned_of_once(caplog, anyio_backend):
    caplog.set_level(logging.WARNING)
    with RedisServer("--appendonly", "no") as forgetful, place(forgetful.url) as here:
        for name in ("one", "two"):
            async with here.mailbox(name):
                pass
        (line,) = lines(caplog)
        assert "set appendonly yes" in line


async def test_a_server_that_evicts_is_warned_of(caplog, anyio_backend):
    caplog.set_level(logging.WARNING)
    limits = ("--maxmemory-policy", "allkeys-lru", "--maxmemory", "1gb")
    with RedisServer(*limits) as evicting, place(evicting.url) as here:
        async with here.mailbox(allow_eviction=True):
            pass
        (line,) = lines(caplog)
        assert "allkeys-lru" in line
        assert "noeviction" in line


async def test_a_server_as_it_should_be_is_not_warned_of(server, caplog, anyio_backend):
    caplog.set_level(logging.WARNING)
    with place(server.url) as here:
        async with here.mailbox():
            pass
    assert lines(caplog) == []


async def test_a_full_server_takes_no_more_but_what_is_there_can_be_done(server, anyio_backend):
    with place(server.url) as here:
        async with here.mailbox() as mailbox:
            await mailbox.send_many(["acknowledged", "returned", "dead"])
            here.call("CONFIG", "SET", "maxmemory", 1)
            with pytest.raises(MailboxConnectionError, match="OOM"):
                await mailbox.send("more")
            async with here.mailbox() as worker:
                done, back, dead = await worker.receive(max_messages=3)
                await done.extend_visibility(600)
                await done.save_checkpoint(b"1")
                await done.acknowledge()
                await back.nack(delay=60)
                await dead.dead_letter("no")
            here.call("CONFIG", "SET", "maxmemory", 0)
            await mailbox.send("more")
            assert await mailbox.counts() == Counts(delayed=1, pending=1, settled=1, dead=1)


async def test_passwords_users_and_databases(anyio_backend):
    with RedisServer("--requirepass", "se/cr@t", "--user", "worker", "on", ">pa:ss", "~{ms:*", "&*", "+@all") as locked:
        host = f"127.0.0.1:{locked.port}"
        with pytest.raises(ConfigError, match="NOAUTH"):
            async with open_mailbox(f"redis://{host}/0?name=jobs"):
                pass
        with pytest.raises(ConfigError, match="WRONGPASS") as caught:
            async with open_mailbox(f"redis://:guess@{host}/0?name=jobs"):
                pass
        assert "guess" not in str(caught.value)
        async with open_mailbox(f"redis://:se%2Fcr%40t@{host}/3?name=jobs") as mine:
            await mine.send("x")
            assert mine.address == f"redis://{host}/3?name=jobs"
            assert "se/cr" not in repr(mine)
            async with open_mailbox(f"redis://{host}/3", name="jobs", username="worker", password="pa:ss") as also:
                assert (await also.counts()).pending == 1
            async with open_mailbox(f"redis://:se%2Fcr%40t@{host}/4?name=jobs") as elsewhere:
                assert (await elsewhere.counts()).pending == 0


# ------------------------------------------------------------------------------------------------------------------- TLS


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    """A certificate for localhost that vouches for itself."""
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl to make certificates with")
    home = tmp_path_factory.mktemp("tls")
    cert, key = home / "cert.pem", home / "key.pem"
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    new = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    subprocess.run([*new, *subject, "-keyout", str(key), "-out", str(cert)], check=True, capture_output=True)
    return cert, key


async def test_tls(certificates, anyio_backend):
    cert, key = certificates
    secure = free_port()
    options = (
        "--tls-port",
        str(secure),
        "--tls-cert-file",
        str(cert),
        "--tls-key-file",
        str(key),
        "--tls-auth-clients",
        "no",
    )
    with ExitStack() as stack:
        try:
            stack.enter_context(RedisServer(*options))
        except RuntimeError as error:
            pytest.skip(f"this Redis has no TLS: {error}")
        url = f"rediss://localhost:{secure}/0?name=jobs"
        with pytest.raises(ConfigError, match=r"a certificate that is not trusted .*; check ca_file"):
            async with open_mailbox(url):
                pass
        async with open_mailbox(f"{url}&ca_file={cert}") as mailbox:
            await mailbox.send_many(["x" * 10_000] * 100)
            messages = await mailbox.receive(max_messages=1_000, wait_time_seconds=1)
            assert len(messages) == 100


# ------------------------------------------------------------------------------------------------- sentinels and clusters


@contextmanager
def sentinel_of(primary: RedisServer):
    """A sentinel that watches ``primary``."""
    with ExitStack() as stack:
        sentinel = RedisServer("--sentinel")
        config = sentinel.directory / "sentinel.conf"
        config.write_text(
            f"port {sentinel.port}\nbind 127.0.0.1\nsentinel monitor jobs-primary 127.0.0.1 {primary.port} 1\n"
            "sentinel down-after-milliseconds jobs-primary 500\nsentinel failover-timeout jobs-primary 2000\n"
        )
        sentinel.command = lambda: [sentinel.binary, str(config), "--sentinel"]  # type: ignore[method-assign]
        yield stack.enter_context(sentinel)


@pytest.mark.slow
def test_a_failover_is_followed():
    """The primary dies; the sentinel promotes the replica; sends go on there. On the three event loops beside each other."""
    with ExitStack() as stack:
        primary = stack.enter_context(RedisServer())
        replica = stack.enter_context(RedisServer("--replicaof", f"127.0.0.1 {primary.port}"))
        sentinel = stack.enter_context(sentinel_of(primary))
        url = f"redis+sentinel://127.0.0.1:{free_port()},127.0.0.1:{sentinel.port}/jobs-primary/0"
        anyio.run(_known_replica, sentinel)
        together = threading.Barrier(len(LOOPS) + 1, timeout=PATIENCE)
        pool = stack.enter_context(ThreadPoolExecutor())
        clients = [pool.submit(anyio.run, _follow, url, name, together, **loop) for name, loop in LOOPS.items()]
        together.wait()  # they have sent
        anyio.run(_replicated, primary, replica)
        primary.stop(signal.SIGKILL)
        together.wait()
        for client in clients:
            client.result()
        with place(replica.url) as there:
            assert there.call("ROLE")[0] == b"master"


async def _follow(url: str, name: str, together: threading.Barrier) -> None:
    async with open_mailbox(url, name=name, timeout=2) as mailbox:
        await mailbox.send("before", dedup_key="before")
        await anyio.to_thread.run_sync(together.wait)
        await anyio.to_thread.run_sync(together.wait)  # the primary is dead

        async def sent() -> bool:
            try:
                await mailbox.send("after", dedup_key="after")
            except MailboxConnectionError:
                return False
            return True

        with anyio.move_on_after(60) as scope:
            while not await sent():
                await anyio.sleep(0.1)
        assert not scope.cancelled_caught, "sending after the failover"
        bodies = {message.body for message in await mailbox.receive(max_messages=10)}
        assert bodies == {"before", "after"}


async def _known_replica(sentinel: RedisServer) -> None:
    here = Place(sentinel.url)
    here.select = False

    async def known() -> bool:
        return len(here.call("SENTINEL", "REPLICAS", "jobs-primary")) == 1

    await until(known, "the sentinel's knowledge of the replica")


async def _replicated(primary: RedisServer, replica: RedisServer) -> None:
    with place(primary.url) as here:

        async def done() -> bool:
            return here.call("WAIT", 1, 100) == 1

        await until(done, "the replica's copy")


async def test_an_unknown_service_is_an_error(server, anyio_backend):
    with sentinel_of(server) as sentinel, pytest.raises(ConfigError, match="knows no 'other'"):
        async with open_mailbox(f"redis+sentinel://127.0.0.1:{sentinel.port}/other/0?name=jobs"):
            pass


@pytest.fixture(scope="module")
def cluster():
    """Three nodes that share the slots."""
    with ExitStack() as stack:
        nodes = []
        for _ in range(3):
            own = ("--cluster-enabled", "yes", "--cluster-port", str(free_port()))
            nodes.append(stack.enter_context(RedisServer(*own)))
        places = [stack.enter_context(place(node.url)) for node in nodes]
        for here, first, last in zip(places, (0, 5_461, 10_923), (5_460, 10_922, 16_383), strict=True):
            here.call("CLUSTER", "ADDSLOTSRANGE", first, last)
        for node in nodes[1:]:
            bus = node.options[-1]
            places[0].call("CLUSTER", "MEET", "127.0.0.1", node.port, bus)
        anyio.run(_agreed, places)
        yield nodes


async def _agreed(places) -> None:
    async def ok() -> bool:
        return all(b"cluster_state:ok" in here.call("CLUSTER", "INFO") for here in places) and all(
            here.call("CLUSTER", "SLOTS") and len(here.call("CLUSTER", "SLOTS")) == 3 for here in places
        )

    await until(ok, "a cluster that agrees")


@pytest.mark.slow
async def test_the_contract_holds_in_a_cluster(cluster, anyio_backend):
    """Mailboxes lie on different nodes; whichever node is named, each is found. Replies go from node to node.

    So it is whether the URL says that it is a cluster or not: both at once, as they mostly wait.
    """
    reports = []

    async def run(scheme):
        def make(name, *, body=None, reply=None):
            url = f"{scheme}://127.0.0.1:{cluster[0].port}"
            return open_mailbox(url, name=name, body=body, reply=reply, timeout=30)  # a busy machine has all at once

        reports.append(
            await mailbox_contract.run(mailbox_contract.BackendUnderTest(make, short_lease=1.0), concurrency=20)
        )

    async with anyio.create_task_group() as tasks:
        for scheme in ("redis+cluster", "redis"):
            tasks.start_soon(run, scheme)
    for report in reports:
        assert report.ok, str(report)
        assert report.lacking == {"announces_records"}


@pytest.mark.slow
async def test_a_slot_that_moves_is_followed(cluster, anyio_backend):
    """The mailbox's slot goes to another node, as in a resharding; a waiting receive and a sender go along."""
    name = f"moving-{uuid4().hex}"  # one for each event loop: they share the cluster
    with ExitStack() as stack:
        places = [stack.enter_context(place(node.url)) for node in cluster]
        async with open_mailbox(f"redis+cluster://127.0.0.1:{cluster[0].port}", name=name) as mailbox:
            await mailbox.send("before")
            slot = places[0].call("CLUSTER", "KEYSLOT", f"{{ms:{name}}}:")
            names = [here.call("CLUSTER", "MYID") for here in places]
            owner = next(
                n
                for n, here in enumerate(places)
                if any(
                    row[0] <= slot <= row[1] and int(row[2][1]) == cluster[n].port
                    for row in here.call("CLUSTER", "SLOTS")
                )
            )
            target = (owner + 1) % 3
            places[target].call("CLUSTER", "SETSLOT", slot, "IMPORTING", names[owner])
            places[owner].call("CLUSTER", "SETSLOT", slot, "MIGRATING", names[target])
            keys = places[owner].call("CLUSTER", "GETKEYSINSLOT", slot, 1_000)
            places[owner].call("MIGRATE", "127.0.0.1", cluster[target].port, "", 0, 5_000, "KEYS", *keys)
            for here in (places[target], places[owner], places[3 - owner - target]):
                here.call("CLUSTER", "SETSLOT", slot, "NODE", names[target])
            await mailbox.send("after")
            messages = await mailbox.receive(max_messages=10)
            assert [message.body for message in messages] == ["before", "after"]
            with anyio.fail_after(PATIENCE):
                async with anyio.create_task_group() as group:

                    async def wait():
                        (message,) = await mailbox.receive(wait_time_seconds=600)
                        assert message.body == "awaited"

                    group.start_soon(wait)
                    await anyio.wait_all_tasks_blocked()
                    await mailbox.send("awaited")


async def test_a_cluster_has_one_database(cluster, anyio_backend):
    with pytest.raises(ConfigError, match="database 0 only"):
        async with open_mailbox(f"redis://127.0.0.1:{cluster[0].port}/2?name=jobs"):
            pass


async def test_a_single_server_is_no_cluster(server, anyio_backend):
    with pytest.raises(ConfigError, match="no node of a cluster"):
        async with open_mailbox(f"redis+cluster://127.0.0.1:{server.port}?name=jobs"):
            pass


# ------------------------------------------------------------------------------------------------- replies in a cluster

ON_ONE_LOOP = pytest.mark.loops("asyncio")


@pytest.fixture
def nodes(cluster):
    with ExitStack() as stack:
        yield [stack.enter_context(place(node.url)) for node in cluster]


def names_on(node):
    """Names of mailboxes that lie on that node of the cluster, one after the other."""
    while True:
        name = f"box-{uuid4().hex}"
        slot = node.call("CLUSTER", "KEYSLOT", f"{{ms:{name}}}:")
        ranges = node.call("CLUSTER", "SLOTS")
        if any(first <= slot <= last and node.url.endswith(f":{owner[1]}/0") for first, last, owner, *_ in ranges):
            yield name


async def asked(mailbox, addresses):
    """Messages that are to be answered to these addresses."""
    for address in addresses:
        await mailbox.send("x", reply_to=address)
    return await mailbox.receive(max_messages=len(addresses))


@pytest.mark.slow
@ON_ONE_LOOP
async def test_a_node_that_does_not_answer_holds_up_no_reply_to_another(cluster, nodes, anyio_backend):
    here, dead, living = map(names_on, nodes)
    one = next(dead)
    async with open_mailbox(cluster[0].url, name=next(here), timeout=5) as mailbox:
        messages = await asked(mailbox, [one] * 5 + [next(dead)] + [next(living)] * 2)
        found: list[object] = []

        async def reply_in_vain(message):
            found.extend(await outcomes(partial(message.reply, "y")))

        cluster[1].send_signal(signal.SIGSTOP)
        try:
            with Stopwatch() as watch:
                async with anyio.create_task_group() as group:
                    for message in messages[:6]:
                        group.start_soon(reply_in_vain, message)
                    await anyio.wait_all_tasks_blocked()
                    for message in messages[6:]:
                        await message.reply("y")
                    assert not found, "they waited for the node that does not answer"
        finally:
            cluster[1].send_signal(signal.SIGCONT)
        assert watch.seconds < 2 * 5, "they waited for one another"
        assert all(isinstance(error, MailboxConnectionError) for error in found)
        for message in messages[:6]:
            await message.reply("y")
        assert await mailbox.counts() == Counts(settled=8)
        async with open_mailbox(cluster[1].url, name=one) as replies:
            assert (await replies.counts()).pending == 5


@ON_ONE_LOOP
async def test_only_connections_to_other_nodes_that_nobody_uses_are_given_up(cluster, nodes, anyio_backend):
    """Beyond sixteen. The connections in use are the oldest."""
    here, slow, quick = map(names_on, nodes)
    async with open_mailbox(cluster[0].url, name=next(here), timeout=20) as mailbox:
        messages = await asked(mailbox, [*islice(slow, 3), *islice(quick, 20)])
        cluster[1].send_signal(signal.SIGSTOP)
        try:
            async with anyio.create_task_group() as group:
                for message in messages[:3]:
                    group.start_soon(message.reply, "y")
                await anyio.wait_all_tasks_blocked()
                for message in messages[3:]:
                    await message.reply("y")
                cluster[1].send_signal(signal.SIGCONT)
        finally:
            cluster[1].send_signal(signal.SIGCONT)
        assert await mailbox.counts() == Counts(settled=23)
        clients = b"".join(node.call("CLIENT", "LIST") for node in nodes)
        assert clients.count(f" name={CALLS} ".encode()) == 17, "its own, and sixteen"
    await soon(lambda: f" name={CALLS} ".encode() not in b"".join(node.call("CLIENT", "LIST") for node in nodes))


@pytest.mark.parametrize(
    ("has_functions", "said"),
    [(True, "OOM"), (False, "has no memory left for this version's functions: raise maxmemory")],
    ids=["its functions loaded", "no functions yet"],
)
@ON_ONE_LOOP
async def test_a_reply_for_which_another_node_has_no_memory_is_not_sent(
    cluster, nodes, anyio_backend, has_functions, said
):
    here, _, full = map(names_on, nodes)
    async with open_mailbox(cluster[0].url, name=next(here)) as mailbox:
        first, second = await asked(mailbox, [next(full), next(full)])
        await first.reply("y")
        if not has_functions:
            nodes[2].call("FUNCTION", "FLUSH", "SYNC")
        nodes[2].call("CONFIG", "SET", "maxmemory", 1)
        try:
            with pytest.raises(MailboxConnectionError, match=said):
                await second.reply("y")
        finally:
            nodes[2].call("CONFIG", "SET", "maxmemory", 0)
        assert await mailbox.counts() == Counts(in_flight=1, settled=1)
        await second.reply("y")
        assert await mailbox.counts() == Counts(settled=2)


@ON_ONE_LOOP
async def test_a_reply_that_is_larger_than_a_node_takes_is_not_sent(cluster, nodes, anyio_backend):
    here, _, there = map(names_on, nodes)
    before = nodes[0].call("CONFIG", "GET", "proto-max-bulk-len")[1]
    nodes[0].call("CONFIG", "SET", "proto-max-bulk-len", 1_048_576)
    try:
        async with open_mailbox(cluster[0].url, name=next(here)) as mailbox:
            to = next(there)
            (message,) = await asked(mailbox, [to])
            with pytest.raises(SerializationError, match="larger than the 1,048,576 that this Redis server takes"):
                await message.reply("y" * 1_048_576)
            assert await mailbox.counts() == Counts(in_flight=1)
            assert nodes[2].call("EXISTS", f"{{ms:{to}}}:messages") == 0
    finally:
        nodes[0].call("CONFIG", "SET", "proto-max-bulk-len", before)
