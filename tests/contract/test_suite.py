"""The contract suite itself: what it offers, what it refuses, and how it reports."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from functools import partial
from typing import Any, Self
from unittest import SkipTest

import anyio
import pytest

from contract.backends import memory
from contract.broken_mailboxes import broken
from mainspring import Capabilities, ConfigError, InMemoryMailbox
from mainspring.mailbox.message import Cancelled, CancelOutcome, Envelope
from mainspring.testing import mailbox_contract, run_virtual
from mainspring.testing.mailbox_contract.harness import Harness, behaviour
from mainspring.testing.mailbox_contract.sending import an_expired_message_frees_its_dedup_key
from wrapped_backend import WrappedBackend, wrap

pytest_plugins = ["pytester"]


def test_it_is_large_and_each_behaviour_says_what_it_claims() -> None:
    found = mailbox_contract.behaviours()
    assert len(found) >= 160
    assert len({behaviour.name for behaviour in found}) == len(found)
    for one in found:
        assert one.claim.endswith(".")
        assert "  " not in one.claim


@pytest.mark.slow
def test_it_needs_no_pytest() -> None:
    code = (
        "import sys; sys.modules['pytest'] = None\n"
        "import anyio\nfrom mainspring import open_mailbox\nfrom mainspring.testing import mailbox_contract\n"
        "def factory(name, *, body=None, reply=None):\n"
        "    return open_mailbox(f'memory://{name}', body=body, reply=reply)\n"
        "async def main():\n"
        "    return await mailbox_contract.run(factory, only=['first_in_first_out'])\n"
        "print(anyio.run(main))"
    )
    done = subprocess.run([sys.executable, "-O", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "InMemoryMailbox keeps the contract: 1 passed, 0 failed, 0 skipped"


def test_what_is_left_out_is_counted_and_named() -> None:
    async def main() -> mailbox_contract.Report:
        return await mailbox_contract.run(
            memory(serialize=False),
            only=["first_in_first_out", "ids_differ", "a_durable_mailbox_keeps_every_part"],
            exclude=["ids_differ", "a_durable_mailbox_keeps_every_part"],
        )

    report = run_virtual(main)
    assert report.passed == ["first_in_first_out"]
    assert report.undeclared == ["ids_differ"]
    assert not report.ok
    assert "1 skipped that the capabilities do not declare" in str(report)


class SkipsWhatIsHard(WrappedBackend):
    """Declares every capability of the one in memory, and skips where it finds something too hard."""

    async def purge(self) -> int:
        raise SkipTest("purging is hard")


@pytest.mark.slow
def test_a_skip_that_the_capabilities_do_not_declare_is_a_failure() -> None:
    async def main() -> mailbox_contract.Report:
        return await mailbox_contract.run(broken(SkipsWhatIsHard))

    report = run_virtual(main)
    assert not report.ok
    assert "a_purge_drops_what_is_not_dead" in report.failed
    assert "skipped (purging is hard), which the capabilities do not declare" in str(report)
    assert report.lacking == {"durable", "cross_process"}
    excused = {one.name for one in mailbox_contract.behaviours() if one.needs & report.lacking}
    assert set(report.skipped) == excused


def test_a_run_of_nothing_is_not_ok() -> None:
    async def main() -> mailbox_contract.Report:
        return await mailbox_contract.run(memory(serialize=False), only=["a_durable_mailbox_keeps_every_part"])

    report = run_virtual(main)
    assert not report.ok
    assert "has not the capability 'durable'" in str(report)


def test_unknown_names_and_numbers_are_refused() -> None:
    async def main(**options: Any) -> None:
        with pytest.raises(ConfigError):
            await mailbox_contract.run(memory(serialize=False), **options)

    async def all_of_them() -> None:
        await main(only=["no such behaviour"])
        await main(exclude=["no such behaviour"])
        await main(concurrency=0)

    run_virtual(all_of_them)
    with pytest.raises(ConfigError, match="telepathy"):
        behaviour("telepathy")


def test_a_factory_of_something_else_is_refused() -> None:
    async def main() -> None:
        with pytest.raises(ConfigError, match="returns a Mailbox"):
            await mailbox_contract.run(lambda name, *, body=None, reply=None: name)  # type: ignore[arg-type, return-value]

    run_virtual(main)


class AsyncioOnly(InMemoryMailbox[Any, Any]):
    capabilities = Capabilities(async_backends=frozenset({"asyncio"}))


class Careless(AsyncioOnly):
    async def __aenter__(self) -> Self:
        return self


@pytest.mark.parametrize(("kind", "ok"), [(AsyncioOnly, True), (Careless, False)])
def test_on_an_event_loop_it_does_not_run_on_a_backend_must_say_so(kind: type[AsyncioOnly], ok: bool) -> None:
    async def main() -> mailbox_contract.Report:
        return await mailbox_contract.run(kind)

    report = run_virtual(main)
    assert report.ok is ok
    assert len(report.passed) == int(ok)
    assert len(report.skipped) == len(mailbox_contract.behaviours())
    assert set(report.skipped.values()) == {f"{kind.__name__}: does not run on trio"}


def test_a_behaviour_alone_skips_by_unittests_word() -> None:
    (durable,) = (one for one in mailbox_contract.behaviours() if one.name == "a_durable_mailbox_keeps_every_part")
    with pytest.raises(SkipTest, match="durable"):
        run_virtual(durable, memory(serialize=False))


def test_the_users_corruption_is_used() -> None:
    done: list[bytes] = []

    async def corrupt(mailbox: Any, raw: bytes) -> None:
        done.append(raw)  # and nothing more: shows up as the behaviour's failure

    backend = mailbox_contract.BackendUnderTest(memory(serialize=True).factory, corrupt=corrupt)

    async def main() -> mailbox_contract.Report:
        return await mailbox_contract.run(backend, only=["bytes_that_are_no_json_go_to_the_dead_letters"])

    report = run_virtual(main)
    assert len(done) == 1
    assert not report.ok


@pytest.mark.slow
def test_the_adapter_for_pytest(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        from mainspring import InMemoryMailbox
        from mainspring.testing import mailbox_contract

        @mailbox_contract.parametrize
        async def test_contract(behaviour, virtual_clock):
            await behaviour(InMemoryMailbox)
        """
    )
    result = pytester.runpytest_subprocess(
        "-p", "no:randomly", "-p", "no:cacheprovider", "-k", "durable or order or life"
    )
    outcome = result.parseoutcomes()
    assert outcome["skipped"] >= 3
    assert outcome["passed"] >= 1
    assert "failed" not in outcome


