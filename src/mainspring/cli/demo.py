"""``mainspring demo``: a real service on real files, hurt while it works, and the account of what became of each file."""

from __future__ import annotations

import importlib
import os
import signal
import sys
import sysconfig
from collections.abc import AsyncIterator  # noqa: TC003 - asynccontextmanager's own annotation
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import anyio

import mainspring
from mainspring.cli.demo_report import DemoReport, account
from mainspring.cli.demo_view import DemoView
from mainspring.cli.user_errors import FAILED, UserError, say
from mainspring.runtime.signals import ShutdownCoordinator
from mainspring.services.spawner import ProcessSpawner
from mainspring.services.spawning import Launch

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import ModuleType

    from mainspring.mailbox.message import Counts
    from mainspring.services.spawning import SpawnedProcess, Stream

KILL_AT, TERM_AT = 0.2, 0.5
"""Shares of the files after which one worker is killed, and another one told to stop."""

LOOK_INTERVAL = 0.1
WORK_TIMEOUT = 300.0
STOP_TIMEOUT = 20.0
BROKEN = "def broken(:\n    return 'this file does not parse, on purpose'\n"


def run_demo(directory: Path | None, *, keep: bool, files: int, as_json: bool) -> int:
    """Run the demo. Return 1 if a file is missing, 128 + n if signal n ended it."""
    with TemporaryDirectory(prefix="mainspring-demo-", ignore_cleanup_errors=True) as temporary:
        if directory is None and keep:
            directory = Path("mainspring-demo")
        home = Path(temporary) if directory is None else directory.absolute()
        if (home / "queue.db").exists():
            raise UserError(f"{home} holds an earlier run; remove it, or give another directory by --dir")
        try:
            home.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"the directory {home} cannot be made: {error.strerror}; give another one by --dir"
            ) from None
        view = DemoView(as_json=as_json)
        demo = Demo(home, _load_example(home), files, view)
        status = anyio.run(demo.run)
    if directory is not None and not as_json:
        view.note(f"the queue and the results are in {home}")
    return status


def example_directory() -> Path:
    """Return where the example's code is: in the installed package, or in the source tree that the package runs from."""
    package = Path(mainspring.__file__).parent
    for root in (package / "examples", package.parents[1] / "examples"):
        if (root / "01_indexer" / "indexer.py").is_file():
            return root / "01_indexer"
    raise UserError(f"the examples are missing from {package}; install mainspring again")


def _load_example(home: Path) -> ModuleType:
    """Import the example's module, to work in ``home``, where its service will work too."""
    os.environ["INDEXER_DIR"] = str(home)
    sys.path.insert(0, str(example_directory()))
    return importlib.import_module("indexer")


class Demo:
    """One run: send, serve, hurt, wait, account."""

    def __init__(self, home: Path, example: ModuleType, limit: int, view: DemoView) -> None:
        self._home = home
        self._example: Any = example
        self._limit = limit
        self._view = view
        self._began = 0.0
        self._killed: int | None = None
        self._drained: int | None = None
        self._service_status: int | None = None

    async def run(self) -> int:
        """Run all of it. Return the exit status."""
        with anyio.CancelScope() as story:
            async with ShutdownCoordinator() as signals:
                signals.register(story.cancel)
                report = await self._story()
                self._view.report(report)
                return 0 if report.ok else FAILED
        say(f"ended by {signals.reason}; the workers are stopped")
        return 128 + int(signal.Signals[signals.reason])

    async def _story(self) -> DemoReport:
        broken = self._home / "broken.py"
        broken.write_text(BROKEN, encoding="utf-8")
        directories = [Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib")]
        paths = [*self._example.find_sources(directories, self._limit), str(broken)]
        self._view.note(f"{len(paths):,} Python files, one of them broken on purpose: {broken}")
        self._began = anyio.current_time()
        ids: list[str] = await self._example.send_files(self._home, paths)
        self._view.note(f"{len(ids):,} messages sent to {self._example.queue_url(self._home)}")
        url = self._example.queue_url(self._home)
        async with mainspring.open_mailbox(url, body=self._example.SourceFile) as mailbox:
            async with self._service():
                finished = False
                with anyio.move_on_after(WORK_TIMEOUT):
                    while not finished:
                        await anyio.sleep(LOOK_INTERVAL)
                        counts = await mailbox.counts()
                        finished = self._look(counts, len(paths))
                seconds = anyio.current_time() - self._began
            return account(
                paths=paths,
                broken=str(broken),
                sent=len(ids),
                rows=self._example.Results(self._home).rows(),
                dead=await mailbox.dead_letters(limit=len(paths)),
                counts=await mailbox.counts(),
                seconds=seconds,
                killed=self._killed,
                drained=self._drained,
                service_status=self._service_status,
                summary=self._example.summary(self._home),
            )

    # ---------------------------------------------------------------------------------------------------- watching

    def _look(self, counts: Counts, total: int) -> bool:
        """Show how far it is, and hurt a worker when its time has come. Return True once all is done."""
        done = counts.settled + counts.dead
        self._view.progress(done, total, counts.in_flight, anyio.current_time() - self._began)
        if self._killed is None and done >= KILL_AT * total:
            self._killed = self._hurt(signal.SIGKILL, "killed")
        elif self._killed is not None and self._drained is None and done >= TERM_AT * total:
            self._drained = self._hurt(signal.SIGTERM, "told to stop")
        return counts.waiting == 0

    def _hurt(self, signum: signal.Signals, how: str) -> int | None:
        """Send a signal to a worker that is at work and was not hurt before. Return its process id."""
        seen: dict[int, int] = self._example.Results(self._home).workers()
        workers = sorted(seen.keys() - {self._killed})
        if len(workers) < (2 if self._killed is None else 1):
            return None  # the other one has not begun yet
        for pid in workers:
            with suppress(ProcessLookupError):
                os.kill(pid, signum)
                self._view.note(f"worker process {pid} {how} ({signum.name})")
                return pid
        return None

    # ----------------------------------------------------------------------------------------------------- service

    @asynccontextmanager
    async def _service(self) -> AsyncIterator[None]:
        """Run ``mainspring run indexer:group --processes 2`` in the example's directory until the end of the block."""
        arguments = ["run", "indexer:group", "--processes", "2", "--log-level", "WARNING"]
        launch = Launch(
            service="demo",
            replica=1,
            command=(sys.executable, "-m", "mainspring", *arguments),
            environment=os.environ,
            directory=str(example_directory()),
            notify=False,
            stop_timeout=STOP_TIMEOUT,
        )
        async with ProcessSpawner() as spawner:
            process = await spawner.spawn(launch, self)
            try:
                yield
            finally:
                with anyio.CancelScope(shield=True, deadline=anyio.current_time() + STOP_TIMEOUT):
                    await self._stop(process)

    def on_line(self, stream: Stream, line: str) -> None:
        """Show what the service says."""
        if stream == "stderr":
            self._view.service(line)

    def on_notify(self, news: Mapping[str, str]) -> None:
        """It has nothing to notify of."""

    async def _stop(self, process: SpawnedProcess) -> None:
        process.send_signal(signal.SIGTERM)
        with anyio.move_on_after(STOP_TIMEOUT - 5) as patience:
            await process.wait()
        if patience.cancelled_caught:
            process.kill()
        self._service_status = (await process.wait()).returncode
