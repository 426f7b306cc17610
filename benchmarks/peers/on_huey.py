"""huey on Redis: its consumer of threads, as its command runs one."""

from __future__ import annotations

import logging

from harness import Blocking, main
from huey import RedisHuey


class Huey(Blocking):
    packages = ("huey", "redis", "hiredis")
    note = "hiredis, threads, no results kept"
    concurrency = (1, 4, 8)

    def make(self):
        return RedisHuey("bench", url=self.url, results=False)

    def _task(self, handle):
        huey = self.make()

        @huey.task(name="job")
        def job(body: str) -> None:
            handle(body)

        return huey, job

    def open(self) -> None:
        self.huey, self.job = self._task(None)

    def send(self, body: str) -> None:
        self.job(body)

    def work(self, handle, concurrency: int) -> None:
        logging.disable(logging.WARNING)
        huey, _ = self._task(handle)
        huey.create_consumer(workers=concurrency, worker_type="thread").run()


if __name__ == "__main__":
    main(Huey)
