"""Whose process a process is to be: the ids and the environment of its user."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NamedTuple

import anyio.to_thread

from mainspring.services.spawn_failures import spawn_error
from mainspring.services.spawning import USER_VARIABLES

if TYPE_CHECKING:
    from mainspring.services.spawning import Launch


class UserAccount(NamedTuple):
    """The user of a process. ``ids``: its uid, gid and groups. ``environment``: what a login would set."""

    ids: tuple[int, int, list[int]]
    environment: dict[str, str]

    @property
    def is_own(self) -> bool:
        """True if it is that of this process, which then has nothing to change, nor the right to."""
        return self.ids[0] == os.geteuid() != 0


async def find_account(launch: Launch) -> UserAccount | None:
    """Return the account of the user that a process is to have; None where it names none.

    :raises SpawnError: there is no such user.
    """
    name = launch.user
    if name is None:
        return None
    import pwd

    def find() -> UserAccount:  # a directory server can take its time
        entry = pwd.getpwnam(name)
        environment = dict(zip(USER_VARIABLES, (entry.pw_dir, name, name), strict=True))
        return UserAccount((entry.pw_uid, entry.pw_gid, os.getgrouplist(name, entry.pw_gid)), environment)

    try:
        return await anyio.to_thread.run_sync(find)
    except KeyError:
        raise spawn_error(launch, f"there is no user {name!r}: create it, or correct 'user'") from None
