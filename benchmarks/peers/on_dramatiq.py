"""dramatiq on Redis: an actor and a Worker of threads, as its command runs one."""

from __future__ import annotations

import threading

import dramatiq
from dramatiq.brokers.redis import RedisBroker
from harness import Blocking, main


class Dramatiq(Blocking):
    packages = ("dramatiq", "redis", "hiredis")
    note = "hiredis, threads"
    concurrency = (8, 32)
    default = 8

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.broker = RedisBroker(url=url)
        dramatiq.set_broker(self.broker)

    def _actor(self, handle):
        @dramatiq.actor(actor_name="job", broker=self.broker)
        def job(body: str) -> None:
            handle(body)

        return job

    def open(self) -> None:
        self.job = self._actor(None)

    def send(self, body: str) -> None:
        self.job.send(body)

    def work(self, handle, concurrency: int) -> None:
        self._actor(handle)
        dramatiq.Worker(self.broker, worker_threads=concurrency).start()
        threading.Event().wait()


if __name__ == "__main__":
    main(Dramatiq)
