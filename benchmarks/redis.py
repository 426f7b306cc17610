"""Redis: sends, drain and pickup beside the queues of others, on one server, whose database is emptied before each run.

``python benchmarks/redis.py [--quick] [--flush]``. The server is that of MAINSPRING_REDIS_URL, whose database has to be empty
unless ``--flush`` is said, else one of the benchmark's own, without persistence.
"""

from __future__ import annotations

import socket
import sys
from functools import partial
from typing import Any
from urllib.parse import unquote, urlsplit

import hiredis

from brokers import Comparison, Contender
from local_server import Kind, server, with_name
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


def say(url: str, *command: str) -> Any:
    """What the server says to ``command`` in the database of ``url``."""
    parts = urlsplit(url)
    commands: list[tuple[str, ...]] = [("SELECT", parts.path.strip("/") or "0"), command]
    if parts.password:
        commands.insert(0, ("AUTH", unquote(parts.username or "default"), unquote(parts.password)))
    reader = hiredis.Reader()
    with socket.create_connection((parts.hostname or "127.0.0.1", parts.port or 6379), timeout=60) as wire:
        for one in commands:
            wire.sendall(hiredis.pack_command(one))
            while (said := reader.gets()) is False:
                if not (more := wire.recv(65_536)):
                    raise ConnectionError("the connection was closed")
                reader.feed(more)
            if isinstance(said, hiredis.ReplyError):
                raise SystemExit(f"the Redis server says to {one[0]}: {said}")
    return said


def holds(url: str) -> str:
    keys = say(url, "DBSIZE")
    return f"{keys:,} key(s) in database {urlsplit(url).path.strip('/') or '0'}" if keys else ""


def empty(url: str) -> None:
    say(url, "FLUSHDB")


REDIS = Kind("Redis", "MAINSPRING_REDIS_URL", "redis", "redis-server", _arguments, holds, empty)


def url_of(there: str, contender: Contender) -> str:
    return with_name(there) if contender.home is None else there.partition("?")[0]


def beside_peers(there: str, title: str = "Redis", **options: Any) -> Comparison:
    return Comparison(title, partial(url_of, there), lambda: empty(there), list(PEERS), **options)


def main() -> int:
    with server(REDIS) as there:
        if there is None:
            return 0
        comparison = beside_peers(there)
        comparison.choose_concurrency()
        comparison.report_rate("drain", 16.0)
        comparison.report_rate("drain-default", 2.0)
        comparison.report_rate("send-one", 1.0)
        comparison.report_rate("send-100", 1.0)
        comparison.report_rate("send-bulk", 1.0)
        for size in (100_000, 1_000_000):
            comparison.report_large("drain-default", 1.0, size)
            comparison.report_large("send-one", 1.0, size)
        comparison.report_pickup()
        comparison.report_latency()
        comparison.report_tree(40.0)
        bare = Contender("bare loop", "bare_redis.py")
        comparison.report_bare(bare, 0.55, "a bare pipelined loop of claims and acknowledgements of 100")
        comparison.report_flatness(1.15)
        comparison.report_memory(1.05)
        report_redelivery("Redis", url_of(there, comparison.ours))
        return 0


if __name__ == "__main__":
    sys.exit(main())
