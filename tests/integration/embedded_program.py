"""A web app with a group inside, as a user would write it: its first argument says what, served by uvicorn as a program.

Standard output says what the handler does, and the health server's address.
"""

from __future__ import annotations

import os
from typing import Any

import anyio
from fastapi import FastAPI
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from mainspring import Context, LoopGroup, MainLoop, open_mailbox
from mainspring.events import GroupStateChanged

mailbox = open_mailbox(os.environ["MAILBOX"])


def say(text: str) -> None:
    print(text, flush=True)


async def handle(job: dict[str, Any], ctx: Context) -> None:
    say("begun")
    await ctx.wait_shutting_down()
    await anyio.sleep(job["seconds"])
    say("done")


jobs = MainLoop(mailbox, handle, name="jobs")
group = LoopGroup(
    [jobs],
    shutdown_timeout=2,
    cancel_grace=1,
    health_port=int(os.environ["HEALTH_PORT"]),
    on_crash=os.environ["ON_CRASH"],
)


def note(event: GroupStateChanged) -> None:
    if event.new == "running":
        say(f"health {group.health_url}")


group.dispatcher.subscribe(GroupStateChanged, note)


async def send(request: Any) -> PlainTextResponse:
    await mailbox.send({"seconds": float(request.query_params["seconds"])})
    return PlainTextResponse("sent")


async def crash(request: Any) -> PlainTextResponse:
    await mailbox.close()  # under its loop, which cannot go on then
    return PlainTextResponse("crashing")


starlette_app = Starlette(routes=[Route("/send", send), Route("/crash", crash)], lifespan=group.lifespan)

fastapi_app = FastAPI(lifespan=group.lifespan)
fastapi_app.add_route("/send", send)
fastapi_app.add_route("/crash", crash)
