"""Chaos in its short form: seconds of real workers and senders on a real server, all of which are killed, frozen and cut off.

The long form is `make chaos`; docs/reliability.md says what it tries.
"""

from __future__ import annotations

from functools import partial

import anyio
import pytest
from chaos_backends import BACKENDS
from chaos_plan import CONCURRENCY, KEY_CONCURRENCY, SCHEDULES, Kind
from chaos_run import one, short

pytestmark = pytest.mark.slow

MESSAGES = 1_000
SEED = 1


@pytest.mark.parametrize("name", BACKENDS)
def test_chaos_breaks_no_promise(name, tmp_path):
    backend = BACKENDS[name]
    outcome = anyio.run(partial(one, backend, short(MESSAGES, SEED), tmp_path))
    again = f"python tests/chaos --short --keep --backends {name} --messages {MESSAGES} --seed {SEED}"
    assert outcome.verdict.broken == [], f"to run it again: {again}"
    assert len(outcome.history.accepted) == MESSAGES
    for kind in backend.kinds:
        assert outcome.faults[kind] > 0 or kind is Kind.SENDER, f"no {kind}: it shows nothing"
    assert outcome.verdict.again.total() > 0, "no fault hit a handler: it shows nothing"
    assert all(len(list(outcome.history.due[each.name].ticks)) > 1 for each in SCHEDULES), "they hardly ticked"
    if backend.limits:
        tried = outcome.verdict.at_once
        assert (tried["a task"], tried["a key"]) == (CONCURRENCY, KEY_CONCURRENCY), "no call waited for a limit"
