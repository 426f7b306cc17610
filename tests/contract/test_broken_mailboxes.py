"""The contract can fail: mailboxes broken on purpose are each caught by the behaviours named with them."""

from __future__ import annotations

from functools import partial

import pytest

from contract.broken_mailboxes import KINDS, Kind, broken
from mainspring import MainspringError
from mainspring.testing import mailbox_contract, run_virtual
from mainspring.testing.mailbox_contract import ContractError
from wrapped_backend import WrappedBackend


@pytest.mark.slow
def test_the_base_of_them_is_whole() -> None:
    report = run_virtual(mailbox_contract.run, broken(WrappedBackend))
    assert report.ok, str(report)


@pytest.mark.parametrize(("kind", "names"), [pytest.param(*case, id=case[0].__name__) for case in KINDS])
def test_each_is_caught(kind: Kind, names: list[str]) -> None:
    report = run_virtual(partial(mailbox_contract.run, broken(kind), only=names))
    assert report.passed == []
    assert not report.ok
    assert set(report.failed) == set(names)
    for error in report.failed.values():  # not by a slip of the one that is broken
        assert isinstance(error, ContractError | MainspringError), repr(error)
