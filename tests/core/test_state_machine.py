"""The transition tables, as written down, and the one machine that runs them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mainspring.core.state_machine import (
    GROUP,
    MAILBOX,
    SERVICE,
    GroupState,
    MailboxState,
    ServiceState,
    StateMachine,
    Transition,
)
from mainspring.errors import InvalidTransitionError

SERVICE_MOVES = """
    initializing: starting restarting stopping
    starting: running restarting stopping
    running: degraded stopping restarting
    degraded: running stopping restarting
    restarting: starting stopping
    stopping: stopped
    stopped:
"""


def test_the_table_of_services_is_the_documented_one():
    lines = [line.strip().partition(":") for line in SERVICE_MOVES.strip().splitlines()]
    assert {state: set(moves.split()) for state, _, moves in lines} == {
        str(state): {str(move) for move in moves} for state, moves in SERVICE.items()
    }


@pytest.mark.parametrize(("table", "states"), [(MAILBOX, MailboxState), (SERVICE, ServiceState), (GROUP, GroupState)])
def test_every_state_has_a_row_and_none_leads_to_itself(table, states):
    assert set(table) == set(states)
    assert all(state not in moves for state, moves in table.items())


@pytest.mark.parametrize(
    ("table", "first"),
    [(MAILBOX, MailboxState.UNOPENED), (SERVICE, ServiceState.INITIALIZING), (GROUP, GroupState.IDLE)],
)
def test_every_state_can_be_reached(table, first):
    reached, frontier = {first}, [first]
    while frontier:
        for move in table[frontier.pop()] - reached:
            reached.add(move)
            frontier.append(move)
    assert reached == set(table)


@pytest.mark.parametrize("state", [s for s in GroupState if s is not GroupState.STOPPED])
def test_a_shutdown_can_end_from_every_state_but_idle_and_never_goes_back(state):
    later = list(GroupState)[list(GroupState).index(state) + 1 :]
    assert GROUP[state] <= set(later)
    assert GroupState.STOPPED in GROUP[state] or state is GroupState.IDLE


@given(st.data())
def test_the_machine_moves_exactly_where_its_table_allows(data):
    told: list[Transition[ServiceState]] = []
    machine = StateMachine(SERVICE, ServiceState.INITIALIZING, now=0.0, on_transition=told.append)
    now, moves = 0.0, 0
    for new in data.draw(st.lists(st.sampled_from(ServiceState), max_size=30)):
        old, since = machine.state, machine.since
        now += data.draw(st.floats(0, 1_000))
        if new in SERVICE[old]:
            assert machine.can(new)
            moves += 1
            assert machine.to(new, now) == Transition(old, new, now, now - since) == told[-1]
            assert (machine.state, machine.since) == (new, now)
        else:
            assert not machine.can(new)
            with pytest.raises(InvalidTransitionError):
                machine.to(new, now)
            assert (machine.state, machine.since) == (old, since)
    assert len(told) == moves


def test_a_refusal_says_what_would_be_allowed():
    machine = StateMachine(SERVICE, ServiceState.RUNNING, name="loop jobs")
    with pytest.raises(InvalidTransitionError) as caught:
        machine.to(ServiceState.INITIALIZING, 1.0)
    assert str(caught.value) == (
        "loop jobs: running -> initializing is not allowed (allowed: degraded, restarting, stopping)"
    )
    with pytest.raises(InvalidTransitionError, match=r"ServiceState: stopped -> running .*\(allowed: nothing\)"):
        StateMachine(SERVICE, ServiceState.STOPPED).to(ServiceState.RUNNING, 1.0)


def test_the_state_has_changed_when_the_listener_is_told():
    seen = []
    machine = StateMachine(
        MAILBOX, MailboxState.UNOPENED, on_transition=lambda move: seen.append((move.new, machine.state))
    )
    machine.to(MailboxState.OPEN, 1.0)
    assert seen == [(MailboxState.OPEN, MailboxState.OPEN)]
