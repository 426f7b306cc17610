"""SQLite: group commit, bulk sends, the drain beside huey's, and the cost per message as the queue grows."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import anyio
import apsw

from brokers import Comparison, Contender
from common import (
    BODY,
    HERE,
    Row,
    beside,
    costs,
    in_turns,
    median,
    microseconds,
    missing,
    on_uvloop,
    peer,
    per_second,
    quick,
    rate,
    report,
    version,
)
from mainspring import LoopGroup, MainLoop, open_mailbox

SENDS = 2_000 if quick() else 10_000
BULK = 20_000 if quick() else 100_000
DRAIN = 20_000 if quick() else 100_000
HUEY_TASKS = 5_000 if quick() else 20_000
PENDING = 100_000 if quick() else 1_000_000
ROUNDS = 3 if quick() else 5


def bare(path: Path) -> apsw.Connection:
    """A bare table in the same mode as ours: WAL, synchronous=FULL."""
    connection = apsw.Connection(str(path))
    connection.pragma("journal_mode", "wal")
    connection.pragma("synchronous", "full")
    connection.execute("CREATE TABLE IF NOT EXISTS bare (id INTEGER PRIMARY KEY, body BLOB)")
    return connection


def one_insert_per_transaction(folder: Path) -> float:
    connection = bare(folder / "bare.db")
    raw = BODY.encode()
    count = SENDS // 4
    began = time.perf_counter()
    for _ in range(count):
        connection.execute("INSERT INTO bare (body) VALUES (?)", (raw,))
    result = rate(count, began)
    connection.close()
    return result


def executemany(folder: Path) -> float:
    connection = bare(folder / "bare.db")
    rows = [(BODY.encode(),)] * 1_000
    began = time.perf_counter()
    for _ in range(BULK // 1_000):
        with connection:
            connection.executemany("INSERT INTO bare (body) VALUES (?)", rows)
    result = rate(BULK, began)
    connection.close()
    return result


async def sends(folder: Path, senders: int, count: int) -> tuple[float, float]:
    """Messages a second of that many senders at once, and the transactions that 1,000 sends took."""
    async with open_mailbox(f"sqlite:///{folder}/ours.db?name=sends", body=str) as mailbox:

        async def sender() -> None:
            for _ in range(count // senders):
                await mailbox.send(BODY)

        before = mailbox.transactions
        began = time.perf_counter()
        async with anyio.create_task_group() as tasks:
            for _ in range(senders):
                tasks.start_soon(sender)
        result = rate(count, began)
        return result, (mailbox.transactions - before) / count * 1_000


async def send_many(folder: Path) -> float:
    async with open_mailbox(f"sqlite:///{folder}/ours.db?name=bulk", body=str) as mailbox:
        bodies = [BODY] * 1_000
        began = time.perf_counter()
        for _ in range(BULK // 1_000):
            await mailbox.send_many(bodies)
        return rate(BULK, began)


async def drain(
    folder: Path, count: int, *, measured: int | None = None, concurrency: int = 100
) -> tuple[float, float]:
    """Messages a second through a loop with a handler that does nothing; transactions per 1,000.

    ``measured`` stops the clock after that many of ``count`` messages.
    """
    want = count if measured is None else measured
    home = Path(tempfile.mkdtemp(dir=folder))
    path = home / "drain.db"
    async with open_mailbox(f"sqlite:///{path}?name=jobs", body=str) as mailbox:
        for start in range(0, count, 1_000):
            await mailbox.send_many([BODY] * min(1_000, count - start))
        done = 0
        finished = anyio.Event()

        async def handle(job: str) -> None:
            nonlocal done
            done += 1
            if done == want:
                finished.set()

        before = mailbox.transactions
        began = time.perf_counter()
        async with LoopGroup([MainLoop(mailbox, handle, concurrency=concurrency)], guardian=False):
            await finished.wait()
            if measured is None:
                while (await mailbox.counts()).waiting:
                    await anyio.sleep(0.001)
            result = rate(want, began)
            transactions = (mailbox.transactions - before) / want * 1_000
    shutil.rmtree(home)
    return result, transactions


def huey_drain(python: Path, folder: Path, workers: int) -> float:
    """huey's own consumer, tasks enqueued before it starts; from its first line to the last task."""
    home = Path(tempfile.mkdtemp(dir=folder))
    done = home / "done"
    environment = {**os.environ, "BENCH_DB": str(home / "huey.db"), "BENCH_DONE": str(done)}
    fill = f"import huey_app as a\nfor _ in range({HUEY_TASKS}): a.noop({BODY!r})\na.last('')"
    subprocess.run([str(python), "-c", fill], cwd=HERE / "services", env=environment, check=True)
    consumer = subprocess.Popen(
        [str(python.with_name("huey_consumer")), "huey_app.huey", "-w", str(workers), "-k", "thread", "-q"],
        cwd=HERE / "services", env=environment, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    began = None
    database = apsw.Connection(environment["BENCH_DB"])
    while not done.exists() or not done.read_text():
        left = database.execute("SELECT count(*) FROM task").fetchone()
        if began is None and left is not None and left[0] < HUEY_TASKS:
            began = time.time()
        time.sleep(0.02)
    consumer.kill()
    consumer.communicate()
    assert began is not None
    result = HUEY_TASKS / (float(done.read_text()) - began)
    database.close()
    shutil.rmtree(home)
    return result


def huey_sends(python: Path, folder: Path, count: int) -> float:
    """huey's sends, one by one, with ``fsync=True``: each is on disk before the next, as ours are."""
    home = Path(tempfile.mkdtemp(dir=folder))
    command = [str(python), str(HERE / "services" / "huey_sends.py"), str(home / "huey.db"), str(count)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    shutil.rmtree(home)
    return float(done.stdout)


def report_lone_sends(folder: Path) -> None:
    """Ours and huey's at the same durability, each from a file without messages on."""
    python = peer("huey", "huey")
    if python is None:
        report(missing("SQLite: sends, one by one / huey", "not installable here"))
        return

    def ours() -> float:
        home = Path(tempfile.mkdtemp(dir=folder))
        speed, _ = on_uvloop(sends, home, 1, SENDS // 4)
        shutil.rmtree(home)
        return speed

    mine, theirs = in_turns(ROUNDS, ours, lambda: huey_sends(python, folder, SENDS // 4))
    note = f"huey {version(python, 'huey')}, synchronous=FULL both, one sender"
    report(beside("SQLite: sends, one by one / huey", mine, theirs, 1.0, per_second, note=note))


def report_sends(folder: Path) -> None:
    commits: dict[int, float] = {}

    def grouped(senders: int, count: int) -> float:
        speed, commits[senders] = on_uvloop(sends, folder, senders, count)
        return speed

    single, by_100, by_one = in_turns(
        ROUNDS,
        lambda: one_insert_per_transaction(folder),
        lambda: grouped(100, SENDS),
        lambda: grouped(1, SENDS // 4),
    )
    report(
        beside("SQLite: 100 concurrent senders / one insert per transaction", by_100, single, 3.0, per_second,
               note="synchronous=FULL both"),
        Row("SQLite: transactions per 1,000 sends at 100 senders / 50", f"{commits[100]:.1f}", "50", [commits[100] / 50], 1.0,
            at_most=True),
        Row("SQLite: transactions per 1,000 sends at 1 sender", f"{commits[1]:.1f}", "-", note=per_second(median(by_one))),
    )  # fmt: skip
    plain, bulk = in_turns(ROUNDS, lambda: executemany(folder), lambda: on_uvloop(send_many, folder))
    report(beside("SQLite: send_many(1,000) / bare executemany of 1,000", bulk, plain, 0.25, per_second))


def report_drain(folder: Path) -> None:
    """Ours and huey's in turn, so that a disk whose speed drifts slows both; huey with the best of its thread counts."""
    python = peer("huey", "huey")
    transactions = 0.0

    def drained() -> float:
        nonlocal transactions
        speed, transactions = on_uvloop(drain, folder, DRAIN)
        return speed

    if python is None:
        (ours,) = in_turns(ROUNDS, drained)
        report(missing("SQLite: drain / huey", "not installable here"))
    else:
        _, workers = max((huey_drain(python, folder, count), count) for count in (1, 2, 4, 8))
        ours, theirs = in_turns(ROUNDS, drained, lambda: huey_drain(python, folder, workers))
        note = (
            f"huey {version(python, 'huey')} at its best of 1, 2, 4, 8 threads ({workers}), its own default synchronous"
        )
        report(beside("SQLite: drain / huey", ours, theirs, 12.0, per_second, note=note))
    note = f"concurrency 100, no-op, uvloop, {DRAIN:,} messages, one process, synchronous=FULL"
    report(
        beside("SQLite: drain / 15,000 a second", ours, 15_000, 1.0, per_second, note=note),
        Row("SQLite: transactions per 1,000 operations in the drain / 50", f"{transactions / 2:.1f}", "50",
            [transactions / 2 / 50], 1.0, at_most=True,
            note="two operations a message: its claim and its acknowledgement"),
    )  # fmt: skip


def report_default_drain(folder: Path) -> None:
    """Ours and huey's with nothing set: one handler, and one thread."""
    python = peer("huey", "huey")
    if python is None:
        report(missing("SQLite: drain at defaults / huey", "not installable here"))
        return
    ours, theirs = in_turns(
        ROUNDS,
        lambda: on_uvloop(lambda: drain(folder, DRAIN // 5, concurrency=1))[0],
        lambda: huey_drain(python, folder, 1),
    )
    note = f"huey {version(python, 'huey')}, concurrency 1 both, one process"
    report(beside("SQLite: drain at defaults / huey", ours, theirs, 2.0, per_second, note=note))


def report_flatness(folder: Path) -> None:
    """The same 20,000 messages taken from a queue of 20,000 + 1,000 and of 20,000 + 1,000,000 pending."""
    take = 20_000
    small, large = in_turns(
        1 if quick() else 3,
        lambda: on_uvloop(lambda: drain(folder, take + 1_000, measured=take))[0],
        lambda: on_uvloop(lambda: drain(folder, take + PENDING, measured=take))[0],
    )
    report(
        beside(f"SQLite: cost per message at {PENDING:,} pending / at 1,000", costs(large), costs(small), 1.15,
               microseconds, at_most=True, note=f"{take:,} messages drained")
    )  # fmt: skip


def beside_huey(folder: Path, title: str = "SQLite", **options: Any) -> Comparison:
    """Return the comparison, of which each run is in an empty folder."""
    home = folder / "beside"

    def empty() -> None:
        shutil.rmtree(home, ignore_errors=True)
        home.mkdir()

    def url(contender: Contender) -> str:
        return f"sqlite:///{home}/bench.db?name=bench" if contender.home is None else f"{home}/bench.db"

    return Comparison(title, url, empty, [Contender("huey", "on_huey_sqlite.py", "huey", ("huey",))], **options)


def report_beside_huey(folder: Path) -> None:
    """Latency under load and memory."""
    comparison = beside_huey(folder)
    comparison.choose_concurrency()
    comparison.report_latency()
    comparison.report_tree(40.0)


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        report_sends(folder)
        report_lone_sends(folder)
        report_drain(folder)
        report_default_drain(folder)
        report_flatness(folder)
        report_beside_huey(folder)


if __name__ == "__main__":
    main()
