"""The app, called as a server would call it."""

from __future__ import annotations

import math
from contextlib import asynccontextmanager
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any

import anyio
import httpx
import pytest

import mainspring
from http_fakes import FakeGroup, FakeMailbox, loop_status
from mainspring.core.state_machine import GroupState, ServiceState
from mainspring.errors import ControlRefusedError, LoopNotRunningError, MailboxConnectionError, TicketTimeoutError
from mainspring.events import MessageFinished
from mainspring.http.access import ADMIN_TOKEN
from mainspring.http.app import health_app
from mainspring.http.depths import DepthReader
from mainspring.mailbox.message import Counts
from mainspring.telemetry.metrics import GroupMetrics

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def client_of(source: FakeGroup, **options: Any) -> AsyncIterator[httpx.AsyncClient]:
    app = health_app(source, **options)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1:8080") as client:
        yield client


@pytest.mark.parametrize(("path", "flag"), [("live", "live"), ("ready", "ready"), ("startup", "started")])
@pytest.mark.parametrize("well", [True, False])
async def test_a_probe_follows_its_flag_and_names_each_loop(path: str, flag: str, well: bool) -> None:
    flags = dict.fromkeys(("live", "ready", "started"), not well) | {flag: well}
    loops = (loop_status(), loop_status("mailer", state=ServiceState.STARTING, ready=False, reason="is starting"))
    async with client_of(FakeGroup(**flags, reasons=("mailer is starting",), loops=loops)) as client:
        response = await client.get(f"/health/{path}")
    answer = response.json()
    assert response.status_code == (200 if well else 503)
    assert answer["status"] == ("ok" if well else "unavailable")
    assert answer["reasons"] == ([] if well else ["mailer is starting"])
    assert [(loop["name"], loop["state"], loop["heartbeat_age"], loop["reason"]) for loop in answer["loops"]] == [
        ("indexer", "running", 0.25, None),
        ("mailer", "starting", 0.25, "is starting"),
    ]


@pytest.mark.parametrize("state", list(GroupState)[3:-1])
async def test_live_through_the_whole_of_a_shutdown(state: GroupState) -> None:
    async with client_of(FakeGroup(state=state, ready=False)) as client:
        assert (await client.get("/health/live")).status_code == 200
        assert (await client.get("/health/ready")).status_code == 503


async def test_readiness_tells_the_checks_and_probes_answer_head() -> None:
    async with client_of(FakeGroup(ready=False, checks={"database": "refused", "disk": None})) as client:
        assert (await client.get("/health/ready")).json()["checks"] == {"database": "refused", "disk": None}
        head = await client.head("/health/ready")
    assert (head.status_code, head.content) == (503, b"")


@pytest.mark.parametrize("path", ["/health/ready", "/status", "/metrics"])
async def test_checks_are_asked_again_before_anything_is_said_of_them(path: str) -> None:
    source = FakeGroup()
    source.on_refresh = {"ready": False, "checks": {"database": "refused"}}
    async with client_of(source, metrics=GroupMetrics(source)) as client:
        await client.get("/health/live")
        await client.get("/health/startup")
        assert source.status().ready  # these two do not wait for anybody's database
        response = await client.get(path)
    assert 'mainspring_check_passing{check="database"} 0.0' in response.text or '"refused"' in response.text


async def test_every_answer_has_a_date_and_is_not_stored() -> None:
    async with client_of(FakeGroup()) as client:
        for path in ("/health/live", "/status", "/", "/nowhere"):
            response = await client.get(path)
            assert parsedate_to_datetime(response.headers["date"]).tzinfo is not None
            assert response.headers["cache-control"] == "no-store"


async def test_status_is_the_whole_tree_as_valid_json() -> None:
    boxes = (
        FakeMailbox("jobs", Counts(pending=7, dead=1, queue_age=9.87654)),
        FakeMailbox("jobs", MailboxConnectionError("down\nhere")),
    )
    source = FakeGroup(
        *boxes,
        loops=(loop_status(heartbeat_age=math.inf),),
        phases={GroupState.FINISH: 1.23456},
        shutdown_reason="drain",
    )
    async with client_of(source) as client:
        tree = (await client.get("/status")).json()
    assert tree["name"] == "shop"
    assert tree["uptime"] == 12.346
    assert tree["loops"][0]["heartbeat_age"] is None  # JSON has no infinity
    assert tree["loops"][0]["outcomes"] == {"acknowledged": 5}
    assert tree["phases"] == {"finish": 1.235}
    assert tree["version"] == mainspring.__version__
    first, second = tree["mailboxes"]
    assert first == {
        "name": "jobs",
        "counts": {"delayed": 0, "pending": 7, "in_flight": 0, "settled": 0, "dead": 1},
        "error": None,
        "queue_age": 9.877,
    }
    assert second == {
        "name": "jobs#2",
        "counts": None,
        "error": "MailboxConnectionError: down here",
        "queue_age": None,
    }


