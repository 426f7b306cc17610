"""Bad constructor values, names, reports, and the bound on concurrency across loops."""

from __future__ import annotations

import math
from collections import Counter

import anyio
import pytest
from group_support import Foreign, box, one_loop_group, running

from mainspring import ConfigError, LoopGroup, MainLoop, ShutdownReport, Tasks
from mainspring.events import CalibrationWarning, MessageFinished
from mainspring.runtime.shutdown_report import Ending, PartReport


async def quick(body: dict) -> None:
    pass


BAD = [
    ({"shutdown_timeout": -1}, "shutdown_timeout must be a number of seconds from 0, not -1"),
    ({"shutdown_timeout": math.inf}, "shutdown_timeout must be a number of seconds"),
    ({"shutdown_timeout": math.nan}, "shutdown_timeout must be a number of seconds"),
    ({"shutdown_timeout": "30"}, "shutdown_timeout must be a number of seconds from 0, not '30'"),
    ({"shutdown_timeout": None}, "shutdown_timeout must be a number of seconds"),
    ({"cancel_grace": -0.1}, "cancel_grace must be"),
    ({"cancel_grace": True}, "cancel_grace must be"),
    ({"drain_delay": -1}, "drain_delay must be"),
    ({"check_timeout": 0}, "check_timeout must be"),
    ({"check_timeout": None}, "check_timeout must be"),
    ({"check_interval": 0}, "check_interval must be"),
    ({"check_interval": None}, "check_interval must be"),
    ({"check_max_failures": 0}, "check_max_failures must be"),
    ({"check_max_failures": 1.5}, "check_max_failures must be"),
    ({"watchdog_threshold": 0}, "watchdog_threshold must be"),
    ({"watchdog_interval": 0}, "watchdog_interval must be"),
    ({"watchdog_interval": None}, "watchdog_interval must be"),
    ({"block_threshold": -5}, "block_threshold must be"),
    ({"max_concurrency": 0}, "max_concurrency must be a whole number from 1, or None, not 0"),
    ({"max_concurrency": 1.5}, "max_concurrency must be a whole number"),
    ({"health_port": -1}, "health_port must be 0 to 65535, or None, not -1"),
    ({"health_port": 65_536}, "health_port must be"),
    ({"health_port": "8080"}, "health_port must be"),
    ({"health_host": ""}, "health_host must be"),
    ({"health_host": None}, "health_host must be"),
    ({"on_crash": "explode"}, 'on_crash must be "terminate" or "report", not \'explode\''),
    ({"restart": 5}, "restart must be a RestartPolicy, or None, not 5"),
    ({"guardian": "yes"}, "guardian must be True, False or None, not 'yes'"),
    ({"checks": {"database": "ping"}}, "check 'database' must be a function, not 'ping'"),
    ({"checks": [print]}, "checks must be functions by name"),
    ({"name": 5}, "name must be text, or None, not 5"),
    ({"name": ""}, "name must be text, or None, not ''"),
]


@pytest.mark.parametrize(("keywords", "says"), BAD, ids=lambda value: str(value) if isinstance(value, dict) else "")
def test_a_value_that_cannot_work_is_one_line_that_says_what_can(keywords, says):
    with pytest.raises(ConfigError) as caught:
        LoopGroup([MainLoop(box(), quick)], **keywords)
    assert str(caught.value).startswith(f"LoopGroup: {says}")
    assert "\n" not in str(caught.value)


def test_loops_are_needed_each_once_and_in_a_list():
    loop = MainLoop(box(), quick)
    for loops, says in (
        ([], "it needs at least one loop"),
        ([loop, loop], "stands in it twice"),
        ([quick], "is no loop; it needs run"),
        ([Tasks("memory://jobs")], r"is no loop; write LoopGroup\(\[tasks.loop\(\)\]\)$"),
        (Tasks("memory://jobs"), r"is a list of loops, .*; write LoopGroup\(\[tasks.loop\(\)\]\)$"),
        (loop, "its first argument is a list of loops"),
        (None, "its first argument is a list of loops"),
    ):
        with pytest.raises(ConfigError, match=says):
            LoopGroup(loops)
    foreign = Foreign()
    with pytest.raises(ConfigError, match="stands in it twice"):
        LoopGroup([foreign, foreign])


def test_loops_of_one_name_are_told_apart():
    group = LoopGroup(
        [MainLoop(box(), quick), MainLoop(box(), quick), Foreign(), Foreign(), MainLoop(box(), quick, name="quick-2")]
    )
    assert [loop.name for loop in group.loops] == ["quick", "quick-2", "Foreign", "Foreign-2", "quick-2-2"]


async def test_values_that_a_run_cannot_work_with_surface(virtual_clock):
    group, _ = one_loop_group(quick)
    with pytest.raises(ConfigError, match="visibility_timeout must be 1 to 43200 seconds, not -1"):
        await group.run(install_signals=False, visibility_timeout=-1)


