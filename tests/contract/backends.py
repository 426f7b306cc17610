"""The backends that this repository runs its own contract against."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mainspring import open_mailbox
from mainspring.testing import mailbox_contract

if TYPE_CHECKING:
    from pathlib import Path

    from mainspring import Mailbox

SHORT = 0.5
"""Real seconds that leases last which behaviours wait out: a busy machine is late by a tenth of one."""


def memory(*, serialize: bool) -> mailbox_contract.BackendUnderTest:
    def make(name: str, *, body: Any = None, reply: Any = None) -> Mailbox[Any, Any]:
        return open_mailbox(f"memory://{name}", serialize=serialize, body=body, reply=reply)

    return mailbox_contract.BackendUnderTest(
        make, short_lease=SHORT, name=f"memory, {'JSON' if serialize else 'objects'}"
    )


def sqlite(directory: Path) -> mailbox_contract.BackendUnderTest:
    def make(name: str, *, body: Any = None, reply: Any = None) -> Mailbox[Any, Any]:
        return open_mailbox(f"sqlite:///{directory}/contract.db", name=name, body=body, reply=reply)

    return mailbox_contract.BackendUnderTest(make, short_lease=SHORT, name="SQLite")


NAMES = ("memory-json", "memory-objects", "sqlite")


def backend(name: str, directory: Path) -> mailbox_contract.BackendUnderTest:
    """The backend of that name, with its files (if any) in ``directory``."""
    return sqlite(directory) if name == "sqlite" else memory(serialize=name == "memory-json")