@pytest.mark.parametrize("path", ["health/live", "health/ready", "health/startup", "status"])
async def test_an_answer_holds_what_errors_say_beyond_utf_8(path: str) -> None:
    text = "no file \udcff here"
    source = FakeGroup(ready=False, reasons=(text,), checks={"disk": text}, loops=(loop_status(reason=text),))
    async with client_of(source) as client:
        response = await client.get(f"/{path}")
    assert response.status_code in {200, 503}
    assert response.json()["loops"][0]["reason"] == text


async def test_metrics_are_made_where_none_are_given_and_count_from_then_on() -> None:
    source = FakeGroup()
    async with client_of(source) as client:
        source.dispatcher.dispatch(MessageFinished("indexer", "m", "r", "acknowledged", 0.2, 1))
        text = (await client.get("/metrics")).text
    assert 'mainspring_messages_total{loop="indexer",outcome="acknowledged"} 1.0' in text


async def test_metrics_answers_what_it_is_given() -> None:
    source = FakeGroup(
        FakeMailbox("jobs", Counts(pending=7, queue_age=9.5)),
        FakeMailbox("own", Counts(pending=3)),  # it does not tell the age of its queue
        FakeMailbox("down", MailboxConnectionError("down")),
    )
    async with client_of(source, metrics=GroupMetrics(source)) as client:
        response = await client.get("/metrics")
        open_metrics = await client.get("/metrics", headers={"accept": "application/openmetrics-text; version=1.0.0"})
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/plain; version=")
    assert 'mainspring_mailbox_depth{mailbox="jobs",state="pending"} 7.0' in response.text
    assert 'mainspring_queue_age_seconds{mailbox="jobs"} 9.5' in response.text
    assert 'mainspring_mailbox_depth{mailbox="own",state="pending"} 3.0' in response.text
    assert 'mainspring_queue_age_seconds{mailbox="own"}' not in response.text
    assert 'mailbox="down"' not in response.text
    assert open_metrics.headers["content-type"].startswith("application/openmetrics-text")
    assert open_metrics.text.endswith("# EOF\n")


# --------------------------------------------------------------------------------------------------------------- depths


async def test_depths_are_asked_once_for_all_who_come_at_once_and_again_when_stale() -> None:
    box = FakeMailbox("jobs", Counts(pending=1))
    reader = DepthReader(lambda: [box], max_age=0.05)
    async with anyio.create_task_group() as group:
        for _ in range(5):
            group.start_soon(reader.read)
    assert box.asked == 1
    with anyio.fail_after(60):
        while box.asked == 1:
            await reader.read()
            await anyio.sleep(0.001)


async def test_a_mailbox_that_gives_no_answer_costs_its_deadline_and_only_its_own_depth() -> None:
    reader = DepthReader(lambda: [FakeMailbox("slow", 3600.0), FakeMailbox("jobs", Counts(pending=2))], timeout=0.01)
    slow, jobs = await reader.read()
    assert slow.counts is None
    assert slow.error == "no answer within 0.01 s"
    assert jobs.counts is not None
    assert jobs.counts["pending"] == 2


# ----------------------------------------------------------------------------------------------------------------- acts


async def test_drain_on_loopback_needs_no_token_and_may_be_asked_twice() -> None:
    source = FakeGroup()
    async with client_of(source) as client:
        for _ in range(2):
            response = await client.post("/drain")
            assert (response.status_code, response.json()["status"]) == (202, "draining")
        assert (await client.get("/drain")).status_code == 405
    assert source.drains == ["drain requested over HTTP"] * 2


async def test_a_group_that_does_not_run_cannot_drain() -> None:
    """It would remember that, and end its next run at once."""
    source = FakeGroup(state=GroupState.IDLE, started=False, ready=False)
    async with client_of(source) as client:
        response = await client.post("/drain")
    assert (response.status_code, response.text) == (409, "group 'shop' cannot drain: it is not running\n")
    assert source.drains == []


