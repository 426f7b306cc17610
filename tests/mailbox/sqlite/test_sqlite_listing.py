"""Lists of messages in a mailbox file: each page goes along an index, and looks at a bounded number of messages."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from mainspring.core import clock
from mainspring.mailbox.limiters import LimitChange, TaskLimits
from mainspring.mailbox.message import MessagePlace, MessageQuery
from mainspring.mailbox.sqlite.listing import LOOK_AT

pytestmark = pytest.mark.anyio

PLACES = list(MessagePlace)
NARROWED = [{}, {"task": "t"}, {"key": "k"}, {"task": "t", "key": "k"}]


async def send(mailbox, *bodies, task="t", key=None, **options):
    envelopes = [mailbox.prepare(body, **options) for body in bodies]
    for envelope in envelopes:
        envelope.task, envelope.key = task, key
    return await mailbox.send_prepared(envelopes)


def bodies(page):
    return [json.loads(each.message.body) for each in page.messages]


async def pages(mailbox, query):
    found = []
    while True:
        page = await mailbox.backend.list_messages(query)
        found.append(bodies(page))
        if page.after is None:
            return found
        query = replace(query, after=page.after)


async def test_each_page_goes_along_an_index(connections, mailbox):
    """Beside the index it scans only the given rows. It sorts nothing."""
    await send(mailbox, *range(9), key="k")
    await mailbox.receive(max_messages=3)
    await send(mailbox, *range(9), key="k", delay=1_000)
    (connection,) = connections
    statements = []
    connection.exec_trace = lambda cursor, statement, values: statements.append(statement) or True
    for place in PLACES:
        for narrowed in NARROWED:
            for since in (None, 1.0):
                await pages(mailbox, MessageQuery(place, 2, since=since, **narrowed))
    await mailbox.backend.dead_letters_of("t", 2, "an id")
    connection.exec_trace = None
    checked = {each for each in statements if each.startswith("SELECT") and "FROM mailboxes" not in each}
    for statement in checked:
        plan = [row[3] for row in connection.execute("EXPLAIN QUERY PLAN " + statement, [None] * statement.count("?"))]
        assert not [step for step in plan if step.startswith("SCAN") and "json_each" not in step], (statement, plan)
        assert not any("TEMP B-TREE" in step for step in plan), (statement, plan)
    assert len(checked) > 15


async def test_a_page_looks_at_so_many_messages_and_no_more(mailbox):
    """Where other messages of the task are in another place, or were sent before, there are pages without messages."""
    await send(mailbox, *range(2 * LOOK_AT), delay=1_000)
    await send(mailbox, *range(2 * LOOK_AT), task="u")
    await send(mailbox, "pending")
    found = await pages(mailbox, MessageQuery(MessagePlace.PENDING, 10, task="t"))
    assert found == [[], [], ["pending"]]
    later = clock.utc_now().timestamp() + 60
    assert await pages(mailbox, MessageQuery(MessagePlace.DELAYED, 10, since=later)) == [[], [], []]


async def test_a_page_goes_the_way_that_has_fewer_messages(mailbox):
    """A task with many messages in another place, and one with few messages beside many others in the place."""
    await send(mailbox, *range(3 * LOOK_AT))
    await send(mailbox, "late", delay=1_000)
    await send(mailbox, "rare", task="u")
    await send(mailbox, *range(2 * LOOK_AT), task="v", delay=1_000)
    await send(mailbox, "rare and late", task="u", delay=1_000)
    assert await pages(mailbox, MessageQuery(MessagePlace.IN_FLIGHT, 9, task="t")) == [[]]
    assert await pages(mailbox, MessageQuery(MessagePlace.PENDING, 9, task="u")) == [["rare"]]
    assert await pages(mailbox, MessageQuery(MessagePlace.DELAYED, 9, task="u")) == [["rare and late"]]
    assert (await pages(mailbox, MessageQuery(MessagePlace.DELAYED, 9, task="t")))[0] == ["late"]


async def test_what_was_sent_late_comes_first_where_a_date_is_asked_for(mailbox):
    for number in range(3):
        await send(mailbox, number)
    for narrowed in NARROWED[:2]:
        assert await pages(mailbox, MessageQuery(MessagePlace.PENDING, 9, since=1.0, **narrowed)) == [[2, 1, 0]]
        assert await pages(mailbox, MessageQuery(MessagePlace.PENDING, 9, **narrowed)) == [[0, 1, 2]]


async def test_a_message_that_gets_its_permit_between_two_pages_is_not_left_out(mailbox):
    await mailbox.backend.change_limits([LimitChange("t", TaskLimits(concurrency=1))])
    await send(mailbox, *range(6))
    query = MessageQuery(MessagePlace.PENDING, 2)
    first = await mailbox.backend.list_messages(query)
    assert bodies(first) == [1, 2], "the messages at the limiter"
    await mailbox.backend.change_limits([LimitChange("t", TaskLimits(concurrency=9))])
    rest = await pages(mailbox, replace(query, after=first.after))
    assert {3, 4, 5, 0} <= {body for page in rest for body in page}


@pytest.mark.parametrize("after", ["", "[]", "[7]", "[0, null, 1, 1]", "[0, [1], 1, 1]", "{}", "nonsense", "[0, 1]"])
async def test_an_end_that_no_page_has_given_is_the_beginning(mailbox, after):
    await send(mailbox, "a")
    assert bodies(await mailbox.backend.list_messages(MessageQuery(MessagePlace.PENDING, 9, after))) == ["a"]
