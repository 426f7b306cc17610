"""Celery on Redis: one worker process, on its solo pool or on threads."""

from __future__ import annotations

from celery import Celery
from harness import Blocking, main


class OnCelery(Blocking):
    packages = ("celery", "redis", "hiredis")
    note = (
        "hiredis, no results, prefetch multiplier 128, no gossip, mingle or heartbeat; solo pool where concurrency is 1,"
        " else threads"
    )
    concurrency = (1, 8, 32)
    default = None

    def open(self) -> None:
        self.app, self.job = self._app(None)

    def _app(self, handle):
        app = Celery("bench", broker=self.url)
        app.conf.update(task_ignore_result=True, worker_prefetch_multiplier=128, broker_pool_limit=100)
        app.conf.update(worker_redirect_stdouts=False, broker_connection_retry_on_startup=True)

        @app.task(name="job")
        def job(body: str) -> None:
            handle(body)

        return app, job

    def send(self, body: str) -> None:
        self.job.delay(body)

    def work(self, handle, concurrency: int) -> None:
        app, _ = self._app(handle)
        pool = ["--pool=solo"] if concurrency == 1 else ["--pool=threads", f"--concurrency={concurrency}"]
        calm = ["--without-gossip", "--without-mingle", "--without-heartbeat", "--loglevel=ERROR"]
        app.worker_main(["--quiet", "worker", *pool, *calm])


if __name__ == "__main__":
    main(OnCelery)