@pytest.mark.parametrize(
    ("token", "header", "status", "words"),
    [
        ("s3cret", None, 401, "Authorization: Bearer"),
        ("s3cret", "Bearer wrong", 403, "is not that of MAINSPRING_ADMIN_TOKEN"),
        ("s3cret", "Bearer s3cre", 403, "is not that of"),
        ("s3cret", "Basic s3cret", 401, "Authorization: Bearer"),
        ("s3cret", "Bearer s3cret", 202, "draining"),
        ("s3cret", "bearer  s3cret ", 202, "draining"),
        ("", None, 403, "set MAINSPRING_ADMIN_TOKEN"),
        ("", "Bearer ", 403, "set MAINSPRING_ADMIN_TOKEN"),
    ],
)
async def test_drain_from_other_hosts_needs_the_token(token: str, header: str | None, status: int, words: str) -> None:
    source = FakeGroup()
    async with client_of(source, admin_token=token, loopback=False) as client:
        response = await client.post("/drain", headers={} if header is None else {"authorization": header})
        assert (await client.get("/health/ready")).status_code == 200  # probes are open
    assert response.status_code == status
    assert words in response.text
    assert len(response.text.splitlines()) == 1
    assert len(source.drains) == (status == 202)
    assert ("www-authenticate" in response.headers) == (status == 401)


async def test_the_token_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ADMIN_TOKEN, "from-env")
    async with client_of(FakeGroup(), loopback=False) as client:
        assert (await client.post("/drain")).status_code == 401
        assert (await client.post("/drain", headers={"authorization": "Bearer from-env"})).status_code == 202


@pytest.mark.parametrize(("act", "done"), [("pause", "paused"), ("resume", "resumed")])
async def test_pause_and_resume_answer_once_they_hold_and_need_the_token(act: str, done: str) -> None:
    source = FakeGroup()
    async with client_of(source, admin_token="s3cret", loopback=False) as client:
        assert (await client.post(f"/{act}")).status_code == 401
        assert source.switches == []
        response = await client.post(f"/{act}", headers={"authorization": "Bearer s3cret"})
        assert (await client.get(f"/{act}")).status_code == 405
    assert (response.status_code, response.json()["status"]) == (200, done)
    assert source.switches == [f"{act} requested over HTTP"]


@pytest.mark.parametrize(
    ("error", "status", "words"),
    [
        (ControlRefusedError("loop 'poller' cannot be paused"), 409, "loop 'poller' cannot be paused"),
        (LoopNotRunningError("it is shutting down"), 409, "it is shutting down"),
        (TicketTimeoutError("late"), 202, "pause is under way"),
    ],
)
async def test_a_pause_that_cannot_be_says_why_and_one_that_takes_long_that_it_does(
    error: Exception, status: int, words: str
) -> None:
    source = FakeGroup()
    source.refuses = error
    async with client_of(source) as client:
        response = await client.post("/pause")
    assert response.status_code == status
    assert words in response.text


HERE = "127.0.0.1:8080"


@pytest.mark.parametrize(
    ("headers", "allowed"),
    [
        ({"host": "whatever-a-tool-was-told"}, True),
        ({"origin": f"http://{HERE}", "sec-fetch-site": "same-origin"}, True),
        ({"host": "localhost:8080", "origin": "http://localhost:8080"}, True),
        ({"host": "[::1]:8080", "origin": "http://[::1]:8080"}, True),
        ({"origin": "https://evil.example"}, False),
        ({"origin": "null"}, False),
        ({"origin": "http://[bad"}, False),
        ({"sec-fetch-site": "cross-site"}, False),
        ({"sec-fetch-site": "same-site"}, False),
        ({"sec-fetch-site": "same-site", "origin": "http://127.0.0.1:3000"}, False),
        ({"referer": "https://evil.example/", "host": "evil.example"}, False),
        ({"host": "evil.example:8080", "origin": "http://evil.example:8080", "sec-fetch-site": "same-origin"}, False),
        ({"host": "192.0.2.1:8080", "origin": "http://192.0.2.1:8080"}, False),
    ],
)
async def test_on_loopback_a_page_of_another_site_cannot_make_a_browser_drain(
    headers: dict[str, str], allowed: bool
) -> None:
    source = FakeGroup()
    async with client_of(source) as client:
        response = await client.post("/drain", headers=headers)
        assert ((await client.post("/pause", headers=headers)).status_code == 200) == allowed
    assert response.status_code == (202 if allowed else 403)
    assert (len(source.drains), len(source.switches)) == (allowed, allowed)
