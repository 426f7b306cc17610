"""A timeout and a retry policy of one call, which its worker heeds instead of those of the task."""

from __future__ import annotations

import anyio
import pytest
from task_support import group_of, until_done

from mainspring import ConfigError, DeadLetterPolicy, InMemoryMailbox, RetryPolicy, Tasks, chain
from mainspring.testing import run_virtual
from mainspring.worker.call_options import RETRY, TIMEOUT, option_headers, retry_of, timeout_of

STEADY = RetryPolicy(7.25, 7.25, jitter="none")


@pytest.mark.parametrize("usual", [None, 100])
@pytest.mark.parametrize("in_chain", [False, True])
def test_a_call_has_a_timeout_of_its_own(usual, in_chain):
    async def main():
        tasks = Tasks(InMemoryMailbox(), dead_letter=DeadLetterPolicy(max_attempts=1))
        lasted = []

        @tasks.task(timeout=usual)
        async def work() -> None:
            begun = anyio.current_time()
            try:
                await anyio.sleep(50)
            finally:
                lasted.append(anyio.current_time() - begun)

        async with group_of(tasks):
            short = work.options(timeout=2.5)
            await (chain(short.s()).send() if in_chain else short.send())
            await work.send()
            await until_done(tasks.mailbox, 300)
            assert lasted == [pytest.approx(2.5), pytest.approx(50)]
            (dead,) = await tasks.mailbox.dead_letters()
            assert dead.error == "the handler ran longer than its timeout of 2.5 s"

    run_virtual(main)


def test_a_call_has_a_retry_policy_of_its_own():
    async def main():
        tasks = Tasks(InMemoryMailbox(), retry=RetryPolicy(1_000, 1_000, jitter="none"))
        tried = []

        @tasks.task
        async def work(name: str) -> None:
            tried.append((name, round(anyio.current_time(), 2)))
            if len([one for one, _ in tried if one == name]) < 3:
                raise LookupError

        async with group_of(tasks):
            await work.options(retry=STEADY).send("own")
            await work.send("usual")
            await until_done(tasks.mailbox, 5_000)
            assert [at for name, at in tried if name == "own"] == [0, 7.25, 14.5]
            assert [at for name, at in tried if name == "usual"] == [0, 1_000, 2_000]

    run_virtual(main)


def test_what_cannot_be_is_refused_before_it_is_sent():
    tasks = Tasks(InMemoryMailbox())

    @tasks.task
    async def work() -> None: ...

    for timeout in (0, -1, "5", float("nan"), float("inf"), True):
        with pytest.raises(ConfigError, match="task work: timeout must be above 0 seconds"):
            work.options(timeout=timeout)
    with pytest.raises(ConfigError, match="task work: RetryPolicy expected, not 5"):
        work.options(retry=5)


@pytest.mark.parametrize("timeout", ["", "soon", "0", "-1", "nan", "inf", "1e999"])
@pytest.mark.parametrize("retry", ["", "5", "[]x", '["a"]', "[1, 0]", "[1, 2, 3, 4, 5]", '{"a": 1}', "null"])
def test_headers_that_say_nothing_sensible_leave_the_tasks_own(timeout, retry):
    assert timeout_of({TIMEOUT: timeout}, 9.0) == 9.0
    assert retry_of({RETRY: retry}, STEADY) is STEADY


def test_a_header_that_no_parser_can_read_takes_no_worker_down():
    async def main():
        tasks = Tasks(InMemoryMailbox(), retry=STEADY, dead_letter=DeadLetterPolicy(max_attempts=2))

        @tasks.task
        async def work() -> None:
            raise LookupError

        group = group_of(tasks)
        async with group:
            await work.options(headers={RETRY: "[" * 100_000}).send()
            await until_done(tasks.mailbox, 60)
            assert (await tasks.mailbox.counts()).dead == 1
        assert group.report.exit_status == 0

    run_virtual(main)


def test_headers_say_what_was_given():
    headers = option_headers(0.123456789, RetryPolicy(0.5, 10.25, 1.5, "full"))
    assert timeout_of(headers, None) == 0.123456789
    assert retry_of(headers, STEADY) == RetryPolicy(0.5, 10.25, 1.5, "full")
    assert option_headers(None, None) == {}


def test_calls_under_a_former_name_are_run():
    async def main():
        before, now = Tasks("memory://jobs"), Tasks("memory://jobs")
        ran = []

        @before.task(result_ttl=60)
        async def email(to: str) -> int: ...

        @now.task(aliases=["email", "mail"], result_ttl=60)
        async def send_email(to: str) -> int:
            ran.append(to)
            return len(ran)

        async with before, group_of(now):
            old, new = await email.send("ann"), await send_email.send("bob")
            assert sorted([await now.job(old.id).result(timeout=9), await new.result(timeout=9)]) == [1, 2]
            assert sorted(ran) == ["ann", "bob"]

    run_virtual(main)


def test_aliases_are_names_of_their_own():
    tasks = Tasks(InMemoryMailbox())

    @tasks.task(aliases=["mail"])
    async def email() -> None: ...

    async def work() -> None: ...

    for aliases, why in (
        (["mail"], "'mail' is registered already"),
        (["email"], "'email' is registered already"),
        (["a b"], "a name is up to 200"),
        ([5], "a name is up to 200"),
        ("mail", "aliases must be a list of names"),
    ):
        with pytest.raises(ConfigError, match=why):
            tasks.task(aliases=aliases)(work)
    with pytest.raises(ConfigError, match="'mail' is registered already"):
        tasks.task(name="mail")(work)
