"""Run by test_tool_call_processes: a worker whose handler makes one call, and says on standard output how far it is."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import anyio

from mainspring import Context, LoopGroup, MainLoop, open_mailbox


def say(*words: object) -> None:
    os.write(1, (" ".join(str(word) for word in words) + "\n").encode())


async def pause_at(place: str, wanted: str) -> None:
    say(place)
    if place == wanted:
        await anyio.sleep_forever()


async def main(path: str, effects: str, wanted: str) -> None:
    mailbox = open_mailbox(f"sqlite:///{path}?name=orders", body=str)

    async def handle(order: str, ctx: Context) -> None:
        done = Path(effects).exists()
        for call in ctx.unfinished_calls:
            say(
                "unfinished",
                json.dumps([call.name, call.key, call.info, call.attempt, call.begun_at.isoformat(), done]),
            )
            if done:
                await ctx.checkpoint("charged")
            await ctx.resolve_call(call)
        say("restored", json.dumps(ctx.restored))
        if ctx.restored != "charged":
            async with ctx.tool_call("charge", key=order, info={"cents": 5}) as call:
                await pause_at("begun", wanted)
                with Path(effects).open("a") as file:
                    file.write(f"{order}\n")
                await pause_at("charged", wanted)
                call.keep("charged")
        await pause_at("ended", wanted)

    group = LoopGroup([MainLoop(mailbox, handle, visibility_timeout=1)])
    say((await group.run(until_empty=True)).exit_status)


if __name__ == "__main__":
    anyio.run(main, *sys.argv[1:])
