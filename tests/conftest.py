"""The three event loops that everything runs on, the end of tests that hang, and which tests stay in one process."""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest

from contract_summary import judged, pytest_terminal_summary  # noqa: F401 - a fixture and a hook
from servers import nats_url, postgres_url, redis_url  # noqa: F401 - fixtures
from stores import store, store_schema  # noqa: F401 - fixtures

if TYPE_CHECKING:
    from collections.abc import Iterator

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell that runs the tests in the background lets them ignore it, and Python then makes no KeyboardInterrupt of it.
    signal.signal(signal.SIGINT, signal.default_int_handler)

# How fast the machine is says nothing about the code: by default each example has 200 ms, and drawing them must not be slow.
hypothesis.settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("any machine")

_stderr = open(os.dup(2), "w")  # noqa: SIM115 - for as long as the tests run; pytest captures the other one

TOGETHER = ("test_shutdown_processes.py",)
"""Files of which one process has all tests: whoever has one of them does the work of all."""

BACKENDS = [
    pytest.param(("asyncio", {"use_uvloop": False}), id="asyncio"),
    pytest.param(("asyncio", {"use_uvloop": True}), id="uvloop"),
    pytest.param(("trio", {}), id="trio"),
]


@pytest.fixture(params=BACKENDS)
def anyio_backend(request: pytest.FixtureRequest) -> object:
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


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object:
    """Whoever is free gets the next test, or the next file of those that stay together, the biggest first.

    Not by marks and ``--dist loadgroup``: pytest-xdist 3.8 writes the group into what pytest 9.2 does not look at any more, and
    says nothing.
    """
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return file if file.endswith(TOGETHER) else nodeid

    return Scheduling(config, log)
