"""huey on a SQLite file: its consumer of threads, as its command runs one."""

from __future__ import annotations

import logging

from harness import Blocking, main
from huey import SqliteHuey


class HueySqlite(Blocking):
    packages = ("huey",)
    note = "threads, no results kept, its own default synchronous"
    concurrency = (1, 4, 8)

    def _task(self, handle):
        huey = SqliteHuey("bench", filename=self.url, results=False)

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
    main(HueySqlite)