async def test_timeouts_that_do_not_fit_are_told_at_the_start(virtual_clock):
    warnings = []
    group, _ = one_loop_group(quick, loop={"visibility_timeout": 10}, block_threshold=30)
    group.dispatcher.subscribe(CalibrationWarning, lambda event: warnings.append(event.text))
    await group.run(install_signals=False, until_empty=True)
    assert any("block" in text for text in warnings)


# --------------------------------------------------------------------------------------------------------------- report


def part(name, ending, seconds=1.0, where=()):
    return PartReport(name, ending, seconds, where)


@pytest.mark.parametrize(
    ("endings", "forced", "status"),
    [
        ((), None, 0),
        ((Ending.FINISHED, Ending.FINISHED), None, 0),
        ((Ending.FINISHED, Ending.CANCELLED), None, 70),
        ((Ending.CRASHED, Ending.CANCELLED), None, 1),
        ((Ending.CRASHED, Ending.STUCK), None, 70),
        ((Ending.STUCK,), None, 70),
        ((Ending.FINISHED,), 15, 143),
        ((Ending.STUCK,), 2, 130),
    ],
)
def test_exit_status(endings, forced, status):
    report = ShutdownReport("SIGTERM", 1.0, tuple(part(str(e), e) for e in endings), forced_by=forced)
    assert report.exit_status == status
    assert report.clean is (status == 0)


def test_report_reads_well():
    report = ShutdownReport(
        "SIGTERM",
        31.284,
        (
            part("emails", Ending.FINISHED, 0.5),
            part("index", Ending.CANCELLED, 31.2, ("app.py:12 in handle: await get()",)),
        ),
        {"finish": 30.0, "cancel": 1.284},
    )
    assert str(report) == (
        "shutdown (SIGTERM) in 31.28 s: not clean, exit status 70\n"
        "  phases: finish 30.00 s, cancel 1.28 s\n"
        "  emails: finished after 0.50 s\n"
        "  index: cancelled after 31.20 s\n"
        "      waiting at app.py:12 in handle: await get()"
    )
    assert str(ShutdownReport("all loops ended", 0.0)) == "shutdown (all loops ended) in 0.00 s: clean"


# ------------------------------------------------------------------------------------------------------ max_concurrency


@pytest.mark.parametrize("places", [1, 3, 7])
async def test_no_more_messages_are_in_hand_than_the_group_allows_and_no_loop_starves(virtual_clock, places):
    now, most, done = 0, 0, Counter()
    boxes = [box(f"box{n}") for n in range(4)]  # the last one stays empty: it must not keep a place for itself

    async def handle(body):
        nonlocal now, most
        now += 1
        most = max(most, now)
        claimed = [(await mailbox.counts()).in_flight for mailbox in boxes]
        assert sum(claimed) <= places
        await anyio.sleep(1)
        now -= 1
        done[body["box"]] += 1

    for n, mailbox in enumerate(boxes[:3]):
        await mailbox.send_many([{"box": n}] * 60)
    group = LoopGroup(
        [
            MainLoop(mailbox, handle, name=f"loop{n}", body=dict, concurrency=10, wait_time_seconds=30)
            for n, mailbox in enumerate(boxes)
        ],
        max_concurrency=places,
    )
    async with running(group):
        await anyio.sleep(90 / places)
        early = dict(done)
        while sum(done.values()) < 180:
            await anyio.sleep(0.1)
        busy = anyio.current_time()
        await group.shutdown()
    assert most == places
    assert min(early[n] for n in range(3)) >= 10  # of 30 each, had it been fair to the last message
    assert busy < 1.5 * 180 / places  # little is lost to the one that waits in vain


async def test_what_a_group_lends_its_loops_ends_with_its_run(virtual_clock):
    now, most, heard = 0, 0, []

    async def handle(body: dict) -> None:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await anyio.sleep(1)
        now -= 1

    mailbox = box()
    loop = MainLoop(mailbox, handle, concurrency=4)
    loop.dispatcher.subscribe(MessageFinished, lambda event: heard.append("loop"))
    group = LoopGroup([loop], max_concurrency=1)
    group.dispatcher.subscribe(MessageFinished, lambda event: heard.append("group"))
    await mailbox.send_many([{}, {}])
    await group.run(install_signals=False, until_empty=True)
    assert (most, heard) == (1, ["loop", "group"] * 2)
    await mailbox.send_many([{}] * 4)
    await loop.run(max_iterations=1)
    assert (most, heard[4:]) == (4, ["loop"] * 4)


async def test_a_loop_that_has_ended_leaves_its_turns_to_the_others(virtual_clock):
    """With one place for two loops each waits in turns of a second; once one has ended, the other waits as long as it may."""
    stays, ends = box("stays"), MainLoop(box("ends"), quick, name="ends")
    group = LoopGroup([MainLoop(stays, quick, name="stays", wait_time_seconds=20), ends], max_concurrency=1)
    async with running(group):
        await anyio.sleep(10)
        polls = len(stays.times("claim"))
        assert polls >= 8  # two at each of its turns: a look, and a wait
        await ends.shutdown()
        await anyio.sleep(100)
        assert len(stays.times("claim")) - polls <= 12  # a look and a wait of 20 s, and again
        await group.shutdown()
