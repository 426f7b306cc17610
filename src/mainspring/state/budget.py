"""``Budget``, what work may cost, and ``BudgetTracker``, which adds up what it has cost, over retries and restarts too."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from decimal import Context, Decimal, InvalidOperation
from typing import Any

from mainspring.core.process import identity, shared
from mainspring.errors import BudgetExceededError, InvalidParameterError, UnknownVersionError
from mainspring.runtime.deadline import Deadline
from mainspring.validation import is_whole

VERSION = 1
"""Of the JSON that a tracker's state is."""

DIGITS = 100
"""To how many of them costs are added up exactly."""

_LIMITS = {
    "max_total_tokens": "total_tokens",
    "max_input_tokens": "input_tokens",
    "max_output_tokens": "output_tokens",
    "max_cost": "cost",
}


@dataclass(frozen=True, slots=True, init=False)
class Budget:
    """The limits of a piece of work; None is no limit. What is exactly at its limit is within it.

    :param deadline: a :class:`Deadline`, or an aware datetime.
    :param max_total_tokens: input and output together.
    :param max_cost: in whatever unit the work is charged in. It is kept as a ``Decimal``, so that sums are exact. An int or a
        float becomes one; a float is taken for what it is printed as (0.1 means one tenth).
    :raises InvalidParameterError: a limit is negative, no number, or a deadline that no :class:`Deadline` can be.
    """

    deadline: Deadline | None
    max_total_tokens: int | None
    max_input_tokens: int | None
    max_output_tokens: int | None
    max_cost: Decimal | None

    def __init__(
        self,
        deadline: Deadline | datetime | None = None,
        max_total_tokens: int | None = None,
        max_input_tokens: int | None = None,
        max_output_tokens: int | None = None,
        max_cost: Decimal | float | None = None,
    ) -> None:
        if isinstance(deadline, datetime):
            deadline = Deadline(deadline)
        elif deadline is not None and not isinstance(deadline, Deadline):
            raise InvalidParameterError(f"Budget: deadline must be a Deadline or an aware datetime, not {deadline!r}")
        tokens = {
            "max_total_tokens": max_total_tokens,
            "max_input_tokens": max_input_tokens,
            "max_output_tokens": max_output_tokens,
        }
        for name, value in tokens.items():
            if value is not None and not is_whole(value, 0):
                raise InvalidParameterError(f"Budget: {name} must be a whole number from 0, or None, not {value!r}")
        cost = None if max_cost is None else _exact("Budget: max_cost", max_cost)
        for name, limit in {"deadline": deadline, **tokens, "max_cost": cost}.items():
            object.__setattr__(self, name, limit)


@dataclass(frozen=True, slots=True)
class Usage:
    """What was used: tokens, and the cost, which is exact."""

    input_tokens: int = 0
    output_tokens: int = 0
    total_tokens: int = 0
    cost: Decimal = Decimal(0)

    def plus(self, other: Usage) -> Usage:
        """Return both together."""
        return Usage(
            self.input_tokens + other.input_tokens,
            self.output_tokens + other.output_tokens,
            self.total_tokens + other.total_tokens,
            Context(prec=DIGITS).add(self.cost, other.cost),  # not rounded by whatever context the caller has
        )


