"""taskiq on a Redis stream, which acknowledges."""

from __future__ import annotations

from harness import main
from taskiq_redis import RedisStreamBroker
from taskiq_redis_base import Taskiq


class TaskiqStream(Taskiq):
    note = "stream, hiredis, uvloop, no validation of parameters, reads and prefetches as much as concurrency"

    def broker(self, concurrency: int):
        return RedisStreamBroker(url=self.url, consumer_id="0", xread_count=concurrency)


if __name__ == "__main__":
    main(TaskiqStream)
