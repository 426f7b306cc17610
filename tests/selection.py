"""Which tests run: without options the quick ones, each on one event loop; with ``--full`` all, on each of their event loops.

An async test runs on asyncio, uvloop and trio. ``@pytest.mark.loops("asyncio", "uvloop")`` names the event loops of one that
cannot run on all. The quick run takes the first of them; with ``@pytest.mark.every_loop``, for code that differs between event
loops, it takes them all. It leaves out what is marked ``slow``. A test that is named by its id runs as with ``--full``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import hypothesis

from loops import LOOPS

if TYPE_CHECKING:
    import pytest

MARKS = (
    "loops(name, ...): the event loops of an async test; the quick run takes the first",
    "every_loop: the quick run takes each event loop of this test",
    "slow: the quick run leaves this test out",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--full``."""
    parser.addoption("--full", action="store_true", help="run slow tests too, and async tests on each event loop")


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marks, and choose the examples of Hypothesis: the same ones in each quick run."""
    for mark in MARKS:
        config.addinivalue_line("markers", mark)
    # How fast the machine is says nothing about the code: by default each example has 200 ms, and drawing must not be slow.
    any_speed: dict[str, Any] = {"deadline": None, "suppress_health_check": [hypothesis.HealthCheck.too_slow]}
    hypothesis.settings.register_profile("full", **any_speed)
    hypothesis.settings.register_profile("quick", **any_speed, derandomize=True, max_examples=50)
    hypothesis.settings.load_profile("full" if is_full(config) else "quick")


def is_full(config: pytest.Config) -> bool:
    """True if every test runs on each of its event loops."""
    return bool(config.getoption("full")) or any("::" in argument for argument in config.args)


def pytest_report_header(config: pytest.Config) -> str | None:
    """Say what is left out."""
    return None if is_full(config) else "quick run: no slow tests, one event loop; --full runs all"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Choose the event loops of an async test, unless it or its module chooses them."""
    if "anyio_backend" not in metafunc.fixturenames or _has_own_loops(metafunc):
        return
    mark = metafunc.definition.get_closest_marker("loops")
    names = list(mark.args if mark else LOOPS)
    if not is_full(metafunc.config) and metafunc.definition.get_closest_marker("every_loop") is None:
        del names[1:]
    metafunc.parametrize("anyio_backend", [LOOPS[name] for name in names], ids=names)


def _has_own_loops(metafunc: pytest.Metafunc) -> bool:
    for mark in metafunc.definition.iter_markers("parametrize"):
        names = mark.args[0] if mark.args else mark.kwargs["argnames"]
        if "anyio_backend" in (names.replace(",", " ").split() if isinstance(names, str) else names):
            return True
    return hasattr(metafunc.module, "anyio_backend")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out slow tests."""
    if is_full(config):
        return
    left_out = [item for item in items if item.get_closest_marker("slow")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("slow")]
