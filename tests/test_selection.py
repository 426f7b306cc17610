"""Which tests a quick run, a full one and a test's id choose; and a quick test that takes too long by itself fails."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest_plugins = ("pytester",)
pytestmark = pytest.mark.slow

CONFTEST = """
    import time
    import pytest

    pytest_plugins = ("selection", "own_time")

    def work(seconds):
        end = time.process_time() + seconds
        while time.process_time() < end:
            pass

    @pytest.fixture
    def anyio_backend(request):
        return request.param

    @pytest.fixture(scope="session")
    def shared():
        work(0.4)

    @pytest.fixture
    def own():
        work(0.4)
"""
TESTS = """
    import pytest

    @pytest.mark.anyio
    async def test_plain(anyio_backend): ...

    @pytest.mark.anyio
    @pytest.mark.every_loop
    async def test_every(anyio_backend): ...

    @pytest.mark.anyio
    @pytest.mark.loops("uvloop", "asyncio")
    async def test_some(anyio_backend): ...

    @pytest.mark.anyio
    @pytest.mark.parametrize("anyio_backend", ["trio"])
    async def test_own_choice(anyio_backend): ...

    @pytest.mark.slow
    def test_slow(): ...
"""
QUICK = {"test_plain[asyncio]", "test_every[asyncio]", "test_every[uvloop]", "test_every[trio]", "test_some[uvloop]",
         "test_own_choice[trio]"}  # fmt: skip
FULL = QUICK | {"test_plain[uvloop]", "test_plain[trio]", "test_some[asyncio]", "test_slow"}


@pytest.fixture
def suite(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A suite with the plugins of this one."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(test_it=TESTS)
    return pytester


def run(suite: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    return suite.runpytest_subprocess("-p", "no:randomly", "-p", "no:cacheprovider", *arguments)


@pytest.mark.parametrize(
    ("arguments", "chosen"),
    [
        ((), QUICK),
        (("--full",), FULL),
        (("test_it.py::test_plain[trio]",), {"test_plain[trio]"}),
        (("test_it.py::test_slow",), {"test_slow"}),
    ],
    ids=["quick", "full", "an event loop by id", "a slow test by id"],
)
def test_what_is_chosen(suite: pytest.Pytester, arguments: tuple[str, ...], chosen: set[str]) -> None:
    done = run(suite, "--collect-only", "-q", *arguments)
    assert {line.partition("::")[2] for line in done.outlines if "::" in line} == chosen


@pytest.mark.parametrize("processes", [(), ("-n", "1")], ids=["one process", "xdist"])
def test_a_quick_test_above_the_limit_fails_and_is_listed(suite: pytest.Pytester, processes: tuple[str, ...]) -> None:
    more = "import pytest\n@pytest.mark.own_time(9)\ndef test_d(own): ...\n"
    suite.makepyfile(test_it="def test_a(shared): ...\ndef test_b(own): ...\ndef test_c(): ...\n", test_more=more)
    suite.makeini("[pytest]\nown_time_limit = 0.3\nown_time_load = 1000\n")
    done = run(suite, *processes)
    done.assert_outcomes(passed=3, failed=1)
    done.stdout.fnmatch_lines(["took 0.* s by itself (*; the quick run allows 0.3 s: *"])
    listed = [line.split()[-1] for line in done.outlines if line.startswith(" ") and "test_it.py::" in line]
    assert listed == ["test_it.py::test_b"]
    run(suite, "--full", *processes).assert_outcomes(passed=4)
    run(suite, "-o", "own_time_load=-1", *processes).assert_outcomes(passed=4)
