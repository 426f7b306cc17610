"""Which line an event leaves, at which level, and what the command line's handler makes of it."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import sys
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import pytest

import mainspring
from mainspring import InMemoryMailbox, LoopGroup, MailboxConnectionError, MainLoop, Reject, events
from mainspring.core.loggers import Logger
from mainspring.core.state_machine import GroupState, OrchestratorState, ServiceState
from mainspring.errors import ConfigError
from mainspring.telemetry import logs
from mainspring.testing import run_virtual
from support import FaultyMailbox, fail, work

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def crash() -> Exception:
    try:
        raise ValueError("no\nway")
    except ValueError as error:
        return error


def finished(outcome: str, **changes: Any) -> events.MessageFinished:
    kind = events.MessageFinished if outcome == "acknowledged" else events.MessageNotAcknowledged
    return kind("indexer", "m1", "r1", outcome, 0.25, **{"attempt": 2} | changes)


ORCHESTRATOR = OrchestratorState
RUNNING, STOPPED, DEGRADED = ServiceState.RUNNING, ServiceState.STOPPED, ServiceState.DEGRADED
CASES = [
    (events.LoopStateChanged("indexer", ServiceState.STARTING, RUNNING, 0.5), "INFO", "running (starting for 0.500 s)"),
    (events.LoopStateChanged("indexer", RUNNING, DEGRADED, 0.5), "WARNING", "degraded"),
    (events.LoopStateChanged("indexer", RUNNING, ServiceState.STOPPING, 0.5), "INFO", "stopping"),
    (events.LoopStateChanged("indexer", ServiceState.STOPPING, STOPPED, 0.5), "INFO", "stopped"),
    (events.LoopCrashed("indexer", crash(), 1.25), "ERROR", "crashed, restart in 1.2 s: ValueError: no; way, at "),
    (events.LoopCrashed("indexer", ValueError("x"), None), "ERROR", "crashed, it stays down: ValueError: x"),
    (events.MessageStarted("indexer", "m1", "r1", 3, 2), "DEBUG", "message m1 started (delivery 3, attempt 2)"),
    (finished("acknowledged"), "DEBUG", "message m1 done (ran 0.250 s)"),
    (finished("retried", error="E: a\nb", retry_in=1.44), "WARNING", "to be tried again in 1.4 s (ran 0.250 s): E: a; b"),
    (finished("postponed", charged=False, retry_in=5.0), "DEBUG", "message m1 postponed, to come again in 5.0 s (ran 0.250 s)"),
    (finished("acknowledged", error="ReplyError: no"), "DEBUG", "message m1 done (ran 0.250 s): ReplyError: no"),
    (finished("retried", charged=False), "INFO", "message m1 to be tried again, not counted (ran 0.250 s)"),
    (finished("dead_lettered", error="E: a", where="b:7"), "ERROR", "after attempt 2 (ran 0.250 s): E: a, at b:7"),
    (finished("released"), "INFO", "message m1 released (ran 0.250 s)"),
    (finished("released", began=False), "DEBUG", "message m1 released before it began"),
    (finished("kept"), "INFO", "message m1 stays among the dead letters"),
    (finished("lost"), "WARNING", "message m1 lost: another worker may have it now"),
    (events.SettlementFailed("indexer", "m1", "acknowledged", "E: a"), "WARNING", "could not be acknowledged and will come"),
    (events.SettlementDelayed("indexer", "m1", "retried", "E: a", 2.0), "WARNING", "retried yet, next try in 2.0 s: E: a"),
    (events.SettlementDelayed("indexer", "m1", "retried", "E: a", 2.0, first=False), "DEBUG", "next try in 2.0 s: E: a"),
    (events.SettlementRecovered("indexer", 4), "INFO", "answers again after 4 outcomes that could not be written"),
    (events.LeaseRenewalFailed("indexer", "m1", "E: a", 9.5), "WARNING", "trusted for 9.5 s more: E: a"),
    (events.LeaseRenewalFailed("indexer", "m1", "E: a", 9.5, first=False), "DEBUG", "trusted for 9.5 s more: E: a"),
    (events.LeaseRenewalRecovered("indexer", 4), "INFO", "answers again after 4 failed renewals of leases"),
    (events.LeaseLost("indexer", "m1"), "WARNING", "the lease of message m1 is lost"),
    (events.ReceiveFailed("indexer", "E: a", 2.0), "WARNING", "cannot be reached, next try in 2.0 s: E: a"),
    (events.ReceiveFailed("indexer", "E: a", 2.0, first=False), "DEBUG", "cannot be reached, next try in 2.0 s: E: a"),
    (events.ReceiveRecovered("indexer", 4), "INFO", "answers again after 4 failed receives"),
    (events.HandlerStalled("indexer", "m1", 720.5, "a.py:3 in f"), "ERROR", "720.5 s; its handler is cancelled, at a.py:3"),
    (events.HandlerStuck("indexer", "m1", 725.5, "a.py:3 in f"), "CRITICAL", "the process will be killed, at a.py:3 in f"),
    (events.ShutdownRequested("shop", "SIGTERM"), "INFO", "shop: shutdown requested: SIGTERM"),
    (events.GroupPaused("shop", "pause()"), "WARNING", "shop: paused, it takes no new work: pause()"),
    (events.GroupResumed("shop", "resume()"), "INFO", "shop: resumed: resume()"),
    (events.GroupStateChanged("shop", GroupState.RUNNING, GroupState.FINISH, 60.0), "INFO", "finish (running for 60.000 s)"),
    (
        events.GroupStateChanged("shop", GroupState.STOP_INTAKE, GroupState.FINISH, 0.002, 1, 29.998),
        "INFO",
        "finish (stop intake for 0.002 s): waits for 1 message in hand for at most 30 s",
    ),
    (
        events.GroupStateChanged("shop", GroupState.STOP_INTAKE, GroupState.FINISH, 0.002, 2),
        "INFO",
        "waits for 2 messages in hand without a limit",
    ),
    (events.GroupStopped("shop", 0, "shutdown: clean\n  part: ok"), "INFO", "exit status 0: shutdown: clean | part: ok"),
    (events.GroupStopped("shop", 70, "shutdown: not clean"), "ERROR", "exit status 70: shutdown: not clean"),
    (events.CheckChanged("shop", "database", "refused"), "WARNING", "check database fails: refused"),
    (
        events.CheckChanged("shop", "database", "refused", failed=True),
        "WARNING",
        "check database has failed, and the group is not ready: refused",
    ),
    (events.CheckChanged("shop", "database", None), "INFO", "check database passes"),
    (events.CalibrationWarning("shop", "the lease is too short"), "WARNING", "shop: the lease is too short"),
    (events.OrchestratorStateChanged("shop", ORCHESTRATOR.READY, ORCHESTRATOR.RUNNING, 0.5), "INFO", "shop: running (ready"),
    (events.OrchestratorStateChanged("shop", ORCHESTRATOR.RUNNING, ORCHESTRATOR.DEGRADED, 0.5), "WARNING", "shop: degraded"),
    (events.ServiceStateChanged("web", 2, ServiceState.STARTING, RUNNING, 1.5), "INFO", "web.2: running (starting for 1.5"),
    (events.ServiceStateChanged("web", 2, RUNNING, DEGRADED, 1.5), "WARNING", "web.2: degraded"),
    (events.ServiceStateChanged("web", 2, RUNNING, ServiceState.RESTARTING, 1.5), "DEBUG", "web.2: restarting"),
    (events.ServiceProcessStarted("web", 2, 77), "DEBUG", "web.2: process 77 started"),
    (
        events.ServiceProcessEnded("web", 2, 77, "exit status 1", 1, 2.5, told=False, restarts=3), "WARNING",
        "web.2: process 77 ended: exit status 1; restart in 2.5 s (restart 3 in a row)",
    ),
    (
        events.ServiceProcessEnded("web", 2, 77, "killed by SIGTERM", 143, 0.0, told=True, restarts=0), "INFO",
        "web.2: process 77 ended: killed by SIGTERM; restart in 0.0 s",
    ),
    (
        events.ServiceProcessEnded("web", 2, 77, "exit status 1", 1, None, told=False, restarts=3), "ERROR",
        "web.2: process 77 ended: exit status 1; it stays down",
    ),
    (
        events.ServiceProcessEnded("web", 2, 77, "killed by SIGTERM", 143, None, told=True, restarts=0), "INFO",
        "web.2: process 77 ended: killed by SIGTERM; it stays down",
    ),
    (events.ServiceStartFailed("web", 2, "no\nprogram", 1.0), "WARNING", "start failed, next try in 1.0 s: no; program"),
    (events.ServiceStartFailed("web", 2, "no program", None), "ERROR", "start failed, it stays down: no program"),
    (events.ServiceGivenUp("web", 2, "restarted 5 times", core=True), "ERROR", "web.2: given up (core service): restarted"),
    (events.ServiceGivenUp("web", 2, "restarted", core=False), "ERROR", "web.2: given up (optional service): restarted"),
    (events.RestartsExceeded("web", 2, 5, 60.0), "ERROR", "more than 5 restarts of all services in 60 s"),
    (events.AlertSent("command page", "service given up", "web", 2, "1f"), "INFO", "alert (service given up) was sent to"),
    (events.AlertFailed("webhook a.b", "service given up", "web", 2, "1f", "x"), "ERROR", "did not reach webhook a.b: x"),
    (events.ProbeChanged("web", 2, "refused"), "WARNING", "web.2: probe fails: refused"),
    (events.ProbeChanged("web", 2, None), "INFO", "web.2: probe passes"),
    (events.ProbeChanged("web", 2, "refused", starting=True), "INFO", "web.2: not ready yet: refused"),
    (events.HookFailed("web", 2, "pre_start", "status 1", aborts=True), "ERROR", "failed, which aborts that: status 1"),
    (events.HookFailed("web", 2, "post_stop", "late", aborts=False), "WARNING", "post_stop failed, it goes on without: late"),
]  # fmt: skip


@pytest.mark.parametrize(("event", "level", "words"), CASES)
def test_an_event_is_one_line_of_its_level(
    event: Any, level: str, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, "mainspring"):
        dispatcher = events.Dispatcher()
        logs.subscribe(dispatcher)
        assert dispatcher.dispatch(event).errors == ()
    (record,) = caplog.records
    assert record.levelname == level
    assert words in record.getMessage()
    assert "\n" not in record.getMessage()
    assert record.event is event  # type: ignore[attr-defined]
    names = [getattr(event, kind, "") for kind in ("loop", "group", "service", "orchestrator")]
    assert record.getMessage().startswith("".join(names))


def test_every_event_has_a_line() -> None:
    known = {kind for kind in vars(events).values() if hasattr(kind, "__dataclass_fields__")}
    known -= {events.Event, events.DispatchResult, events.Dispatcher}
    known -= {
        events.ServiceOutput,
        events.ServiceNotified,
    }  # what a program says of itself: the command line prints its lines
    known -= {events.ProbeAnswered}  # for metrics: the lines are those of ProbeChanged
    assert known == {type(event) for event, _, _ in CASES}


def test_below_debug_nobody_builds_starts_and_a_success_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    dispatcher = events.Dispatcher()
    with caplog.at_level(logging.INFO, "mainspring"):
        logs.subscribe(dispatcher)
        assert not dispatcher.wants(events.MessageStarted)
        dispatcher.dispatch(finished("acknowledged"))
        assert caplog.records == []
        dispatcher.dispatch(finished("retried"))
        assert len(caplog.records) == 1


def test_above_error_failures_are_not_built(caplog: pytest.LogCaptureFixture) -> None:
    dispatcher = events.Dispatcher()
    with caplog.at_level(logging.CRITICAL, "mainspring"):
        logs.subscribe(dispatcher)
        assert not dispatcher.wants(events.MessageNotAcknowledged)
        assert dispatcher.wants(events.HandlerStuck)


def test_after_the_end_of_the_subscription_nothing_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    dispatcher = events.Dispatcher()
    with caplog.at_level(logging.DEBUG, "mainspring"):
        end = logs.subscribe(dispatcher)
        end()
        end()
        for event, _, _ in CASES:
            assert not dispatcher.wants(type(event))


def test_a_crash_that_is_restarted_shows_its_traceback_one_that_surfaces_does_not_twice(
    caplog: pytest.LogCaptureFixture,
) -> None:
    dispatcher = events.Dispatcher()
    with caplog.at_level(logging.INFO, "mainspring"):
        logs.subscribe(dispatcher)
        dispatcher.dispatch(events.LoopCrashed("indexer", crash(), 1.0))
        dispatcher.dispatch(events.LoopCrashed("indexer", crash(), None))
    assert [bool(record.exc_info) for record in caplog.records] == [True, False]
    assert "test_logs.py:" in caplog.records[1].getMessage()


def test_text_of_others_cannot_forge_a_line() -> None:
    assert logs.one_line("a\r\n2026-01-01 ERROR forged\x1b[2J\u2028b") == "a; 2026-01-01 ERROR forged [2J b"


# ----------------------------------------------------------------------------------------------------------- configure


@pytest.fixture
def stderr(capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[[], list[str]]]:
    """The lines printed on standard error so far; what ``configure`` did is undone at the end."""
    logger = logging.getLogger("mainspring")
    handlers, level, propagate = list(logger.handlers), logger.level, logger.propagate
    yield lambda: capsys.readouterr().err.splitlines()
    logger.handlers[:], logger.propagate = handlers, propagate
    logger.setLevel(level)


def report(*told: object) -> None:
    dispatcher = events.Dispatcher()
    logs.subscribe(dispatcher)
    for event in told:
        dispatcher.dispatch(event)


def test_text_lines(stderr: Callable[[], list[str]], caplog: pytest.LogCaptureFixture) -> None:
    logs.configure("warning")
    report(finished("retried", error="E"), finished("released"))
    assert caplog.records == []  # the root logger, which an application may print as well, sees none of it
    (line,) = stderr()
    stamp, rest = line[:23], line[23:]
    datetime.fromisoformat(stamp)
    assert (
        rest == " WARNING  mainspring.message: indexer: message m1 attempt 2 failed, to be tried again (ran 0.250 s): E"
    )


def test_a_tag_stands_in_each_line_of_text(stderr: Callable[[], list[str]]) -> None:
    logs.configure("warning", tag="worker 2, 100 %")
    report(finished("lost"))
    (line,) = stderr()
    assert line[23:].startswith(" WARNING  worker 2, 100 % mainspring.message: indexer: message m1 lost")


def test_json_lines_stay_json_where_their_stream_lacks_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(written, "latin-1", "backslashreplace", write_through=True))
    logs.configure("INFO", json=True)
    report(finished("dead_lettered", error="E: ü 日本 🙂"))
    assert json.loads(written.getvalue())["error"] == "E: ü 日本 🙂"


def test_json_lines(stderr: Callable[[], list[str]]) -> None:
    logs.configure("INFO", json=True)
    report(finished("dead_lettered", error="E: ü"), events.LoopCrashed("indexer", crash(), 1.0))
    dead, crashed = map(json.loads, stderr())
    assert datetime.fromisoformat(dead.pop("time")).tzinfo is not None
    assert dead.pop("pid") > 0
    assert datetime.fromisoformat(dead.pop("at")).tzinfo is not None
    assert dead == {
        "level": "ERROR",
        "logger": "mainspring.message",
        "message": "indexer: message m1 dead-lettered after attempt 2 (ran 0.250 s): E: ü",
        "event": "MessageNotAcknowledged",
        "loop": "indexer",
        "message_id": "m1",
        "run_id": "r1",
        "outcome": "dead_lettered",
        "seconds": 0.25,
        "attempt": 2,
        "error": "E: ü",
        "charged": True,
        "retry_in": None,
        "where": "",
        "traceback": "",
        "error_type": None,
        "queue_seconds": None,
        "began": True,
        "handler": "",
    }
    assert crashed["restart_in"] == 1.0
    assert "ValueError" in crashed["traceback"]


def test_configure_again_replaces_its_own_handler_and_no_other(stderr: Callable[[], list[str]]) -> None:
    root = list(logging.getLogger().handlers)
    mine = logging.NullHandler()
    logger = logging.getLogger("mainspring")
    logger.addHandler(mine)
    before = len(logger.handlers)
    logs.configure()
    logs.configure("DEBUG")
    assert len(logger.handlers) == before + 1
    assert mine in logger.handlers
    assert logging.getLogger().handlers == root
    report(finished("acknowledged"))
    assert len(stderr()) == 1


def test_a_level_that_is_none_is_one_line() -> None:
    with pytest.raises(ConfigError, match="must be one of DEBUG, INFO, WARNING, ERROR, CRITICAL, not 'loud'"):
        logs.configure("loud")


@pytest.mark.parametrize("steady", [False, True])
def test_a_mailbox_that_comes_and_goes_does_not_flood_the_log(steady: bool, caplog: pytest.LogCaptureFixture) -> None:
    mailbox = FaultyMailbox(body=int)
    away = fail(MailboxConnectionError("the store is away"))
    mailbox.next("claim", *([away] * 49 if steady else [away, work] * 50))

    async def handle(job: int) -> None: ...

    async def main() -> None:
        loop = MainLoop(mailbox, handle, name="loop", wait_time_seconds=1)
        async with LoopGroup([loop]):
            await anyio.sleep(900 if steady else 20)

    with caplog.at_level(logging.INFO, "mainspring"):
        run_virtual(main)
    said = [record.getMessage() for record in caplog.records if record.name == "mainspring.loop"]
    about = [line for line in said if "comes and goes" in line]
    if steady:  # the failure, degraded, answered again, running
        assert (len([line for line in said if "cannot be reached" in line]), len(about), len(said)) == (1, 0, 7)
    else:
        assert len(about) == 1
        assert len(said) < logs.STORM + 5


class Raising(logging.Handler):
    """A handler whose part raises: the handler itself, its filter, or its formatter."""

    def __init__(self, part: str, error: BaseException) -> None:
        super().__init__()
        self.part, self.error = part, error
        if part == "filter":
            self.addFilter(self.fail)

    def fail(self, record: logging.LogRecord) -> bool:
        raise self.error

    def emit(self, record: logging.LogRecord) -> None:
        self.fail(record)


@pytest.mark.parametrize("part", ["handler", "filter", "filter of the logger"])
@pytest.mark.parametrize("kind", [ValueError, SystemExit, asyncio.CancelledError])
def test_what_a_handler_raises_ends_no_loop_and_is_said_once(
    part: str, kind: type[BaseException], capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Nor do subscribers and heartbeat callbacks that raise, which are logged, by that very handler."""
    error = type("BadError", (kind,), {})("no")  # a kind of its own, so that it is said here
    handler = Raising(part, error)
    loggers = [logging.getLogger(f"mainspring{name}") for name in ("", ".loop", ".group", ".message")]

    def fail(event: object = None) -> None:
        raise error

    async def handle(job: int) -> None:
        if job == 2:
            raise Reject("no")

    async def main() -> None:
        box: InMemoryMailbox[int, None] = InMemoryMailbox(body=int)
        await box.send_many([1, 2, 3])
        loop = MainLoop(box, handle)
        loop.heartbeat.add_callback(fail)
        group = LoopGroup([loop])
        for heard in (events.MessageFinished, events.LoopStateChanged, events.GroupStateChanged):
            group.dispatcher.subscribe(heard, fail)
        report = await group.run(install_signals=False, until_empty=True)
        assert report.exit_status == 0
        assert dict(loop.outcomes) == {"acknowledged": 2, "dead_lettered": 1}

    with caplog.at_level(logging.DEBUG, "mainspring"):
        for logger in loggers:
            logger.addFilter(handler.fail) if part == "filter of the logger" else logger.addHandler(handler)
        try:
            run_virtual(main)
        finally:
            for logger in loggers:
                logger.removeHandler(handler)
                logger.removeFilter(handler.fail)
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("mainspring: a handler of the")]
    assert said
    assert len(said) == len(set(said)) <= len(loggers) + 1
    assert repr(error) in said[0]


def test_a_record_names_the_line_that_logged_it(caplog: pytest.LogCaptureFixture) -> None:
    Logger("mainspring.test").warning("%d of %d", 1, 2, extra={"event": "e"})
    (record,) = caplog.records
    assert (record.name, record.getMessage(), record.filename) == ("mainspring.test", "1 of 2", "test_logs.py")
    assert (record.funcName, vars(record)["event"]) == ("test_a_record_names_the_line_that_logged_it", "e")


def test_the_package_logs_by_loggers_that_cannot_end_it() -> None:
    """But where one is set up, and for programs that are not this package's."""
    known = {"loggers.py", "logs.py", "on_trio.py", "guards.py", "alerts.py"}
    sources = Path(mainspring.__file__).parent.rglob("*.py")
    assert {path.name for path in sources if "logging.getLogger(" in path.read_text()} == known
