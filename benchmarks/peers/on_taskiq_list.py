"""taskiq on a Redis list: a message is popped before it is handled, and so lost with the worker."""

from __future__ import annotations

from harness import main
from taskiq_redis import ListQueueBroker
from taskiq_redis_base import Taskiq


class TaskiqList(Taskiq):
    note = "list (popped, at most once), hiredis, uvloop, no validation of parameters, prefetch as much as concurrency"

    def broker(self, concurrency: int):
        return ListQueueBroker(url=self.url)


if __name__ == "__main__":
    main(TaskiqList)
