"""Run by test_schedule_processes: a worker with schedules, which notes each call that it runs."""

from __future__ import annotations

import os
import sys

import anyio

from mainspring import Context, Schedule, Tasks

SCHEDULES = 5


async def main(path: str, notes: str) -> None:
    tasks = Tasks(f"sqlite:///{path}?name=jobs")
    file = os.open(notes, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    @tasks.task
    async def note(ctx: Context) -> None:
        assert ctx.scheduled_for is not None
        said = ctx.message.headers["mainspring-schedule"], ctx.scheduled_for.timestamp(), ctx.request_id
        os.write(file, (" ".join(map(str, said)) + "\n").encode())  # one write: a kill leaves whole lines

    for number in range(SCHEDULES):
        tasks.schedule(Schedule(f"s{number}", note, every=1, misfire="all"))
    async with tasks:
        await tasks.loop(visibility_timeout=1).run()


if __name__ == "__main__":
    anyio.run(main, *sys.argv[1:])
