"""Fixtures of all tests, what a test may not leave behind, and the end of tests that hang."""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
from typing import TYPE_CHECKING

import pytest

from contract_summary import judged, pytest_terminal_summary  # noqa: F401 - a fixture and a hook
from servers import nats_url, postgres_url, redis_url  # noqa: F401 - fixtures
from stores import store, store_schema  # noqa: F401 - fixtures

if TYPE_CHECKING:
    from collections.abc import Iterator

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell that runs the tests in the background lets them ignore it, and Python then makes no KeyboardInterrupt of it.
    signal.signal(signal.SIGINT, signal.default_int_handler)

_stderr = os.dup(2)  # pytest captures the other one

pytest_plugins = ("selection", "own_time")


@pytest.fixture
def anyio_backend(request: pytest.FixtureRequest) -> object:
    """Return the event loop that :mod:`selection` chose for a test."""
    return request.param


@pytest.fixture(autouse=True)
def signal_handlers() -> Iterator[None]:
    """Fail a test that leaves a signal handler behind, and restore the one before: it would act in the tests that follow."""
    before = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    yield
    left = {signum: now for signum, was in before.items() if (now := signal.getsignal(signum)) is not was}
    for signum in left:
        signal.signal(signum, before[signum])
    assert not left, f"signal handlers are left behind: {left}"


@pytest.fixture(autouse=True)
def own_log_handlers() -> Iterator[None]:
    """Take down what a test has set on the package's logger: a command that runs in this process configures it."""
    logger = logging.getLogger("mainspring")
    handlers, level, propagate = list(logger.handlers), logger.level, logger.propagate
    yield
    logger.handlers[:] = handlers
    logger.setLevel(level)
    logger.propagate = propagate


@pytest.hookimpl(trylast=True)
def pytest_exception_interact(node: pytest.Item | pytest.Collector) -> None:
    """Have a test that has failed end its process if it is not torn down in time either, as pytest stops watching it.

    anyio's runner stands still for ever where what a fixture on trio has opened around its ``yield`` is cancelled or fails.
    """
    faulthandler.dump_traceback_later(float(node.config.getini("faulthandler_timeout")), exit=True, file=_stderr)
