"""The contract of a mailbox, run on a list: one test for each behaviour, in virtual time."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from list_mailbox import list_mailbox

from mainspring.testing import mailbox_contract

if TYPE_CHECKING:
    from mainspring.testing import VirtualClock


@mailbox_contract.parametrize
async def test_the_contract(behaviour: mailbox_contract.Behaviour, virtual_clock: VirtualClock) -> None:
    await behaviour(partial(list_mailbox, {}))
