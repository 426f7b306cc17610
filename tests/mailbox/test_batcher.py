"""The command processor: what joins, what leaves at once, and what a cancellation takes back."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import anyio
import pytest

from mainspring.errors import MailboxClosedError, MailboxConnectionError
from mainspring.mailbox.batched import Batcher, Command
from mainspring.mailbox.limits import CLOSE_TIMEOUT, COURTESY
from mainspring.runtime.scope import DaemonScope

pytestmark = [pytest.mark.anyio, pytest.mark.every_loop]


class Add(Command):
    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


class Store:
    """Adds numbers; a batch stays out until the gate is open. ``resumable``: one that was cancelled can be gone on with."""

    def __init__(self, *, resumable: bool = False) -> None:
        self.commands: list[Add] = []
        self.executed_by: list[int] = []
        self.batches: list[list[int]] = []
        self.gate = anyio.Event()
        self.out = anyio.Event()
        self.undone: list[int] = []
        self.fails: Exception | None = None
        resume = self.resume if resumable else None
        self.batcher: Batcher[Add] = Batcher(self.execute, resume=resume, undo=self.undo, name="the store")

    async def execute(self, commands: list[Add]) -> None:
        self.commands = commands
        self.batches.append([command.number for command in commands])
        self.out.set()
        await self.resume()

    async def resume(self) -> None:
        self.executed_by.append(anyio.get_current_task().id)
        commands = self.commands
        await self.gate.wait()
        if self.fails is not None:
            raise self.fails
        for command in commands:
            if command.number < 0:
                command.error = ValueError(f"{command.number} is negative")
            else:
                command.result = command.number + 1

    def undo(self, command: Add) -> None:
        self.undone.append(command.number)
        self.batcher.post(Add(1_000 + command.number))


@pytest.fixture(params=[False, True], ids=["by the runner", "by the caller"])
def resumes(request):
    """Whether the store can be gone on with, where what executes a batch was cancelled."""
    return request.param


@pytest.fixture
async def store(anyio_backend, resumes):
    made = Store(resumable=resumes)
    async with DaemonScope("test", timeout=1) as scope:
        scope.start_soon(made.batcher.run, name="runner", stop=made.batcher.stop)
        yield made
        made.gate.set()
        await made.batcher.close()


async def test_a_lone_command_leaves_at_once_and_gets_its_result(store):
    store.gate.set()
    assert await store.batcher.call(Add(1)) == 2
    assert store.batches == [[1]]


@pytest.mark.parametrize("resumes", [True])
async def test_a_lone_command_is_executed_by_its_caller(store):
    store.gate.set()
    for number in range(3):
        await store.batcher.call(Add(number))
    async with anyio.create_task_group() as tasks:
        for number in range(3):
            tasks.start_soon(store.batcher.call, Add(number))
    await store.batcher.call(Add(4))  # behind a batch of several, others may come along
    mine = anyio.get_current_task().id
    assert [task == mine for task in store.executed_by] == [True, True, True, False, False, False]
    assert [len(batch) for batch in store.batches] == [1, 1, 1, 1, 2, 1]


class Ending(Add):
    joins = True


class Urgent(Add):
    wakes_first = True


@pytest.mark.parametrize("resumes", [True])
@pytest.mark.parametrize(("kind", "batches"), [(Add, [[0], [1]]), (Ending, [[0, 1]])])
async def test_a_command_that_joins_waits_for_what_follows_in_the_same_turn(store, kind, batches, anyio_backend_name):
    if anyio_backend_name == "trio":
        pytest.skip("trio lets tasks that are woken together go on in any order")
    store.gate.set()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(store.batcher.call, Add(1))
        await store.batcher.call(kind(0))
    assert store.batches == batches


@pytest.mark.parametrize("resumes", [True])
async def test_the_runner_goes_on_for_a_caller_that_is_cancelled(store):
    """Nobody overtakes it, and what it has done is undone."""
    results = []

    async def call(number):
        results.append(await store.batcher.call(Add(number)))

    async with anyio.create_task_group() as tasks:
        with anyio.CancelScope() as scope:
            tasks.start_soon(call, 7)
            await store.out.wait()
            scope.cancel()
        async with anyio.create_task_group() as cancelled:
            cancelled.start_soon(store.batcher.call, Add(8))
            await anyio.wait_all_tasks_blocked()
            cancelled.cancel_scope.cancel()
        tasks.start_soon(call, 9)
        await anyio.wait_all_tasks_blocked()
        assert store.batches == [[7]]
        store.gate.set()
    assert results == [8, 10]
    store.gate = anyio.Event()
    store.undone.clear()
    await anyio.wait_all_tasks_blocked()
    async with anyio.create_task_group() as cancelled:
        cancelled.start_soon(store.batcher.call, Add(20))
        while store.batches[-1] != [20]:
            await anyio.lowlevel.checkpoint()
        cancelled.cancel_scope.cancel()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(call, 21)
        await anyio.wait_all_tasks_blocked()
        assert store.batches[-1] == [20]
        store.gate.set()
    assert results == [8, 10, 22]
    assert store.undone == [20]
    assert store.batches[-1] == [1_020, 21]
    assert len(set(store.executed_by[-3:])) >= 2, "the caller began it, the runner ended it"


@pytest.mark.parametrize("resumes", [True])
async def test_a_caller_that_was_cancelled_before_it_began_does_nothing(store):
    store.gate.set()
    with anyio.CancelScope() as scope:
        scope.cancel()
        await store.batcher.call(Add(1))
    assert store.batches == []
    assert await store.batcher.call(Add(2)) == 3


async def test_what_arrives_while_a_batch_is_out_leaves_together(store):
    results = []

    async def call(number):
        results.append(await store.batcher.call(Add(number)))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(call, 0)
        await store.out.wait()
        for number in range(1, 101):
            tasks.start_soon(call, number)
        await anyio.wait_all_tasks_blocked()
        assert store.batches == [[0]]
        store.gate.set()
    assert sorted(results) == list(range(1, 102))
    assert [len(batch) for batch in store.batches] == [1, 100]
    assert store.batcher.batches == 2


async def test_callers_of_one_turn_of_the_loop_share_a_batch(store):
    store.gate.set()
    async with anyio.create_task_group() as tasks:
        for number in range(50):
            tasks.start_soon(store.batcher.call, Add(number))
    assert len(store.batches) <= 2


async def test_each_caller_gets_its_own_error(store):
    store.gate.set()
    outcomes = {}

    async def call(number):
        try:
            outcomes[number] = await store.batcher.call(Add(number))
        except ValueError as error:
            outcomes[number] = str(error)

    async with anyio.create_task_group() as tasks:
        for number in (-1, 5, -2):
            tasks.start_soon(call, number)
    assert outcomes == {-1: "-1 is negative", 5: 6, -2: "-2 is negative"}


async def test_a_failed_round_trip_fails_all_with_errors_of_their_own(store):
    store.gate.set()
    store.fails = MailboxConnectionError("no server")
    errors = []

    async def call(number):
        with pytest.raises(MailboxConnectionError, match="no server") as caught:
            await store.batcher.call(Add(number))
        errors.append(caught.value)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(call, 1)
        tasks.start_soon(call, 2)
    assert errors[0] is not errors[1]
    store.fails = None
    assert await store.batcher.call(Add(3)) == 4


async def test_cancelled_before_it_left_a_command_is_withdrawn(store):
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(store.batcher.call, Add(1))
        await store.out.wait()
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as inner:
                inner.start_soon(store.batcher.call, Add(2))
                inner.start_soon(store.batcher.call, Add(3))
                await anyio.wait_all_tasks_blocked()
                scope.cancel()
        tasks.start_soon(store.batcher.call, Add(4))
        await anyio.wait_all_tasks_blocked()
        store.gate.set()
    assert store.batches == [[1], [4]]
    assert store.undone == []


async def test_cancelled_while_it_is_out_a_command_is_undone_before_what_waits(store):
    async with anyio.create_task_group() as tasks:
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as inner:
                inner.start_soon(store.batcher.call, Add(1))
                await store.out.wait()
                scope.cancel()
        tasks.start_soon(store.batcher.call, Add(2))
        await anyio.wait_all_tasks_blocked()
        store.gate.set()
    assert store.undone == [1]
    assert store.batches == [[1], [1001, 2]]


async def test_what_failed_is_not_undone(store):
    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as inner:
            inner.start_soon(store.batcher.call, Add(-1))
            await store.out.wait()
            scope.cancel()
    store.gate.set()
    assert await store.batcher.call(Add(1)) == 2
    assert store.undone == []


async def test_cancelled_just_after_it_was_done_a_command_is_undone(anyio_backend):
    done = anyio.Event()
    undone = []
    scope = anyio.CancelScope()

    async def execute(commands):
        for command in commands:
            command.result = command.number
        scope.cancel()  # the caller is told of both at its next turn
        done.set()

    batcher = Batcher(execute, undo=lambda command: undone.append(command.number))
    async with DaemonScope("test") as daemons:
        daemons.start_soon(batcher.run, stop=batcher.stop)
        with scope:
            await batcher.call(Add(7))
        await done.wait()
        await batcher.close()
    assert undone in ([7], [])
    assert (undone == [7]) == scope.cancelled_caught  # undone, unless the result reached the caller


async def test_close_finishes_what_is_queued_and_takes_nothing_new(store):
    results = []

    async def call(number):
        results.append(await store.batcher.call(Add(number)))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(call, 1)
        await store.out.wait()
        tasks.start_soon(call, 2)
        await anyio.wait_all_tasks_blocked()
        tasks.start_soon(store.batcher.close)
        await anyio.wait_all_tasks_blocked()
        with pytest.raises(MailboxClosedError, match="the store is closed"):
            await store.batcher.call(Add(3))
        store.gate.set()
    assert results == [2, 3]


class Ask(Add):
    __slots__ = ()
    droppable = True


@pytest.mark.parametrize(
    ("command", "cancelled", "within"), [(Ask, False, COURTESY), (Add, True, COURTESY), (Add, False, CLOSE_TIMEOUT)]
)
async def test_a_close_waits_long_for_what_is_owed_to_a_caller_only(command, cancelled, within, virtual_clock):
    store = Store()
    async with DaemonScope("test", timeout=60) as scope:
        scope.start_soon(store.batcher.run, name="runner", stop=store.batcher.stop)
        async with anyio.create_task_group() as tasks:

            async def call():
                with pytest.raises(MailboxClosedError, match="was closed while the operation was out"):
                    await store.batcher.call(command(1))

            tasks.start_soon(call)
            await store.out.wait()  # and the store does not answer any more
            if cancelled:
                tasks.cancel_scope.cancel()
            else:
                began = anyio.current_time()
                await store.batcher.close()
        if cancelled:
            began = anyio.current_time()
            await store.batcher.close()
        assert anyio.current_time() - began == within


async def test_a_close_that_is_cancelled_lets_nobody_hang(anyio_backend):
    async def never(commands):
        await anyio.sleep_forever()

    batcher = Batcher(never, name="the store")
    refused = []

    async def call(number):
        with pytest.raises(MailboxClosedError):
            await batcher.call(Add(number))
        refused.append(number)

    async with DaemonScope("test", timeout=0) as daemons, anyio.create_task_group() as tasks:
        daemons.start_soon(batcher.run, stop=batcher.stop)
        tasks.start_soon(call, 1)
        await anyio.wait_all_tasks_blocked()
        tasks.start_soon(call, 2)
        await anyio.wait_all_tasks_blocked()
        with anyio.move_on_after(0):
            await batcher.close()
    assert sorted(refused) == [1, 2]


async def test_the_runner_outlives_a_cancelled_scope_for_those_who_clean_up(store):
    """A cancelled program still releases its messages, under a shield; that needs the runner."""
    made = Store()
    made.gate.set()
    results = []
    with anyio.CancelScope() as outer:
        async with DaemonScope("cancelled") as daemons:
            daemons.start_soon(made.batcher.run, stop=made.batcher.stop)
            outer.cancel()
            try:
                await anyio.sleep_forever()
            finally:
                with anyio.CancelScope(shield=True, deadline=anyio.current_time() + 5):
                    results.append(await made.batcher.call(Add(1)))
                    await made.batcher.close()
    assert results == [2]


async def test_the_runner_outlives_a_native_cancellation_of_its_task(store, anyio_backend_name, resumes):
    if anyio_backend_name == "trio":
        return  # it has no cancellation but that of scopes
    (runner,) = [task for task in asyncio.all_tasks() if task.get_name() == "runner"]
    results: list[object] = []

    async def call(number: int) -> None:
        try:
            results.append(await store.batcher.call(Add(number)))
        except MailboxConnectionError as error:
            results.append(error)

    await anyio.wait_all_tasks_blocked()
    for _ in range(2):
        runner.cancel()
        runner.cancel()
        await asyncio.sleep(0)
    async with anyio.create_task_group() as tasks:
        for number in range(3):  # several, so that the runner executes them
            tasks.start_soon(call, number)
        await store.out.wait()
        await asyncio.sleep(0)
        runner.cancel()
        await anyio.wait_all_tasks_blocked()
        store.gate.set()
    if resumes:
        assert sorted(results) == [1, 2, 3]
    else:
        assert [type(result) for result in results[-2:]] == [MailboxConnectionError] * 2
    assert await store.batcher.call(Add(4)) == 5
    assert not runner.done()
    assert runner.cancelling() == 0


@pytest.mark.parametrize("resumes", [False])
async def test_what_the_driver_cancels_itself_is_a_lost_connection(store, anyio_backend_name):
    if anyio_backend_name == "trio":
        return
    store.gate.set()
    gate = store.gate
    future = asyncio.get_running_loop().create_future()
    future.cancel()

    class Broken:
        async def wait(self) -> None:
            await future

    store.gate = Broken()
    with pytest.raises(MailboxConnectionError, match="a spurious cancellation"):
        await store.batcher.call(Add(1))
    store.gate = gate
    assert await store.batcher.call(Add(2)) == 3


@pytest.mark.parametrize("resumes", [False])
async def test_the_caller_who_is_first_goes_on_before_the_others(store, anyio_backend, anyio_backend_name):
    """A claim has its messages when those look for more whose settlements have travelled with it."""
    if anyio_backend_name == "trio":
        pytest.skip("trio lets tasks that are woken together go on in any order")
    went_on: list[int] = []

    async def caller(number: int, kind: type[Add]) -> None:
        await store.batcher.call(kind(number))
        went_on.append(number)

    store.gate.set()
    async with anyio.create_task_group() as tasks:
        for number in range(5):
            tasks.start_soon(caller, number, Urgent if number == 4 else Add)
    assert store.batches == [[0, 1, 2, 3, 4]]
    assert went_on == [4, 0, 1, 2, 3]


@pytest.mark.parametrize("resumes", [True])
async def test_a_command_that_is_first_leaves_at_once_and_takes_along_what_is_queued(store, anyio_backend_name):
    """A claim is on its way, with the settlements of the messages before, when the handlers begin what was claimed last."""
    if anyio_backend_name == "trio":
        pytest.skip("trio lets tasks that are woken together go on in any order")
    went_on: list[int] = []

    async def claim_twice() -> None:
        await store.batcher.call(Urgent(1))
        went_on.append(len(store.batches))
        await store.batcher.call(Urgent(4))

    async def settle(number: int) -> None:
        await store.batcher.call(Ending(number))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(claim_twice)
        await store.out.wait()
        for number in (2, 3):
            tasks.start_soon(settle, number)
        await anyio.wait_all_tasks_blocked()
        store.gate.set()
    assert store.batches == [[1], [2, 3, 4]]
    assert store.executed_by[0] == store.executed_by[1]
    assert went_on == [1]


async def test_queued_commands_with_one_that_is_first_wait_for_no_turn(store, anyio_backend_name):
    if anyio_backend_name == "trio":
        pytest.skip("trio lets tasks that are woken together go on in any order")

    async def call(command: Add) -> None:
        await store.batcher.call(command)

    async def call_twice() -> None:
        await store.batcher.call(Add(2))
        await store.batcher.call(Add(6))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(call, Add(1))
        await store.out.wait()
        tasks.start_soon(call_twice)
        tasks.start_soon(call, Add(3))
        await anyio.wait_all_tasks_blocked()
        gate, store.gate = store.gate, anyio.Event()
        gate.set()
        await anyio.wait_all_tasks_blocked()
        assert store.batches[1:] == [[2, 3]]
        for command in (Ending(4), Urgent(5)):
            tasks.start_soon(call, command)
        await anyio.wait_all_tasks_blocked()
        store.gate.set()
    assert store.batches[2:] == [[4, 5], [6]]


@pytest.mark.parametrize("resumes", [True])
async def test_what_a_command_takes_along_goes_on_if_its_caller_is_cancelled(store):
    results: list[int] = []

    async def claim_twice() -> None:
        await store.batcher.call(Urgent(1))
        await store.batcher.call(Urgent(4))

    async def settle(number: int) -> None:
        results.append(await store.batcher.call(Ending(number)))

    async with anyio.create_task_group() as tasks:
        async with anyio.create_task_group() as claims:
            claims.start_soon(claim_twice)
            await store.out.wait()
            for number in (2, 3):
                tasks.start_soon(settle, number)
            await anyio.wait_all_tasks_blocked()
            gate, store.gate = store.gate, anyio.Event()
            gate.set()
            await anyio.wait_all_tasks_blocked()
            claims.cancel_scope.cancel()
        store.gate.set()
    assert sorted(results) == [3, 4]
    await anyio.wait_all_tasks_blocked()
    assert store.undone == [4]


async def test_what_a_command_takes_along_fails_if_neither_its_caller_nor_the_runner_can_go_on(anyio_backend):
    store = Store(resumable=True)
    errors: list[Exception] = []

    async def claim_twice() -> None:
        with suppress(MailboxClosedError):  # trio's runner may be quicker
            await store.batcher.call(Urgent(1))
            await store.batcher.call(Urgent(4))

    async def settle(number: int) -> None:
        try:
            await store.batcher.call(Ending(number))
        except MailboxClosedError as error:
            errors.append(error)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(store.batcher.run)
        async with anyio.create_task_group() as claims:
            claims.start_soon(claim_twice)
            await store.out.wait()
            for number in (2, 3):
                tasks.start_soon(settle, number)
            await anyio.wait_all_tasks_blocked()
            gate, store.gate = store.gate, anyio.Event()
            gate.set()
            await anyio.wait_all_tasks_blocked()
            with anyio.CancelScope() as closing:
                closing.cancel()
                await store.batcher.close()
            await anyio.wait_all_tasks_blocked()
            claims.cancel_scope.cancel()
        with anyio.fail_after(1):
            while len(errors) < 2:
                await anyio.lowlevel.checkpoint()
    assert [str(error) for error in errors] == ["the store was closed while the operation was out"] * 2


async def test_a_queued_command_whose_caller_is_cancelled_leaves_nothing_behind(store):
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(store.batcher.call, Add(1))
        await store.out.wait()
        async with anyio.create_task_group() as cancelled:
            cancelled.start_soon(store.batcher.call, Urgent(2))
            await anyio.wait_all_tasks_blocked()
            assert store.batcher.queued == 1
            cancelled.cancel_scope.cancel()
        assert store.batcher.queued == 0
        store.gate.set()
    assert await store.batcher.call(Add(3)) == 4
    assert store.batches == [[1], [3]]


def test_claims_are_first_on_every_backend_that_batches():
    """Else the slots whose acknowledgements travelled with a claim would find nothing, and fall idle at every message."""
    pytest.importorskip("apsw", reason="apsw is not installed")
    pytest.importorskip("hiredis", reason="the extra 'redis' is not installed")
    from mainspring.mailbox import batched
    from mainspring.mailbox.redis.commands import RedisClaim

    for claim in (batched.Claim, RedisClaim):
        assert claim.wakes_first
    for acknowledge in (batched.Acknowledge, batched.AcknowledgeMany):
        assert not acknowledge.wakes_first


async def test_what_has_taken_place_keeps_its_result_where_the_rest_of_its_batch_fails(anyio_backend):
    """Also where its caller was cancelled: then it is undone."""
    undone, gone, out = [], anyio.CancelScope(), anyio.Event()

    async def execute(commands):
        out.set()
        await go_on.wait()
        for command in commands:
            if command.number < 3:
                command.result, command.done = command.number, True
        raise MailboxConnectionError("no server")

    batcher = Batcher(execute, undo=lambda command: undone.append(command.number))
    outcomes, go_on = {}, anyio.Event()

    async def call(number):
        try:
            outcomes[number] = await batcher.call(Add(number))
        except MailboxConnectionError as error:
            outcomes[number] = str(error)

    async def cancelled(number):
        with gone:
            await batcher.call(Add(number))

    async with DaemonScope("test") as daemons:
        daemons.start_soon(batcher.run, stop=batcher.stop)
        await anyio.wait_all_tasks_blocked()  # else it may find one of the three before the others have come
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(cancelled, 1)
            for number in (2, 3):
                tasks.start_soon(call, number)
            await out.wait()
            gone.cancel()
            go_on.set()
        await batcher.close()
    assert outcomes == {2: 2, 3: "no server"}
    assert undone == [1]