class BudgetTracker:
    """Adds up what a piece of work uses, and raises when that is more than its budget.

    ``state`` is plain JSON data: ``await ctx.checkpoint({"budget": tracker.state})``, and in a later delivery
    ``BudgetTracker(budget, ctx.restored["budget"])``, which goes on counting where that was. Callable from any thread.

    :param state: of an earlier tracker, or None to begin at nothing.
    :raises InvalidParameterError: it is no such state.
    :raises UnknownVersionError: it is of a newer version.
    """

    def __init__(self, budget: Budget, state: Mapping[str, Any] | None = None) -> None:
        if not isinstance(budget, Budget):
            raise InvalidParameterError(f"BudgetTracker: a Budget is needed, not {budget!r}")
        self.budget = budget
        self._belong_here()
        self._used = Usage() if state is None else _restored(state)

    def __repr__(self) -> str:
        return f"<BudgetTracker {self._used} of {self.budget}>"

    @property
    def used(self) -> Usage:
        """The sum of all that was added, before a restart too."""
        return self._used

    @property
    def state(self) -> dict[str, Any]:
        """The state from which ``BudgetTracker(budget, state)`` goes on."""
        used = self._used
        return {
            "version": VERSION,
            "input_tokens": used.input_tokens,
            "output_tokens": used.output_tokens,
            "total_tokens": used.total_tokens,
            "cost": str(used.cost),
        }

    def add(
        self,
        *,
        input_tokens: int = 0,
        output_tokens: int = 0,
        total_tokens: int | None = None,
        cost: Decimal | float = 0,
    ) -> Usage:
        """Count what one call has used. Return all that was used so far.

        :param total_tokens: where it is not the sum of the two: some models count more.
        :raises BudgetExceededError: it is more than the budget allows. It is counted nevertheless: it was used.
        :raises InvalidParameterError: a figure is negative or no number; nothing is counted.
        """
        given = {"input_tokens": input_tokens, "output_tokens": output_tokens, "total_tokens": total_tokens}
        for name, value in given.items():
            if not is_whole(value, 0) and not (name == "total_tokens" and value is None):
                raise InvalidParameterError(f"add: {name} must be a whole number from 0, not {value!r}")
        whole = input_tokens + output_tokens if total_tokens is None else total_tokens
        more = Usage(input_tokens, output_tokens, whole, _exact("add: cost", cost))
        if self._process is not identity():
            self._belong_here()
        with self._lock:
            self._used = used = self._used.plus(more)
        self._check(used)
        return used

    def _belong_here(self) -> None:
        # A forked child needs another lock, as a thread of the parent may have held this one; its threads need the same one.
        self._lock = shared("lock", "budgets", threading.Lock)
        self._process = identity()

    def check(self) -> None:
        """Raise if the budget is exceeded, its deadline included. Call it before the next expensive call.

        :raises BudgetExceededError: it says which limit, and by how much.
        """
        self._check(self._used)

    def remaining(self) -> dict[str, Any]:
        """Return what is left of each limit, by its name: 0 if it is used up, and of the deadline the seconds."""
        left: dict[str, Any] = {}
        if self.budget.deadline is not None:
            left["deadline"] = self.budget.deadline.remaining()
        for limit, name in _LIMITS.items():
            allowed = getattr(self.budget, limit)
            if allowed is not None:
                left[limit] = max(allowed - getattr(self._used, name), type(allowed)(0))
        return left

    def _check(self, used: Usage) -> None:
        for limit, name in _LIMITS.items():
            allowed, spent = getattr(self.budget, limit), getattr(used, name)
            if allowed is not None and spent > allowed:
                over = spent - allowed
                raise BudgetExceededError(
                    f"the budget is exceeded: {limit} allows {allowed:,}, and {spent:,} were used, {over:,} more",
                    limit=limit,
                    allowed=allowed,
                    used=spent,
                    over=over,
                )
        deadline = self.budget.deadline
        if deadline is not None and (late := deadline.overdue()) > 0:
            raise BudgetExceededError(
                f"the budget is exceeded: its deadline {deadline} passed {late:.3f} s ago",
                limit="deadline",
                allowed=deadline.at,
                used=None,
                over=late,
            )


def _exact(what: str, value: Any) -> Decimal:
    if isinstance(value, Decimal | int | float) and not isinstance(value, bool):
        try:
            exact = Decimal(value) if isinstance(value, int) else Decimal(str(value))
        except InvalidOperation:
            exact = Decimal("NaN")
        if exact.is_finite() and exact >= 0:
            return exact
    raise InvalidParameterError(f"{what} must be a number from 0, not {value!r}")


def _restored(state: Any) -> Usage:
    if isinstance(state, Mapping) and is_whole(state.get("version"), VERSION + 1):
        raise UnknownVersionError(
            f"BudgetTracker: the state is of version {state['version']}, and this release knows {VERSION}; upgrade it"
        )
    try:
        tokens = state["input_tokens"], state["output_tokens"], state["total_tokens"]
        cost = Decimal(state["cost"])
        known = state["version"] == VERSION and all(is_whole(value, 0) for value in tokens)
        if known and cost.is_finite() and cost >= 0:
            return Usage(*tokens, cost)
    except (TypeError, KeyError, ValueError, InvalidOperation):
        pass
    raise InvalidParameterError(f"BudgetTracker: this is no state of a tracker: {state!r}")
