"""The state, the restarts and the times of one supervised thing: a loop of a group, or a replica of a service."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio

from mainspring.core import random
from mainspring.core.state_machine import SERVICE, ServiceState, StateMachine, Transition
from mainspring.services.restarts import Escalate, RestartCounts, RestartType, StartAgain, after_end

if TYPE_CHECKING:
    from collections.abc import Callable, Container

    from mainspring.policies import RestartPolicy
    from mainspring.services.restarts import RestartDecision, RunEnd


class Life:
    """Moves through the states of a service, and counts restarts. It runs nothing itself.

    ``policy``: None means that it is never restarted. ``on_transition`` is called at each change of state.
    """

    def __init__(
        self,
        name: str,
        *,
        policy: RestartPolicy | None,
        on_transition: Callable[[Transition[ServiceState]], object],
        restart: RestartType = RestartType.PERMANENT,
        start_tries: int | None = None,
        never_after: Container[int] = (),
    ) -> None:
        self.total_restarts = 0
        """How often it was started again, in all."""
        self.counts = RestartCounts()
        self._policy = policy
        self._restart = restart
        self._start_tries = start_tries
        self._never_after = never_after
        self._up_since: float | None = None
        self._on_transition = on_transition
        self._machine: StateMachine[ServiceState] = StateMachine(
            SERVICE, ServiceState.INITIALIZING, name=name, now=anyio.current_time(), on_transition=self._moved
        )

    @property
    def state(self) -> ServiceState:
        """The present state."""
        return self._machine.state

    @property
    def since(self) -> float:
        """The instant since which it is in that state."""
        return self._machine.since

    def uptime(self, now: float) -> float:
        """Return the seconds since its present run became ready; 0 while it is not."""
        return 0.0 if self._up_since is None else now - self._up_since

    def can(self, new: ServiceState) -> bool:
        """Return True if the table allows the move."""
        return self._machine.can(new)

    def to(self, new: ServiceState) -> None:
        """Move to ``new``.

        :raises InvalidTransitionError: the table does not allow it.
        """
        self._machine.to(new, anyio.current_time())

    def after(self, ended: RunEnd) -> RestartDecision:
        """Decide what follows the end of a run that was not told to end, and count it."""
        if self._policy is None:
            return Escalate("it is not to be restarted")
        decision = after_end(
            ended,
            self.counts,
            policy=self._policy,
            rng=random.rng(),
            restart=self._restart,
            start_tries=self._start_tries,
            never_after=self._never_after,
        )
        if isinstance(decision, StartAgain):
            self.counts = decision.counts
            self.total_restarts += 1
        return decision

    def _moved(self, transition: Transition[ServiceState]) -> None:
        if transition.old is ServiceState.STARTING and transition.new is ServiceState.RUNNING:
            self._up_since = transition.at
            self.counts = self.counts._replace(start_failures=0)
        elif transition.new in (ServiceState.RESTARTING, ServiceState.STOPPED):
            self._up_since = None
        self._on_transition(transition)