def test_the_harness_tells_late_from_in_time() -> None:
    async def main() -> None:
        h = Harness(memory(serialize=False))
        with h.takes(5, "a sleep"):
            await anyio.sleep(5)
        for wrong in (4.9, 5.1):
            with pytest.raises(mailbox_contract.ContractError, match="a sleep took"), h.takes(wrong, "a sleep"):
                await anyio.sleep(5)

    run_virtual(main)


class CancelsLate(WrappedBackend):
    """Cancels as late as told, and says then what it is told to say, if anything."""

    def __init__(self, inner: Any, late: list[float], says: Cancelled | None) -> None:
        super().__init__(inner)
        self.late = late
        self.says = says

    async def cancel(self, message_id: str) -> Cancelled:
        await anyio.sleep(self.late.pop(0))
        done = await self.inner.cancel(message_id)
        return self.says or done


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lease", "late", "says", "told"),
    [
        (0.5, [0.6, 0.0], None, None),
        (
            0.1,
            [1.0, 1.0, 1.0],
            None,
            r"was to be done within 0\.9 s took 1\S* s, and then: .*, with the longest times too",
        ),
        (30.0, [0.0], Cancelled(CancelOutcome.REMOVED), r"^outcome: .*REMOVED.*, not .*CANCELLED"),
    ],
    ids=["late once", "always late", "wrong in time"],
)
def test_in_real_time_what_came_too_late_is_tried_again_and_what_is_wrong_is_not(
    lease: float, late: list[float], says: Cancelled | None, told: str | None
) -> None:
    async def main() -> mailbox_contract.Report:
        kind = partial(CancelsLate, late=late, says=says)
        backend = mailbox_contract.BackendUnderTest(
            lambda name, **_: wrap(InMemoryMailbox(name), kind), short_lease=lease
        )
        return await mailbox_contract.run(backend, only=[name])

    name = "a_message_in_flight_can_be_cancelled"
    report = anyio.run(main)
    assert not late
    assert report.ok is (told is None)
    if told is not None:
        assert re.search(told, str(report.failed[name])), report.failed[name]


