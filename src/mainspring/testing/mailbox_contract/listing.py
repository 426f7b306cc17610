"""Lists of unfinished messages in pages, and changes of a message that waits."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mainspring.core import clock
from mainspring.mailbox.message import MessagePlace, MessageQuery, RescheduleOutcome
from mainspring.testing.mailbox_contract.harness import AnyMailbox, Harness, check, equal, on_mailbox

if TYPE_CHECKING:
    from mainspring.mailbox.message import UnfinishedMessage

DELAYED, PENDING, IN_FLIGHT = MessagePlace.DELAYED, MessagePlace.PENDING, MessagePlace.IN_FLIGHT


async def _send(box: AnyMailbox, body: Any, *, task: str | None = None, key: str | None = None, **options: Any) -> str:
    envelope = box.prepare(body, **options)
    envelope.task, envelope.key = task, key
    return (await box.send_prepared([envelope]))[0]


async def _all(box: AnyMailbox, query: MessageQuery) -> list[UnfinishedMessage]:
    """Return all messages of a list, page by page."""
    found: list[UnfinishedMessage] = []
    while True:
        page = await box.backend.list_messages(query)
        check(len(page.messages) <= query.limit, f"a page has {len(page.messages)} messages of {query.limit}")
        found += page.messages
        if page.after is None:
            return found
        query = replace(query, after=page.after)


def _ids(found: list[UnfinishedMessage]) -> list[str]:
    return sorted(each.message.message_id for each in found)


@on_mailbox("listing")
async def messages_are_listed_where_they_are(h: Harness, box: AnyMailbox) -> None:
    """Each unfinished message is in the list of its place, as it is found by its id, and in no other."""
    done = await _send(box, "done")
    await (await h.one(box)).acknowledge()
    in_flight = await _send(box, "in flight")
    await box.receive(visibility_timeout=600)
    priority = 3 if h.can("priority") else 0
    pending = await _send(box, {"a": 1}, task="t", key="k", headers={"h": "1"}, priority=priority)
    delayed = await _send(box, "delayed", delay=1_000)
    for place, message_id in ((IN_FLIGHT, in_flight), (PENDING, pending), (DELAYED, delayed)):
        (found,) = await _all(box, MessageQuery(place, 10))
        equal((found.message.message_id, found.place), (message_id, place), f"listed as {place}")
        if h.can("lookup"):
            (same,) = await box.backend.find([message_id])
            check(abs((found.due_at or 0) - (same.due_at or 0)) < 1, "the date at which it is due")
            equal(replace(found, due_at=None), replace(same, due_at=None), "the same as by its id")
    (found,) = await _all(box, MessageQuery(PENDING, 10))
    equal((found.key, found.message.headers, found.priority), ("k", {"h": "1"}, priority), "as sent")
    check(done not in _ids([*await _all(box, MessageQuery(PENDING, 10))]), "a done message is listed")


@on_mailbox("listing")
async def pages_hold_each_message_once(h: Harness, box: AnyMailbox) -> None:
    """Page by page, each message comes once, also while messages that were listed are done or sent."""
    for place, delay in ((PENDING, 0), (DELAYED, 1_000)):
        ids = [await _send(box, n, delay=delay, priority=n % 3 if h.can("priority") else 0) for n in range(25)]
        for limit in (1, 4, 1_000):
            equal(_ids(await _all(box, MessageQuery(place, limit))), sorted(ids), f"in pages of {limit}")
        await box.purge()
    ids = [await _send(box, n) for n in range(12)]
    page = await box.backend.list_messages(MessageQuery(PENDING, 5))
    gone = {each.message.message_id for each in page.messages}
    for message in await box.receive(max_messages=12, visibility_timeout=600):
        await (message.acknowledge() if message.id in gone else message.release())
    await _send(box, "new")
    rest = await _all(box, MessageQuery(PENDING, 5, page.after))
    check(set(ids) - gone <= set(_ids(rest)), "a message that stayed was left out")
    equal(len(_ids(rest)), len(set(_ids(rest))), "each once")


@on_mailbox("listing")
async def lists_are_narrowed_by_task_key_and_date(h: Harness, box: AnyMailbox) -> None:
    """A list of a task, of a key, or from a date on holds those messages alone."""
    sent = {}
    for task in (None, "t", "u"):
        for key in (None, "k", "l") if task else (None,):
            sent[task, key] = [await _send(box, n, task=task, key=key) for n in range(3)]
    for task, key in ((None, None), ("t", None), ("u", "k"), ("t", "none"), ("v", None), (None, "l")):
        ids = [
            each
            for (of_task, of_key), group in sent.items()
            for each in group
            if task in (None, of_task) and key in (None, of_key)
        ]
        equal(_ids(await _all(box, MessageQuery(PENDING, 4, task=task, key=key))), sorted(ids), f"of {task} and {key}")
    await h.pass_time(h.short)
    since = clock.utc_now().timestamp() - h.short / 2
    late = await _send(box, "late", task="t")
    equal(_ids(await _all(box, MessageQuery(PENDING, 4, since=since))), [late], "from a date on")
    equal(_ids(await _all(box, MessageQuery(PENDING, 4, task="u", since=since))), [], "from a date on, of another task")


@on_mailbox("listing")
async def a_list_of_a_task_is_whole_in_each_place(h: Harness, box: AnyMailbox) -> None:
    """Few or many messages of the task, or of the key, may be in another place, and others of the place of another task."""
    for many in (PENDING, DELAYED):
        sent: dict[tuple[MessagePlace, str], list[str]] = {}
        for task, key in (("t", "k"), ("u", "l")):
            ids = [await _send(box, n, task=task, key=key) for n in range(2)]
            await box.receive(max_messages=2, visibility_timeout=600)
            sent[IN_FLIGHT, task] = ids
        for task, key in (("t", "k"), ("u", "l")):
            for place, delay in ((PENDING, 0), (DELAYED, 1_000)):
                count = 9 if place is many else 2
                sent[place, task] = [await _send(box, n, task=task, key=key, delay=delay) for n in range(count)]
        for (place, task), ids in sent.items():
            key = "k" if task == "t" else "l"
            for of_task, of_key in ((task, None), (None, key), (task, key)):
                for limit in (1, 4):
                    found = _ids(await _all(box, MessageQuery(place, limit, task=of_task, key=of_key)))
                    equal(found, sorted(ids), f"{place} of {of_task} and {of_key}, in pages of {limit}")
        await box.purge()


@on_mailbox("listing")
async def keys_are_listed_as_they_were_given(h: Harness, box: AnyMailbox) -> None:
    """A key of up to 512 characters, with any but NUL, is found by itself, and is that of the message that is found."""
    keys = [
        "two\nlines",
        "\x7f",
        "non-breaking\u00a0space",
        "\u20ac" * 512,
        "\U0001f600" * 512,
        "a:b",
        "%",
        "*",
        " ",
        "-",
    ]
    for key in keys:
        await _send(box, key, task="t", key=key)
    for key in keys:
        found = await _all(box, MessageQuery(PENDING, 10, key=key))
        equal([each.key for each in found], [key], f"of the key {key[:20]!r}")


@on_mailbox("listing")
async def a_list_of_nothing_is_empty(h: Harness, box: AnyMailbox) -> None:
    """A list of an empty mailbox is empty, and a place that the store does not know is the beginning."""
    equal(await _all(box, MessageQuery(PENDING, 10)), [], "listed")
    message_id = await _send(box, "x")
    equal(_ids(await _all(box, MessageQuery(PENDING, 10, "no such place"))), [message_id], "behind an unknown place")


@on_mailbox("listing")
async def dead_letters_are_listed_by_task(h: Harness, box: AnyMailbox) -> None:
    """Page by page, the dead letters of a task come in the order of their deaths, each once, and no others."""
    task_of = {await _send(box, n, task=task, key="k" if n == 5 else None): task for n, task in enumerate("tutuutt")}
    await _send(box, "of no task")
    dying = await box.receive(max_messages=10, visibility_timeout=600)  # keys take turns, so in an order of the store's
    for message in dying:
        await message.dead_letter("x")

    async def dead(task: str, limit: int, after: str | None = None) -> list[str]:
        found: list[str] = []
        while page := await box.backend.dead_letters_of(task, limit, after):
            check(len(page) <= limit, f"a page has {len(page)} dead letters of {limit}")
            found += [delivery.message_id for delivery, _, _ in page]
            after = found[-1]
        return found

    ids = {task: [message.id for message in dying if task_of.get(message.id) == task] for task in "tuv"}
    for task in "tuv":
        for limit in (1, 3, 1_000):
            equal(await dead(task, limit), ids[task], f"of {task!r}, in pages of {limit}")
    after = [message.id for message in dying].index(ids["u"][1])
    behind = [each for each in ids["t"] if each in {message.id for message in dying[after:]}]
    equal(await dead("t", 2, ids["u"][1]), behind, "behind a dead letter of another task")
    equal(await dead("t", 2, "no such id"), ids["t"], "behind an id that is unknown")
    first, second, *others = ids["t"]
    equal((await box.replay_dead_letters([first]), await box.purge_dead_letters([second])), (1, 1), "replayed, purged")
    equal(await dead("t", 2), others, "the others are left")
    await (await h.one(box)).dead_letter("again")
    equal(await dead("t", 2), [*others, first], "after another death")
    await box.purge_dead_letters()
    equal(await dead("t", 2), [], "when all are purged")


@on_mailbox("listing", "expiry")
async def expired_messages_are_among_the_dead_letters_of_their_task(h: Harness, box: AnyMailbox) -> None:
    """A message that expires is a dead letter of its task, whether it was pending or delayed."""
    async with h.ending(h.short):
        ids = [await _send(box, n, task="t", expires_in=h.short, delay=delay) for n, delay in enumerate((0, 600))]
        await _send(box, "of another", task="u", expires_in=h.short)
    await h.pass_time(h.short)
    found = await box.backend.dead_letters_of("t", 10, None)
    equal(sorted(delivery.message_id for delivery, _, _ in found), sorted(ids), "of the task")


@on_mailbox("edit")
async def a_body_is_replaced(h: Harness, box: AnyMailbox) -> None:
    """The body of a waiting message is replaced. Its counts and all else stay, with ``front_return`` its place as well."""
    first = await _send(box, "old", headers={"h": "1"})
    await _send(box, "second")
    later = await _send(box, "later", delay=h.short)

    def body(text: str) -> Any:
        return box.prepare(text).body

    async with h.ending(h.short):
        equal(await box.backend.replace_body(first, body("new")), RescheduleOutcome.RESCHEDULED, "of a pending one")
        equal(
            await box.backend.replace_body(later, body("new later")), RescheduleOutcome.RESCHEDULED, "of a delayed one"
        )
        messages = await box.receive(max_messages=2, visibility_timeout=600)
    if not h.can("front_return"):
        messages.reverse()
    equal([(m.body, m.attempt, m.delivery_count) for m in messages], [("new", 1, 1), ("second", 1, 1)], "received")
    equal((messages[0].id, messages[0].headers), (first, {"h": "1"}), "the rest of it")
    equal(await box.backend.replace_body(first, body("late")), RescheduleOutcome.IN_FLIGHT, "of one in flight")
    await messages[0].acknowledge()
    equal(await box.backend.replace_body(first, body("late")), RescheduleOutcome.UNKNOWN, "a body for a done message")
    equal((await h.one(box, wait=h.patience)).body, "new later", "the delayed one")


@on_mailbox("edit", "limits")
async def a_message_at_a_limit_is_changed(h: Harness, box: AnyMailbox) -> None:
    """A message that waits at a limiter can have another body, and is listed as pending."""
    from mainspring.mailbox.limiters import LimitChange, TaskLimits

    await box.backend.change_limits([LimitChange("t", TaskLimits(concurrency=1))])
    ids = [await _send(box, n, task="t") for n in range(3)]
    equal(await box.backend.replace_body(ids[1], box.prepare("new").body), RescheduleOutcome.RESCHEDULED, "replaced")
    if h.can("listing"):
        equal(_ids(await _all(box, MessageQuery(PENDING, 2, task="t"))), sorted(ids), "listed")
    await (await h.one(box, lease=600)).acknowledge()
    equal((await h.one(box, lease=600)).body, "new", "received")
