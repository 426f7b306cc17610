"""NATS: sends, drain and pickup beside FastStream, on one JetStream server of the benchmark's own, with its files on disk."""

from __future__ import annotations

import sys

sys.path.append(sys.path.pop(0))  # this file has the name of the driver, which must be found first

import anyio
from nats.aio.client import Client

from brokers import Comparison, Contender
from common import Row, report
from local_server import local_server
from redelivery import report_redelivery

PACKAGES = ("faststream[nats]", "uvloop")
MESSAGES = Contender("FastStream", "on_faststream_nats.py", "faststream-nats", PACKAGES)
BATCHES = Contender("FastStream (a handler run a batch)", "on_faststream_nats_batches.py", "faststream-nats", PACKAGES)


def _arguments(port: str, home: str) -> list[str]:
    return ["-js", "-a", "127.0.0.1", "-p", port, "-sd", home]


async def delete_streams(port: int) -> None:
    client = Client()
    await client.connect(f"nats://127.0.0.1:{port}")
    for stream in await client.jetstream().streams_info():
        await client.jetstream().delete_stream(stream.config.name)
    await client.close()


def main() -> int:
    with local_server("nats-server", _arguments) as port:
        if port is None:
            report(Row("NATS: no nats-server here (apt install nats-server)", "-", "-", None, None))
            return 0

        def url(contender: Contender) -> str:
            return f"nats://127.0.0.1:{port}" + ("?name=bench" if contender.home is None else "")

        def reset() -> None:
            anyio.run(delete_streams, port)

        comparison = Comparison("NATS", url, reset, [MESSAGES])
        comparison.choose_concurrency()
        comparison.report_rate("drain", 2.0)
        comparison.report_rate("send-one", 1.0)
        comparison.report_rate("send-100", 1.0)
        comparison.report_rate("send-bulk", 1.0)
        comparison.report_pickup()
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