@pytest.mark.slow
def test_in_real_time_what_came_too_late_and_did_not_fail_is_not_tried_again() -> None:
    late = [0.6]

    async def main() -> mailbox_contract.Report:
        kind = partial(CancelsLate, late=late, says=None)
        backend = mailbox_contract.BackendUnderTest(
            lambda name, **_: wrap(InMemoryMailbox(name), kind), short_lease=0.5
        )
        return await mailbox_contract.run(backend, only=["a_delayed_message_can_be_cancelled"])

    report = anyio.run(main)
    assert not late
    assert report.ok, str(report)


class SendsLate(WrappedBackend):
    """Takes so long to send as told, and then no time."""

    def __init__(self, inner: Any, late: list[float]) -> None:
        super().__init__(inner)
        self.late = late

    async def send(self, envelopes: list[Envelope]) -> list[str]:
        await anyio.sleep(self.late.pop(0) if self.late else 0.0)
        return await self.inner.send(envelopes)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "late"),
    [("a_request_nobody_waits_for_is_withdrawn", [2.2]), ("an_expired_message_frees_its_dedup_key", [0.0, 1.2])],
    ids=["a request that was not sent in its time", "a message that expired before its claim"],
)
def test_in_real_time_a_check_that_fails_behind_what_came_too_late_is_tried_again(name: str, late: list[float]) -> None:
    left = list(late)

    async def main() -> mailbox_contract.Report:
        backend = mailbox_contract.BackendUnderTest(
            lambda name, **_: wrap(InMemoryMailbox(name), partial(SendsLate, late=left))
        )
        return await mailbox_contract.run(backend, only=[name])

    report = anyio.run(main)
    assert not left
    assert report.ok, str(report)


class ActsLate(WrappedBackend):
    """Ends delays and expires messages by itself, as late as told."""

    def __init__(self, inner: Any, late: float) -> None:
        super().__init__(inner)
        self.late = late

    async def send(self, envelopes: list[Envelope]) -> list[str]:
        return await self.inner.send([self._later(envelope) for envelope in envelopes])

    def _later(self, envelope: Envelope) -> Envelope:
        delay, expires_in = envelope.delay, envelope.expires_in
        return replace(
            envelope,
            delay=delay + self.late if delay else 0.0,
            expires_in=None if expires_in is None else expires_in + self.late,
        )


@pytest.mark.slow
@pytest.mark.parametrize("lateness", [0.1, 0.01], ids=["acts by itself", "decides when asked"])
@pytest.mark.parametrize(
    "name",
    [
        "a_delayed_message_stays_hidden_until_its_time",
        "a_delay_can_be_a_timedelta_or_an_instant",
        "an_expired_message_frees_its_dedup_key",
        "an_expired_message_cannot_be_cancelled",
    ],
)
def test_in_real_time_a_store_that_acts_by_itself_may_be_late(name: str, lateness: float) -> None:
    async def main() -> mailbox_contract.Report:
        return await mailbox_contract.run(acting_late(0.7, lateness), only=[name])

    assert anyio.run(main).ok is (lateness == 0.1)


@pytest.mark.slow
def test_in_real_time_a_store_that_never_acts_is_caught() -> None:
    async def main() -> None:
        harness = Harness(acting_late(3_600, lateness=0.1))
        harness.patience = 0.1
        with pytest.raises(mailbox_contract.ContractError, match="has expired and kept its key"):
            await an_expired_message_frees_its_dedup_key.check(harness)

    anyio.run(main)


def acting_late(late: float, lateness: float) -> mailbox_contract.BackendUnderTest:
    """Mailboxes in memory that are so late, where so much is declared."""
    kind = partial(ActsLate, late=late)
    return mailbox_contract.BackendUnderTest(lambda name, **_: wrap(InMemoryMailbox(name), kind), lateness=lateness)
