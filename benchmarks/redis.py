"""Redis: sends, drain and pickup beside the queues of others, on one server of the benchmark's own without persistence."""

from __future__ import annotations

import socket
import sys

from brokers import Comparison, Contender
from common import Row, report
from local_server import local_server
from redelivery import report_redelivery

_DRIVER = ("hiredis", "uvloop")
PEERS = (
    Contender("SAQ", "on_saq.py", "redis-saq", ("saq[redis,hiredis]", "typing_extensions", *_DRIVER)),
    Contender("arq", "on_arq.py", "redis-arq", ("arq", *_DRIVER)),
    Contender("streaQ", "on_streaq.py", "redis-streaq", ("streaq", *_DRIVER)),
    Contender("taskiq list", "on_taskiq_list.py", "redis-taskiq", ("taskiq-redis", *_DRIVER)),
    Contender("taskiq stream", "on_taskiq_stream.py", "redis-taskiq", ("taskiq-redis", *_DRIVER)),
    Contender("FastStream", "on_faststream_redis.py", "redis-faststream", ("faststream[redis]", *_DRIVER)),
    Contender("docket", "on_docket.py", "redis-docket", ("pydocket", *_DRIVER)),
    Contender("dramatiq", "on_dramatiq.py", "redis-dramatiq", ("dramatiq[redis]", *_DRIVER)),
    Contender("Celery", "on_celery.py", "redis-celery", ("celery[redis]", *_DRIVER)),
    Contender("huey", "on_huey.py", "redis-huey", ("huey", "redis", *_DRIVER)),
)


def _arguments(port: str, home: str) -> list[str]:
    """It has nothing but its memory."""
    return ["--port", port, "--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", home]


def say(port: int, command: str) -> str:
    with socket.create_connection(("127.0.0.1", port), timeout=60) as wire:
        wire.sendall(command.encode() + b"\r\n")
        return wire.recv(65_536).decode()


def main() -> int:
    with local_server("redis-server", _arguments) as port:
        if port is None:
            report(Row("Redis: no redis-server here (apt install redis-server)", "-", "-", None, None))
            return 0

        def url(contender: Contender) -> str:
            return f"redis://127.0.0.1:{port}/0" + ("?name=bench" if contender.home is None else "")

        comparison = Comparison("Redis", url, lambda: say(port, "FLUSHALL") and None, list(PEERS))
        comparison.choose_concurrency()
        comparison.report_rate("drain", 3.0)
        comparison.report_rate("send-one", 1.0)
        comparison.report_rate("send-100", 1.0)
        comparison.report_rate("send-bulk", 1.0)
        comparison.report_pickup()
        bare = Contender("bare loop", "bare_redis.py")
        comparison.report_bare(bare, 0.4, "a bare pipelined loop of claims and acknowledgements of 100")
        comparison.report_flatness(1.15)
        comparison.report_memory(1.05)
        report_redelivery("Redis", url(comparison.ours))
        return 0


if __name__ == "__main__":
    sys.exit(main())
