"""Host names become addresses on threads of their own, and connections are made to those.

The event loops look names up on the threads that they share with the code of the user: asyncio in its default executor, trio
under its default limiter. Where handlers occupy those, a lost connection would wait for them, and leases would end meanwhile.
"""

from __future__ import annotations

import socket
from functools import partial
from ipaddress import ip_address
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import anyio

from mainspring.core.clock import real_work
from mainspring.threads.own_thread import OwnThread

if TYPE_CHECKING:
    from collections.abc import Iterable

    from anyio.abc import SocketStream

NEXT = 0.25
"""Seconds that one address has for itself before the next one is tried, too (RFC 8305)."""


def _look_up(host: str) -> list[str]:
    try:
        return _in_turn(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM))
    except UnicodeError as error:
        raise socket.gaierror(socket.EAI_NONAME, f"{host!r} is no host name: {error}") from None


def _in_turn(found: Iterable[tuple[Any, ...]]) -> list[str]:
    """Return the addresses of IPv6 and IPv4 by turns, beginning with the family that the system prefers."""
    addresses = list(dict.fromkeys((family, str(place[0])) for family, _, _, _, place in found))
    first = addresses[0][0]
    preferred = [address for family, address in addresses if family == first]
    others = [address for family, address in addresses if family != first]
    return [address for pair in zip_longest(preferred, others) for address in pair if address is not None]


async def resolve(host: str) -> list[str]:
    """Return the addresses of ``host``, in the order in which they are to be tried; an address is its own.

    Cancelled, it leaves a thread behind that ends when the system's resolver answers.

    :raises OSError: there is no such host, as far as is known (``socket.gaierror``), or no thread to ask in.
    """
    try:
        ip_address(host.partition("%")[0])
    except ValueError:
        pass
    else:
        await anyio.lowlevel.checkpoint()
        return [host]
    try:
        thread = OwnThread(partial(_look_up, host), f"looking up {host}")
    except RuntimeError as error:  # the process may have no more threads just now
        raise OSError(f"{host!r} cannot be looked up: {error}") from None
    with real_work():
        return await thread.wait()


async def connect_tcp(host: str, port: int) -> SocketStream:
    """Return a connection to the first address of ``host`` that takes one; each has a head start of :data:`NEXT` seconds.

    Cancelled, it leaves no connection behind.

    :raises OSError: there is no such host, or none of its addresses can be reached; then the error of the last one.
    """
    addresses = await resolve(host)
    made: list[SocketStream] = []
    failed: list[OSError] = []

    async def attempt(address: str, ended: anyio.Event) -> None:
        try:
            stream = await anyio.connect_tcp(address, port)
        except OSError as error:
            failed.append(
                error.__cause__ if isinstance(error.__cause__, OSError) else error
            )  # anyio's sum of its tries
        else:
            made.append(stream)
            tasks.cancel_scope.cancel()
        finally:
            ended.set()

    try:
        async with anyio.create_task_group() as tasks:
            for address in addresses:
                ended = anyio.Event()
                tasks.start_soon(attempt, address, ended)
                with anyio.move_on_after(NEXT):
                    await ended.wait()
    except BaseException:
        await _hang_up(made)
        raise
    await _hang_up(made[1:])
    if made:
        return made[0]
    raise failed[-1]


async def _hang_up(streams: Iterable[SocketStream]) -> None:
    with anyio.CancelScope(shield=True):
        for stream in streams:
            await anyio.aclose_forcefully(stream)
