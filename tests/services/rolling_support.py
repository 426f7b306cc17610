"""What tests of replacement under load share: which replicas ran when, and which messages each had completed by then."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mainspring.core.state_machine import ServiceState
from mainspring.events import ServiceProcessStarted, ServiceStateChanged

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from mainspring import Dispatcher

Completed = tuple[int, str]
"""A completed message: the replica that did it, and the body."""


@dataclass(frozen=True)
class Outage:
    """A replica left Running, and was Running again. ``began``, ``ended``: how many messages were completed by then."""

    replica: int
    began: int
    ended: int


@dataclass
class Rollout:
    """Follows the replicas of one service. ``completed()`` returns all messages that were completed so far, in order."""

    service: str
    completed: Callable[[], Sequence[Completed]]
    outages: list[Outage] = field(default_factory=list)
    most_away: int = 0
    """How many replicas were away from Running at one instant, at most, after all had run."""
    pids: dict[int, list[int]] = field(default_factory=dict)
    _began: dict[int, int] = field(default_factory=dict)

    @contextmanager
    def following(self, dispatcher: Dispatcher) -> Iterator[None]:
        """Follow while the block runs: from before the first start until all are replaced."""
        ends = (
            dispatcher.subscribe(ServiceStateChanged, self._note),
            dispatcher.subscribe(ServiceProcessStarted, self._note_pid),
        )
        yield
        for end in ends:
            end()

    def _note(self, event: ServiceStateChanged) -> None:
        if event.service != self.service:
            return
        if event.old is ServiceState.RUNNING:
            self._began[event.replica] = len(self.completed())
            self.most_away = max(self.most_away, len(self._began))
        if event.new is ServiceState.RUNNING and event.replica in self._began:
            self.outages.append(Outage(event.replica, self._began.pop(event.replica), len(self.completed())))

    def _note_pid(self, event: ServiceProcessStarted) -> None:
        if event.service == self.service:
            self.pids.setdefault(event.replica, []).append(event.pid)

    def check(self, replicas: int) -> None:
        """Each replica was replaced once, one after the other, and others completed messages all the while."""
        assert [outage.replica for outage in self.outages] == list(range(1, replicas + 1))
        assert self.most_away == 1
        self.check_throughput()
        for replica in range(1, replicas + 1):
            first, second = self.pids[replica]
            assert first != second

    def check_throughput(self) -> None:
        """While a replica was away, others completed messages."""
        completed = self.completed()
        for outage in self.outages:
            others = [replica for replica, _ in completed[outage.began : outage.ended] if replica != outage.replica]
            assert others, f"no message was completed while replica {outage.replica} was away"
