"""Metrics as a Prometheus would read them."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import threading
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import httpx
import pytest
from prometheus_client import REGISTRY, CollectorRegistry, Gauge
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families
from trio.testing import MockClock

from http_fakes import FakeGroup, loop_status
from mainspring import Context, InMemoryMailbox, LoopGroup, MainLoop, Retry, RetryPolicy, events
from mainspring.core.state_machine import GroupState, ServiceState
from mainspring.http.app import health_app
from mainspring.http.depths import DepthReader
from mainspring.telemetry.metrics import FAULTS, GroupMetrics
from mainspring.telemetry.metrics_page import BUCKETS
from mainspring.telemetry.status import MailboxStatus
from mainspring.worker.outcome import Outcome

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

pytestmark = pytest.mark.anyio

Samples = dict[str, dict[tuple[tuple[str, str], ...], float]]


def scrape(metrics: GroupMetrics, depths: Sequence[MailboxStatus] = ()) -> Samples:
    """The samples by name and labels; a label set that comes twice is an error, as it is to Prometheus."""
    text, _ = metrics.render(depths)
    found: Samples = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            labels = tuple(sorted(sample.labels.items()))
            assert labels not in found.setdefault(sample.name, {}), (sample.name, labels)
            found[sample.name][labels] = sample.value
    return found


def finished(outcome: str = "acknowledged", seconds: float = 0.2, loop: str = "indexer") -> events.MessageFinished:
    return events.MessageFinished(loop, "m", "r", outcome, seconds, 1)


def counting(**changes: Any) -> tuple[GroupMetrics, events.Dispatcher]:
    metrics, dispatcher = GroupMetrics(FakeGroup(**changes)), events.Dispatcher()
    metrics.subscribe(dispatcher)
    return metrics, dispatcher


async def test_the_names_and_their_labels() -> None:
    metrics, dispatcher = counting(checks={"database": None}, event_loop_lag=0.01)
    dispatcher.dispatch(finished())
    dispatcher.dispatch(events.MessageNotAcknowledged("indexer", "m", "r", "retried", 1.0, 1, error_type="KeyError"))
    dispatcher.dispatch(events.GroupStateChanged("shop", GroupState.RUNNING, GroupState.FINISH, 9.0))
    counts = {"delayed": 1, "pending": 2, "in_flight": 3, "settled": 4, "dead": 5}
    depths = [MailboxStatus("jobs", counts, queue_age=2.5)]
    found = scrape(metrics, depths)
    labels = {name: {tuple(label for label, _ in key) for key in samples} for name, samples in found.items()}
    ours = {name: sets for name, sets in labels.items() if name.startswith("mainspring_")}
    assert ours == {
        "mainspring_info": {("group", "version")},
        "mainspring_ready": {()},
        "mainspring_check_passing": {("check",)},
        "mainspring_messages_total": {("loop", "outcome")},
        "mainspring_message_duration_seconds_bucket": {("le", "loop")},
        "mainspring_message_duration_seconds_count": {("loop",)},
        "mainspring_message_duration_seconds_sum": {("loop",)},
        "mainspring_time_in_queue_seconds_bucket": {("le", "loop")},
        "mainspring_time_in_queue_seconds_count": {("loop",)},
        "mainspring_time_in_queue_seconds_sum": {("loop",)},
        "mainspring_errors_total": {("loop", "type")},
        "mainspring_event_loop_lag_seconds": {()},
        "mainspring_loop_state": {("loop", "state")},
        "mainspring_loop_uptime_seconds": {("loop",)},
        "mainspring_faults_total": {("kind", "loop")},
        "mainspring_in_flight": {("loop",)},
        "mainspring_concurrency": {("loop",)},
        "mainspring_heartbeat_age_seconds": {("loop",)},
        "mainspring_loop_ready": {("loop",)},
        "mainspring_loop_restarts_total": {("loop",)},
        "mainspring_mailbox_depth": {("mailbox", "state")},
        "mainspring_queue_age_seconds": {("mailbox",)},
        "mainspring_shutdown_seconds": {("phase",)},
    }
    assert {"process_resident_memory_bytes", "process_open_fds", "process_cpu_seconds_total"} <= labels.keys()


async def test_one_state_of_a_loop_is_1_and_its_uptime_is_told() -> None:
    stopping = loop_status(state=ServiceState.STOPPING, uptime=12.5)
    found = scrape(counting(loops=(stopping,))[0])
    states = {dict(labels)["state"]: value for labels, value in found["mainspring_loop_state"].items()}
    assert states == {str(state): float(state is ServiceState.STOPPING) for state in ServiceState}
    assert found["mainspring_loop_uptime_seconds"] == {(("loop", "indexer"),): 12.5}


async def test_errors_by_type_and_the_time_in_the_queue_of_first_deliveries(virtual_clock: Any) -> None:
    """From a real loop: what a Retry asks for is no error, and a later delivery has waited for another reason."""

    class TooBad(Exception):
        pass

    async def handle(job: str, ctx: Context) -> None:
        if ctx.attempt == 1:
            raise {"bad": TooBad("x"), "later": Retry(delay=5)}.get(job, KeyError("y"))

    mailbox: InMemoryMailbox[str, None] = InMemoryMailbox("jobs")
    loop = MainLoop(mailbox, handle, name="indexer", retry=RetryPolicy(initial_delay=100, jitter="none"))
    metrics = GroupMetrics(FakeGroup())
    metrics.subscribe(loop.dispatcher)
    await mailbox.send_many(["bad", "bad", "other", "later"])
    await anyio.sleep(20)
    group = LoopGroup([loop])
    await group.run(install_signals=False, until_empty=True)
    found = scrape(metrics)
    errors = {dict(labels)["type"]: value for labels, value in found["mainspring_errors_total"].items()}
    assert {name.rpartition(".")[2]: value for name, value in errors.items()} == {"TooBad": 2, "KeyError": 1}
    assert found["mainspring_time_in_queue_seconds_count"] == {(("loop", "indexer"),): 4}
    assert found["mainspring_time_in_queue_seconds_sum"][(("loop", "indexer"),)] == pytest.approx(80)


async def test_messages_are_counted_by_outcome_from_zero() -> None:
    metrics, dispatcher = counting()
    before = scrape(metrics)["mainspring_messages_total"]
    assert before == {(("loop", "indexer"), ("outcome", outcome)): 0 for outcome in Outcome}
    for outcome in ("acknowledged", "acknowledged", "retried"):
        dispatcher.dispatch(finished(outcome))
    dispatcher.dispatch(finished(loop="a foreign loop"))
    after = scrape(metrics)["mainspring_messages_total"]
    assert after[("loop", "indexer"), ("outcome", "acknowledged")] == 2
    assert after[("loop", "indexer"), ("outcome", "retried")] == 1
    assert after[("loop", "a foreign loop"), ("outcome", "acknowledged")] == 1


async def test_durations_fall_into_their_buckets() -> None:
    metrics, dispatcher = counting()
    for seconds in (0.0005, 0.25, 0.2500001, 90_000.0):  # a bound belongs to its bucket
        dispatcher.dispatch(finished(seconds=seconds))
    found = scrape(metrics)
    buckets = {
        dict(labels)["le"]: count for labels, count in found["mainspring_message_duration_seconds_bucket"].items()
    }
    assert len(buckets) == len(BUCKETS) + 1
    assert [buckets[bound] for bound in ("0.001", "0.1", "0.25", "0.5", "21600.0", "+Inf")] == [1, 1, 2, 3, 3, 4]
    assert found["mainspring_message_duration_seconds_count"] == {(("loop", "indexer"),): 4}
    (total,) = found["mainspring_message_duration_seconds_sum"].values()
    assert total == pytest.approx(90_000.5006)


async def test_gauges_are_what_the_status_says_at_the_scrape() -> None:
    loops = (loop_status(in_flight=2, restarts=1), loop_status("mailer", ready=False, heartbeat_age=math.inf))
    metrics, _ = counting(loops=loops, ready=False, checks={"database": "down", "disk": None})
    found = scrape(metrics)
    assert found["mainspring_in_flight"] == {(("loop", "indexer"),): 2, (("loop", "mailer"),): 3}
    assert found["mainspring_heartbeat_age_seconds"][(("loop", "mailer"),)] == math.inf
    assert found["mainspring_loop_ready"] == {(("loop", "indexer"),): 1, (("loop", "mailer"),): 0}
    assert found["mainspring_loop_restarts_total"][(("loop", "indexer"),)] == 1
    assert found["mainspring_ready"] == {(): 0}
    assert found["mainspring_check_passing"] == {(("check", "database"),): 0, (("check", "disk"),): 1}


async def test_depths_leave_out_who_gave_none() -> None:
    metrics, _ = counting()
    counts = {"delayed": 0, "pending": 7, "in_flight": 1, "settled": 99, "dead": 2}
    found = scrape(metrics, [MailboxStatus("jobs", counts), MailboxStatus("down", None, "no answer")])
    assert {dict(key)["state"]: value for key, value in found["mainspring_mailbox_depth"].items()} == {
        "delayed": 0,
        "pending": 7,
        "in_flight": 1,
        "dead": 2,
    }


async def test_the_age_of_a_queue_is_0_where_nothing_waits_and_left_out_where_it_is_not_known() -> None:
    metrics, _ = counting()
    told = [
        MailboxStatus("old", {"pending": 2}, queue_age=90.5),
        MailboxStatus("empty", {"pending": 0}, queue_age=0.0),
        MailboxStatus("silent", {"pending": 2}),
        MailboxStatus("down", None, "no answer"),
    ]
    found = scrape(metrics, told)["mainspring_queue_age_seconds"]
    assert found == {(("mailbox", "old"),): 90.5, (("mailbox", "empty"),): 0.0}


async def test_the_age_of_a_queue_follows_virtual_time(virtual_clock: Any) -> None:
    mailbox: InMemoryMailbox[str, None] = InMemoryMailbox("jobs")
    reader, (metrics, _) = DepthReader(lambda: [mailbox]), counting()

    async def age() -> float:
        return scrape(metrics, await reader.read())["mainspring_queue_age_seconds"][(("mailbox", "jobs"),)]

    async with mailbox:
        assert await age() == 0
        await mailbox.send("old")
        await anyio.sleep(3_600)
        await mailbox.send("urgent", priority=9)
        assert await age() == pytest.approx(3_600)
        (urgent, old) = await mailbox.receive(max_messages=2)
        await urgent.release()
        await anyio.sleep(10)
        assert await age() == pytest.approx(10)
        await old.nack()
        await anyio.sleep(10)
        assert await age() == pytest.approx(3_620)


FAULT_EVENTS = [
    events.HandlerStalled("indexer", "m", 1.0, ""),
    events.HandlerStuck("indexer", "m", 1.0, ""),
    events.LeaseLost("indexer", "m"),
    events.LeaseRenewalFailed("indexer", "m", "E", 1.0),
    events.LoopCrashed("indexer", ValueError(), None),
    events.ReceiveFailed("indexer", "E", 1.0),
    events.SettlementDelayed("indexer", "m", "acknowledged", "E", 1.0),
    events.SettlementFailed("indexer", "m", "acknowledged", "E"),
]


async def test_faults_are_counted_by_kind() -> None:
    metrics, dispatcher = counting()
    for times, event in enumerate(FAULT_EVENTS, start=1):
        for _ in range(times):
            dispatcher.dispatch(event)
    found = {dict(key)["kind"]: count for key, count in scrape(metrics)["mainspring_faults_total"].items()}
    assert found == {FAULTS[type(event)]: times for times, event in enumerate(FAULT_EVENTS, start=1)}


@pytest.mark.parametrize("anyio_backend", [("trio", {"clock": MockClock(autojump_threshold=0)})], ids=["virtual"])
async def test_phases_of_a_shutdown_are_timed_while_they_last_and_when_they_ended() -> None:
    metrics, dispatcher = counting()
    moves = [GroupState.RUNNING, GroupState.DRAIN_DELAY, GroupState.STOP_INTAKE, GroupState.FINISH]
    for old, new in pairwise(moves):
        dispatcher.dispatch(events.GroupStateChanged("shop", old, new, 5.0))
    await anyio.sleep(2.5)
    found = {dict(key)["phase"]: value for key, value in scrape(metrics)["mainspring_shutdown_seconds"].items()}
    assert found == {"drain_delay": 5.0, "stop_intake": 5.0, "finish": 2.5}
    dispatcher.dispatch(events.GroupStateChanged("shop", GroupState.FINISH, GroupState.STOPPED, 7.0))
    found = {dict(key)["phase"]: value for key, value in scrape(metrics)["mainspring_shutdown_seconds"].items()}
    assert found == {"drain_delay": 5.0, "stop_intake": 5.0, "finish": 7.0}
    dispatcher.dispatch(events.GroupStateChanged("shop", GroupState.IDLE, GroupState.STARTING, 1.0))
    assert "mainspring_shutdown_seconds" not in scrape(metrics)


async def test_groups_do_not_meet_and_the_global_registry_is_left_alone() -> None:
    first, dispatcher = counting()
    second, _ = counting()
    dispatcher.dispatch(finished())
    done = ("loop", "indexer"), ("outcome", "acknowledged")
    assert scrape(first)["mainspring_messages_total"][done] == 1
    assert scrape(second)["mainspring_messages_total"][done] == 0
    assert not any(family.name.startswith("mainspring") for family in REGISTRY.collect())


async def test_the_end_of_a_subscription_and_a_registry_of_ones_own() -> None:
    metrics, dispatcher = GroupMetrics(FakeGroup()), events.Dispatcher()
    metrics.subscribe(dispatcher)()
    assert not any(dispatcher.wants(kind) for kind in (events.MessageFinished, events.GroupStateChanged, *FAULTS))
    registry = CollectorRegistry()
    registry.register(metrics.collector)
    assert registry.get_sample_value("mainspring_in_flight", {"loop": "indexer"}) == 3


async def test_the_applications_own_metrics_are_served_and_one_that_raises_costs_only_those(
    caplog: pytest.LogCaptureFixture,
) -> None:
    registry = CollectorRegistry()
    Gauge("cache_entries", "Entries of the cache.", registry=registry).set(7)
    metrics = GroupMetrics(FakeGroup(), registry=registry)
    found = scrape(metrics)
    assert found["cache_entries"] == {(): 7}
    assert found["process_open_fds"]  # of the process, also where the application's registry has none

    class Broken:
        def describe(self) -> list[Any]:
            return []

        def collect(self) -> list[Any]:
            raise RuntimeError("the cache is away")

    registry.register(Broken())
    assert "mainspring_in_flight" in scrape(metrics)
    assert "the cache is away" in caplog.text


async def test_a_name_that_both_have_comes_once() -> None:
    metrics = GroupMetrics(FakeGroup(), registry=GroupMetrics(FakeGroup()).registry)
    assert len(scrape(metrics)["mainspring_in_flight"]) == 1  # scrape() asserts that no sample comes twice


class Waiting:
    """Collects from a server that has not answered yet."""

    def __init__(self) -> None:
        self.answer = threading.Event()
        self.calls = 0

    def describe(self) -> tuple[Any, ...]:
        return ()

    def collect(self) -> Iterator[GaugeMetricFamily]:
        self.calls += 1
        self.answer.wait(60)
        yield GaugeMetricFamily("queue_entries", "Entries of a queue elsewhere.", 7)


async def test_a_collector_of_the_application_that_waits_does_not_block_the_event_loop() -> None:
    registry, waiting = CollectorRegistry(), Waiting()
    registry.register(waiting)
    app = health_app(FakeGroup(), metrics=GroupMetrics(FakeGroup(), registry=registry, collect_within=0.01))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1") as client:
        with anyio.fail_after(20):
            for _ in range(2):
                text = (await client.get("/metrics")).text
                assert "mainspring_ready" in text
                assert "queue_entries" not in text
            assert waiting.calls == 1
            waiting.answer.set()
            while "queue_entries 7.0" not in (await client.get("/metrics")).text:
                await anyio.sleep(0.001)


async def test_the_default_registry_is_served_without_being_named() -> None:
    gauge = Gauge("queue_weight", "A gauge of the application.")
    try:
        gauge.set(3)
        assert scrape(GroupMetrics(FakeGroup()))["queue_weight"] == {(): 3}
    finally:
        REGISTRY.unregister(gauge)


@pytest.mark.slow
async def test_with_several_processes_the_files_of_all_are_served(tmp_path: Path) -> None:
    code = (
        "import prometheus_client as p; p.Counter('orders', 'Orders.').inc(2);"
        "from http_fakes import FakeGroup; from mainspring.telemetry.metrics import GroupMetrics;"
        "import anyio\n"
        "async def main(): print(GroupMetrics(FakeGroup()).render()[0].decode())\n"
        "anyio.run(main)"
    )
    environment = os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path), "PYTHONPATH": str(Path(__file__).parents[1])}
    for total in ("2.0", "4.0"):
        command = [sys.executable, "-c", code]
        run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60)
        assert f"orders_total {total}" in run.stdout


async def test_names_of_any_kind_survive_and_openmetrics_is_valid() -> None:
    name = 'a "quoted" \\ name\nof two lines'
    metrics, dispatcher = counting(loops=(loop_status(name),))
    dispatcher.dispatch(finished(loop=name))
    assert (("loop", name), ("outcome", "acknowledged")) in scrape(metrics)["mainspring_messages_total"]
    text, kind = metrics.render((), "application/openmetrics-text; version=1.0.0")
    assert kind.startswith("application/openmetrics-text")
    assert any(family.name == "mainspring_messages" for family in parse_openmetrics(text.decode()))
