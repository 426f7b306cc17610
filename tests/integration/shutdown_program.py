"""A service with one badly behaved handler: how, when, and on which event loop, its first argument says as JSON.

Standard output tells the test how far it is: ``begun`` once the handlers hold their messages, ``misbehaving`` when it starts.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import threading
import time
from functools import partial
from typing import Any

import anyio
from anyio import from_thread

from mainspring import Context, LoopGroup, Mailbox, MainLoop, RetryPolicy
from mainspring.events import GroupStateChanged, ShutdownRequested
from mainspring.mailbox.message import Ack
from mainspring.mailbox.sqlite.mailbox import SQLiteBackend, SQLiteOptions

OPTIONS = json.loads(sys.argv[1])
HOW, WHEN, BACKEND = OPTIONS["how"], OPTIONS["when"], OPTIONS["backend"]


def say(text: str) -> None:
    print(text, flush=True)


class HangingAck(SQLiteBackend):
    """A store that never answers the acknowledgement of the bad message."""

    async def settle(self, delivery: Any, settlement: Any) -> None:
        if isinstance(settlement, Ack) and b"bad" in delivery.body:
            if HOW == "shielded-ack":
                with anyio.CancelScope(shield=True):
                    await anyio.sleep(600)  # guilty: shielded-ack
            await anyio.sleep(600)  # guilty: ack
        await super().settle(delivery, settlement)


class HangingClose(SQLiteBackend):
    async def close(self) -> None:
        say("misbehaving")
        await super().close()
        with anyio.CancelScope(shield=True):
            await anyio.sleep(600)  # guilty: close


class SlowOpen(SQLiteBackend):
    async def open(self, scope: Any) -> None:
        say("opening")
        with anyio.CancelScope(shield=True):
            while HOW == "slow-open" and not asked.is_set():
                await anyio.sleep(0.01)
            await anyio.sleep(0.3 if HOW == "slow-open" else 600)
        await super().open(scope)


BOXES = {
    "ack": HangingAck,
    "shielded-ack": HangingAck,
    "close": HangingClose,
    "drain-close": HangingClose,
    "slow-open": SlowOpen,
    "stuck-open": SlowOpen,
}
options = SQLiteOptions.of("sqlite:///jobs.db", name="jobs", synchronous="normal", capacity=None, busy_timeout=5)
mailbox = Mailbox(BOXES.get(HOW, SQLiteBackend)(OPTIONS["path"], options))
asked = threading.Event()
entered = {state: threading.Event() for state in ("drain delay", "finish")}
both = anyio.Event()
held: set[str] = set()
never = threading.Event()
standing = threading.Event()


def stand_still() -> None:
    standing.set()
    never.wait(600)


def begin(kind: str) -> None:
    held.add(kind)
    if not both.is_set() and held == {"good", "bad"}:
        both.set()
        say("begun")
        if HOW == "drain-close":
            group.request_drain("the test")


async def good(ctx: Context) -> None:
    """Does what it should: ends soon when it hears of the shutdown."""
    await ctx.wait_shutting_down()


async def misbehave() -> None:
    say("misbehaving")
    if HOW == "swallow":
        while True:
            try:
                await anyio.sleep(60)  # guilty: swallow
            except BaseException:
                continue
    elif HOW == "native":
        raise asyncio.CancelledError
    elif HOW == "exit":
        sys.exit(3)
    elif HOW == "sleep":
        time.sleep(600)  # guilty: sleep
    elif HOW == "regex":
        re.match(r"(a+)+$", "a" * 64 + "b")  # guilty: regex
    elif HOW == "abandon-early":
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(partial(anyio.to_thread.run_sync, stand_still, abandon_on_cancel=True))
            while not standing.is_set():
                await anyio.sleep(0.01)
            tasks.cancel_scope.cancel()
    elif HOW == "abandon":
        await anyio.to_thread.run_sync(never.wait, 600, abandon_on_cancel=True)  # guilty: abandon


async def bad() -> None:
    await both.wait()
    if HOW == "abandon-early":
        await misbehave()
    if WHEN in entered:
        while not entered[WHEN].is_set():
            await anyio.sleep(0.01)
        while WHEN == "finish" and HOW in ("sleep", "regex") and not group.loops[0].outcomes["acknowledged"]:
            await anyio.sleep(0.01)  # nothing goes on once it blocks: the good one is to be done by then
    elif WHEN == "cancel":
        try:
            await anyio.sleep(600)
        except anyio.get_cancelled_exc_class():
            await misbehave()
            if HOW in ("ack", "shielded-ack"):
                return  # as if nothing had happened: it is acknowledged
            raise
    if HOW != "abandon-early":
        await misbehave()


async def handle(body: dict[str, str], ctx: Context) -> None:
    begin(body["kind"])
    await (bad() if body["kind"] == "bad" else good(ctx))


def handle_in_thread(body: dict[str, str], ctx: Context) -> None:
    from_thread.run_sync(begin, body["kind"])
    if body["kind"] != "bad":
        from_thread.run(ctx.wait_shutting_down)
        return
    from_thread.run(both.wait)
    if WHEN in entered:
        entered[WHEN].wait()
    try:
        while WHEN == "cancel":
            time.sleep(0.01)
            from_thread.check_cancelled()
    except BaseException:
        pass
    say("misbehaving")
    time.sleep(600)  # guilty: thread


group = LoopGroup(
    [
        MainLoop(
            mailbox,
            handle_in_thread if HOW == "thread" else handle,
            name="jobs",
            concurrency=2,
            retry=RetryPolicy(initial_delay=60, jitter="none"),
        )
    ],
    **OPTIONS["group"],
)


def note(event: GroupStateChanged) -> None:
    say(event.new)
    if event.new in entered:
        entered[event.new].set()


group.dispatcher.subscribe(GroupStateChanged, note)
group.dispatcher.subscribe(ShutdownRequested, lambda _: asked.set())
report = anyio.run(
    group.run,
    backend="trio" if BACKEND == "trio" else "asyncio",
    backend_options={"use_uvloop": True} if BACKEND == "uvloop" else {},
)
print(report, file=sys.stderr)
sys.exit(report.exit_status)
