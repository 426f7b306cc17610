"""The pytest plugin: the fixtures ``virtual_clock`` and ``mainspring_seed``, and the option ``--mainspring-seed``.

An async test requests the clock::

    async def test_backs_off(virtual_clock):
        await anyio.sleep(3600)
        assert virtual_clock.now == 3600

It runs in virtual time, through anyio's pytest plugin: once on trio, or on each event loop that the setting
``virtual_clock_backends`` names. ``@pytest.mark.parametrize("anyio_backend", ["asyncio", "trio"])`` on a test, a class or a
module chooses for its tests. It needs no marker and no fixture ``anyio_backend``, and ignores that of other tests. Its async
fixtures run on the same clock and must have function scope. Loading this module imports nothing but pytest.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import wraps
from inspect import iscoroutinefunction
from typing import TYPE_CHECKING, Any
from zlib import crc32

import pytest

if TYPE_CHECKING:
    from collections.abc import Generator

    from mainspring.testing.virtual_time import VirtualClock, VirtualRun

_SEED: pytest.StashKey[int] = pytest.StashKey()
_RUN: pytest.StashKey[VirtualRun] = pytest.StashKey()
_CHOSEN: pytest.StashKey[Any] = pytest.StashKey()
_BACKENDS = ("trio", "asyncio")
_CLEAN_UP: pytest.StashKey[ExitStack] = pytest.StashKey()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--mainspring-seed`` and the setting ``virtual_clock_backends``."""
    parser.addini(
        "virtual_clock_backends",
        "Event loops on which each test with virtual_clock runs: trio, asyncio, or both.",
        type="args",
        default=["trio"],
    )
    parser.getgroup("mainspring").addoption(
        "--mainspring-seed",
        metavar="N",
        help="Seed of the tests in virtual time: a number for all of them, or `random` for a new one each time."
        " By default each test has a fixed seed of its own.",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Refuse an invalid seed, and an event loop without virtual time."""
    backends = config.getini("virtual_clock_backends")
    if not backends or not set(backends) <= set(_BACKENDS):
        raise pytest.UsageError(f"virtual_clock_backends takes trio, asyncio, or both, not {' '.join(backends)!r}")
    chosen = config.getoption("--mainspring-seed")
    if chosen not in (None, "random") and not chosen.isdecimal():
        raise pytest.UsageError(f"--mainspring-seed takes a whole number from 0, or `random`, not {chosen!r}")


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give a test with ``virtual_clock`` its backends, by a mark, which overrides any fixture of that name."""
    if "virtual_clock" not in metafunc.fixturenames or _names_backends(metafunc.definition):
        return
    backends = metafunc.config.getini("virtual_clock_backends")
    chosen = [pytest.param(name, id=f"virtual-{name}" if len(backends) > 1 else "virtual") for name in backends]
    metafunc.definition.add_marker(pytest.mark.parametrize("anyio_backend", chosen, scope="function"))


def _names_backends(definition: pytest.Item) -> bool:
    """True if a mark of the user's says on which event loops a test runs."""
    for mark in definition.iter_markers("parametrize"):
        names = mark.args[0] if mark.args else mark.kwargs.get("argnames", ())
        if "anyio_backend" in (names.replace(",", " ").split() if isinstance(names, str) else names):
            return True
    return False


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Choose the seed, make the clock, and seed the schedule and Mainspring's randomness, before any fixture."""
    names = getattr(item, "fixturenames", ())
    if "mainspring_seed" not in names:
        return
    item.stash[_SEED] = seed = _seed_of(item)
    if "virtual_clock" not in names:
        return
    if not iscoroutinefunction(getattr(item, "obj", None)):
        raise pytest.UsageError(f"{item.nodeid}: virtual_clock is for `async def` tests; a plain one calls run_virtual")
    from mainspring.core import random
    from mainspring.testing.virtual_time import VirtualRun

    backend, options = _backend_of(item)
    run = VirtualRun(seed, backend)
    item.callspec.params["anyio_backend"] = (backend, {**options, **run.options})  # type: ignore[attr-defined]
    item.stash[_RUN] = run
    item.stash[_CLEAN_UP] = clean_up = ExitStack()
    clean_up.enter_context(run.seeded())
    clean_up.enter_context(random.seeded(seed))


def _backend_of(item: pytest.Item) -> tuple[str, dict[str, Any]]:
    """Return the event loop of a test and its options, as a user gives them: a name, or a pair."""
    chosen = item.stash.setdefault(_CHOSEN, item.callspec.params["anyio_backend"])  # type: ignore[attr-defined]
    backend, options = (chosen, {}) if isinstance(chosen, str) else chosen
    if (
        backend not in _BACKENDS
        or options.get("use_uvloop")
        or not options.keys().isdisjoint(("clock", "loop_factory"))
    ):
        raise pytest.UsageError(
            f"{item.nodeid}: a test with virtual_clock runs on trio or on asyncio's own event loop, not on {chosen!r}"
        )
    return backend, options


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, None, None]:
    """Restore the schedule and the randomness, after all fixtures."""
    try:
        return (yield)
    finally:
        clean_up = item.stash.get(_CLEAN_UP, None)
        if clean_up is not None:
            del item.stash[_CLEAN_UP], item.stash[_RUN]
            clean_up.close()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """Run the test under the judge of deadlocks, outside anyio's own hook."""
    run = pyfuncitem.stash.get(_RUN, None)
    if run is None:
        return (yield)
    test = pyfuncitem.obj
    if not iscoroutinefunction(test):
        raise pytest.UsageError(
            f"{pyfuncitem.nodeid}: another plugin runs this async test on its own event loop, as pytest-asyncio does in its"
            " auto mode; set asyncio_mode = strict, or call run_virtual in a plain test"
        )

    @wraps(test)
    async def watched(*args: Any, **keywords: Any) -> Any:
        return await run.watch(test, *args, **keywords)

    pyfuncitem.obj = watched
    try:
        return (yield)
    finally:
        pyfuncitem.obj = test


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the seed that repeats a failed test to its report."""
    report = yield
    seed = item.stash.get(_SEED, None)
    if report.failed and seed is not None:
        report.sections.append(("mainspring", f"to run it the same way again: --mainspring-seed={seed}"))
    return report


@pytest.fixture
def mainspring_seed(request: pytest.FixtureRequest) -> int:
    """Return the seed of this test, for ``run_virtual(fn, seed=mainspring_seed)``. It is printed if the test fails.

    It is ``--mainspring-seed``, or else a number derived from the test's name, equal in each run.
    """
    seed: int = request.node.stash[_SEED]
    return seed


@pytest.fixture
def virtual_clock(request: pytest.FixtureRequest, anyio_backend: object, mainspring_seed: int) -> VirtualClock:
    """Run this async test in virtual time, reproducibly: ``.now``, ``.advance(seconds)``, ``.hold()``."""
    run: VirtualRun = request.node.stash[_RUN]
    return run.clock


def _seed_of(item: pytest.Item) -> int:
    chosen = item.config.getoption("--mainspring-seed")
    if chosen is None:
        return crc32(item.nodeid.encode())
    if chosen == "random":
        from mainspring.core.random import rng

        return rng().getrandbits(32)
    return int(chosen)
