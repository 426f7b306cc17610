"""The limits of the in-memory queue under any sequence of calls: claims keep them, and no message is lost."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis.stateful import invariant

from limits_machine import AliasMachine, LimitsMachine
from mainspring.mailbox.memory.queue import MemoryQueue

pytestmark = pytest.mark.slow


class MemoryLimitsMachine(LimitsMachine):
    """The machine, on the queue in memory."""

    def new_queue(self) -> MemoryQueue:
        return MemoryQueue()

    @invariant()
    def permits_are_those_of_messages(self) -> None:
        for state in self.queue.limits.states(0):
            assert state.running >= 0
            assert state.waiting >= 0
        for task in self.queue.limits.tasks.values():
            for queue in (task.own, *task.keys.values()):
                assert 0 <= queue.unclaimed <= queue.used


TestLimits = MemoryLimitsMachine.TestCase
TestLimits.settings = settings(max_examples=300, stateful_step_count=60, deadline=None)


class MemoryAliasMachine(AliasMachine):
    """The machine of aliases, on the in-memory queue."""

    def new_queue(self) -> MemoryQueue:
        return MemoryQueue()


TestAliases = MemoryAliasMachine.TestCase
TestAliases.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
