"""NATS: sends, drain and pickup beside FastStream, on one JetStream server, all of whose streams are deleted before each run.

``python benchmarks/nats.py [--quick] [--flush]``. The server is that of MAINSPRING_NATS_URL, whose account may have no streams
unless ``--flush`` is said, else one of the benchmark's own, with its files on disk.
"""

from __future__ import annotations

import sys

sys.path.append(sys.path.pop(0))  # this file has the name of the driver, which must be found first

import anyio
from nats.aio.client import Client
from nats.errors import Error

from brokers import Comparison, Contender
from local_server import Kind, server, with_name
from redelivery import report_redelivery

PACKAGES = ("faststream[nats]", "uvloop")
MESSAGES = Contender("FastStream", "on_faststream_nats.py", "faststream-nats", PACKAGES)
BATCHES = Contender("FastStream (a handler run a batch)", "on_faststream_nats_batches.py", "faststream-nats", PACKAGES)


def _arguments(port: str, home: str) -> list[str]:
    return ["-js", "-a", "127.0.0.1", "-p", port, "-sd", home]


async def streams(url: str, *, delete: bool = False) -> list[str]:
    """The names of the account's streams; and they are gone if ``delete``."""
    client = Client()

    async def say_it_once(_: Exception) -> None:
        """It is raised too."""

    try:
        await client.connect(
            url.partition("?")[0], allow_reconnect=False, max_reconnect_attempts=1, error_cb=say_it_once
        )
    except Error as error:
        raise ConnectionError(str(error)) from error
    try:
        names: list[str] = []
        while page := await client.jetstream().streams_info(offset=len(names)):  # a page has 256
            names += [stream.config.name for stream in page]
        for name in names if delete else ():
            await client.jetstream().delete_stream(name)
        return names
    finally:
        await client.close()


def holds(url: str) -> str:
    found = anyio.run(streams, url)
    return f"{len(found)} stream(s) in this account" if found else ""


def empty(url: str) -> None:
    async def delete() -> None:
        await streams(url, delete=True)

    anyio.run(delete)


NATS = Kind("NATS", "MAINSPRING_NATS_URL", "nats", "nats-server", _arguments, holds, empty)


def main() -> int:
    with server(NATS) as there:
        if there is None:
            return 0

        def url(contender: Contender) -> str:
            return with_name(there) if contender.home is None else there.partition("?")[0]

        def reset() -> None:
            empty(there)

        comparison = Comparison("NATS", url, reset, [MESSAGES])
        comparison.choose_concurrency()
        comparison.report_rate("drain", 4.9)
        comparison.report_rate("drain-default", 2.0)
        comparison.report_rate("send-one", 1.0)
        comparison.report_rate("send-100", 1.0)
        comparison.report_rate("send-bulk", 1.0)
        comparison.report_pickup()
        comparison.report_latency()
        comparison.report_tree()
        by_batches = Comparison("NATS", url, reset, [BATCHES])
        by_batches.choose_concurrency()
        by_batches.report_rate("drain", 2.0)
        comparison.report_flatness(1.15)
        comparison.report_memory(1.05)
        reset()
        report_redelivery("NATS", url(comparison.ours))
        return 0


if __name__ == "__main__":
    sys.exit(main())
