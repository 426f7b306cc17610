"""How soon the messages of a worker that was killed come to another: ``python redelivery.py [--quick] [URL]``.

Two worker processes share the messages; one of them gets SIGKILL. What it held is to come to the other when its lease has
run out: never before, and at most a second after. Without a URL the mailbox is a SQLite file.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import threading
import time

import anyio

from common import HERE, Row, given_url, quick, report
from mainspring import open_mailbox

VISIBILITY = 2.0 if quick() else 10.0
MESSAGES = 20
PATIENCE = 60.0
"""Seconds that workers may take to start and to be given what they are to have, beside the lease."""


class Holder:
    """A worker process, and what it has said."""

    def __init__(self, url: str) -> None:
        command = [sys.executable, str(HERE / "services" / "holder.py"), url, str(VISIBILITY)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        self.lines: list[str] = []
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)

    @property
    def begun(self) -> list[dict[str, float | str]]:
        return [json.loads(line) for line in self.lines if line.startswith("{")]

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


async def send(url: str) -> None:
    async with open_mailbox(url, body=str) as mailbox:
        for number in range(MESSAGES):
            await mailbox.send(str(number))


def wait_until(reached, what: str, seconds: float = PATIENCE) -> None:
    deadline = time.monotonic() + seconds
    while not reached():
        if time.monotonic() > deadline:
            raise SystemExit(f"{what}: not within {seconds:g} s")
        time.sleep(0.01)


def redelivery(url: str) -> list[float]:
    """Seconds from the end of each lease that a killed worker held to the message's next handler, which another runs."""
    first, second = Holder(url), Holder(url)
    try:
        for holder in (first, second):
            wait_until(lambda holder=holder: holder.lines, "a worker starts")
        anyio.run(send, url)
        wait_until(lambda: len(first.begun) + len(second.begun) >= MESSAGES, "all messages are held")
        victim, heir = (first, second) if first.begun else (second, first)
        victim.kill()
        held = {one["id"]: one for one in victim.begun}

        def inherited() -> list[dict[str, float | str]]:
            return [one for one in heir.begun if one["id"] in held]

        wait_until(lambda: len(inherited()) == len(held), "the leases end", PATIENCE + VISIBILITY)
        return [one["began"] - held[one["id"]]["leased"] - VISIBILITY for one in inherited()]
    finally:
        first.kill()
        second.kill()


def report_redelivery(server: str, url: str) -> None:
    late = redelivery(url)
    what = f"{server}: redelivery after SIGKILL at visibility_timeout={VISIBILITY:g}"
    note = f"{len(late)} messages of one worker of two, real processes"
    report(
        Row(f"{what}: earliest, from the claim / the lease", f"{VISIBILITY + min(late):.3f} s", f"{VISIBILITY:g} s",
            [(VISIBILITY + min(late)) / VISIBILITY], 1.0, note=note),
        Row(f"{what}: latest, from the lease's end / 1 s", f"{max(late):.3f} s", "1 s", [max(late)], 1.0, at_most=True,
            note=note),
    )  # fmt: skip


def main() -> None:
    url = given_url()
    if url is not None:
        report_redelivery(url.partition(":")[0], url)
        return
    with tempfile.TemporaryDirectory() as folder:
        report_redelivery("SQLite", f"sqlite:///{folder}/redelivery.db?name=held")


if __name__ == "__main__":
    main()
