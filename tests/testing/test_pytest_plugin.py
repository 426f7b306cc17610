"""The pytest plugin, in pytest runs of its own, as a user has it."""

from __future__ import annotations

import subprocess
import sys

import anyio
import pytest

pytest_plugins = ["pytester"]


@pytest.fixture(autouse=True)
def strict(pytester: pytest.Pytester) -> None:
    pytester.makeini("[pytest]\nfilterwarnings = error\n")


def run(pytester: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    return pytester.runpytest_subprocess("-p", "no:randomly", "-p", "no:cacheprovider", *arguments)


async def test_here_too(virtual_clock, mainspring_seed) -> None:
    await anyio.sleep(3600)
    assert virtual_clock.now == 3600
    assert isinstance(mainspring_seed, int)


@pytest.mark.slow
def test_an_async_test_needs_nothing_but_the_fixture(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import anyio, pytest

        async def test_plain(virtual_clock):
            await anyio.sleep(3600)
            assert virtual_clock.now == anyio.current_time() == 3600

        @pytest.mark.anyio
        @pytest.mark.parametrize("number", [1, 2])
        async def test_fresh_clock_each_time(virtual_clock, number):
            assert virtual_clock.now == 0
            await anyio.sleep(number)
            await virtual_clock.advance(5)
            with virtual_clock.hold():
                await anyio.to_thread.run_sync(int)
            assert virtual_clock.now == number + 5

        class TestInAClass:
            async def test_method(self, virtual_clock):
                await anyio.sleep(9)

        @pytest.fixture
        async def opened(virtual_clock):
            await anyio.sleep(100)
            yield "opened"
            await anyio.sleep(100)

        async def test_with_an_async_fixture(opened, virtual_clock):
            assert virtual_clock.now == 100

        async def test_through_another_fixture(opened):
            assert anyio.current_time() == 100
        """
    )
    run(pytester).assert_outcomes(passed=6)


@pytest.mark.slow
def test_a_plugin_that_takes_all_async_tests_is_named(pytester: pytest.Pytester) -> None:
    """pytest-asyncio in its auto mode makes a plain function of each, which runs an event loop of its own."""
    pytester.makeconftest(
        """
        import asyncio, functools, pytest

        @pytest.hookimpl(tryfirst=True)
        def pytest_runtest_call(item):
            test = item.obj
            item.obj = functools.wraps(test)(lambda **fixtures: asyncio.run(test(**fixtures)))
        """
    )
    pytester.makepyfile(
        """
        async def test_plain(virtual_clock): ...
        """
    )
    outcome = run(pytester)
    outcome.assert_outcomes(failed=1)
    outcome.stdout.fnmatch_lines(
        ["*another plugin runs this async test*; set asyncio_mode = strict, or call run_virtual*"]
    )


@pytest.mark.slow
@pytest.mark.parametrize("fixture", ["params=['asyncio', 'trio']", ""], ids=["parametrized", "fixed"])
def test_the_users_backends_do_not_matter(pytester: pytest.Pytester, fixture: str) -> None:
    pytester.makeconftest(
        f"""
        import pytest
        @pytest.fixture({fixture})
        def anyio_backend(request):
            return getattr(request, "param", "asyncio")
        """
    )
    pytester.makepyfile(
        """
        import anyio, pytest
        pytestmark = pytest.mark.anyio

        async def test_virtual(virtual_clock):
            await anyio.sleep(3600)

        async def test_other(anyio_backend_name):
            await anyio.sleep(0)
        """
    )
    run(pytester).assert_outcomes(passed=3 if fixture else 2)


@pytest.mark.slow
def test_a_failure_names_its_seed_and_the_seed_repeats_it(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import anyio
        from mainspring.core import random

        async def test_order(virtual_clock, mainspring_seed):
            order = []
            async def work(name):
                await anyio.sleep(0)
                order.append(name)
            async with anyio.create_task_group() as group:
                for name in range(9):
                    group.start_soon(work, name)
            raise AssertionError(f"order {order} {random.token()} seed {mainspring_seed}")

        def test_passes(mainspring_seed):
            pass
        """
    )

    def lines(*arguments: str) -> tuple[str, str]:
        text = run(pytester, *arguments).stdout.str().splitlines()
        order = next(line for line in text if "AssertionError: order" in line and line.startswith("E"))
        (seed,) = {line.rpartition("=")[2] for line in text if "--mainspring-seed=" in line}
        return order, seed

    order, seed = lines()
    assert lines() == (order, seed)
    assert lines(f"--mainspring-seed={seed}") == (order, seed)
    assert lines("--mainspring-seed=7")[1] == "7"
    assert lines("--mainspring-seed=7")[0] != order
    random_order, random_seed = lines("--mainspring-seed=random")
    assert lines(f"--mainspring-seed={random_seed}") == (random_order, random_seed)


@pytest.mark.slow
def test_misuse_is_named(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import anyio

        def test_plain(virtual_clock):
            pass

        async def test_stuck(virtual_clock):
            await anyio.Event().wait()

        async def test_shielded(virtual_clock):
            with anyio.CancelScope(shield=True):
                await anyio.Event().wait()

        async def test_fine_afterwards(virtual_clock):
            await anyio.sleep(1)
        """
    )
    result = run(pytester)
    result.assert_outcomes(passed=1, failed=2, errors=1)
    result.stdout.fnmatch_lines_random(
        [
            "*virtual_clock is for `async def` tests*",
            "*DeadlockError: stuck at virtual second 0*",
            "*in test_stuck: await anyio.Event().wait()",
            "*in test_shielded: await anyio.Event().wait()",
        ]
    )


@pytest.mark.slow
def test_a_foreign_event_loop_is_noticed(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.parametrize("anyio_backend", [("asyncio", {"use_uvloop": True}), "curio"])
        async def test_two_minds(virtual_clock, anyio_backend):
            pass
        """
    )
    result = run(pytester)
    result.assert_outcomes(errors=2)
    result.stdout.fnmatch_lines_random(["*runs on trio or on asyncio's own event loop, not on 'curio'*"])


@pytest.mark.slow
def test_a_mark_chooses_the_event_loops(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import asyncio, anyio, pytest

        @pytest.fixture
        async def opened(virtual_clock):
            await anyio.sleep(100)
            yield "opened"
            await anyio.sleep(100)

        @pytest.mark.parametrize("anyio_backend", ["asyncio", "trio"])
        async def test_on_each(opened, virtual_clock, anyio_backend_name):
            await anyio.sleep(3600)
            assert virtual_clock.now == anyio.current_time() == 3700
            with virtual_clock.hold():
                await anyio.to_thread.run_sync(int)
            await virtual_clock.advance(5)
            assert virtual_clock.now == 3705

        @pytest.mark.parametrize("anyio_backend", [("asyncio", {"debug": True})])
        class TestOnAsyncio:
            async def test_with_options(self, virtual_clock):
                assert asyncio.get_running_loop().get_debug()
                await asyncio.wait_for(asyncio.sleep(3600), 4000)
                assert virtual_clock.now == asyncio.get_running_loop().time() == 3600

            async def test_afresh(self, virtual_clock):
                assert virtual_clock.now == 0

        @pytest.mark.parametrize("anyio_backend", ["asyncio"])
        async def test_stuck(virtual_clock):
            virtual_clock.patience = 0.05
            await asyncio.Event().wait()

        @pytest.mark.parametrize("anyio_backend", ["asyncio"])
        async def test_fine_afterwards(virtual_clock):
            await asyncio.sleep(1)
        """
    )
    result = run(pytester)
    result.assert_outcomes(passed=5, failed=1)
    result.stdout.fnmatch_lines_random(["*in test_stuck: await asyncio.Event().wait()"])


@pytest.mark.slow
def test_a_setting_chooses_the_event_loops(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import anyio

        async def test_each(virtual_clock, anyio_backend_name):
            await anyio.sleep(3600)
            print(f"on {anyio_backend_name}")
        """
    )
    both = run(pytester, "-o", "virtual_clock_backends=asyncio trio", "-s")
    both.assert_outcomes(passed=2)
    both.stdout.fnmatch_lines_random(["*on asyncio*", "*on trio*"])
    wrong = run(pytester, "-o", "virtual_clock_backends=uvloop")
    assert wrong.ret == pytest.ExitCode.USAGE_ERROR
    wrong.stderr.fnmatch_lines(["*virtual_clock_backends takes trio, asyncio, or both, not 'uvloop'*"])


@pytest.mark.slow
def test_a_bad_seed_is_one_line(pytester: pytest.Pytester) -> None:
    result = run(pytester, "--mainspring-seed=x")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*--mainspring-seed takes a whole number from 0, or `random`, not 'x'"])


def test_loading_it_imports_nothing_heavy() -> None:
    code = (
        "import sys, pytest\nbefore = set(sys.modules)\nimport mainspring.testing.pytest_plugin\n"
        "print(*sorted(m for m in set(sys.modules) - before if not m.startswith('mainspring')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {name.partition(".")[0] for name in done.stdout.split()} & {"trio", "pydantic", "anyio", "asyncio"}


@pytest.mark.slow
def test_without_trio_only_its_users_hear_of_it(pytester: pytest.Pytester) -> None:
    pytester.makeconftest("import sys\nsys.modules['trio'] = None\n")
    pytester.makepyfile(
        """
        def test_else():
            pass

        async def test_virtual(virtual_clock):
            pass
        """
    )
    result = run(pytester)
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines_random(["*pip install 'mainspring[[]test]'*"])
