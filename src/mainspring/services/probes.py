"""Asks a probe once, with a deadline."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

import anyio

from mainspring.errors import describe, message_of
from mainspring.services.addresses import host_port
from mainspring.services.callables import Prober, late, verdict_of
from mainspring.services.spawning import SpawnError
from mainspring.services.spec import ExecProbe, GrpcProbe, HttpProbe, TcpProbe

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from mainspring.http.client import Origin
    from mainspring.services.commands import CommandResult
    from mainspring.services.spec import CallableProbe, Probe

SOCKET = "{socket}"


def of_replica(probe: Probe, *, service: str, replica: int) -> Probe:
    """Return a probe as one replica asks it, again and again.

    ``{service}`` and ``{replica}`` in its address are replaced. A plain function that has not returned is not called again:
    until it has, each further call has failed.
    """
    if callable(probe):
        return _prober(probe)
    if isinstance(probe, ExecProbe):
        return probe  # `run` fills its command as that of the service

    def filled(text: str) -> str:
        return text.replace("{service}", service).replace("{replica}", str(replica))

    if isinstance(probe, HttpProbe):
        return replace(probe, url=filled(probe.url))
    return replace(probe, address=filled(probe.address))


def _prober(probe: CallableProbe) -> Prober:
    return probe if isinstance(probe, Prober) else Prober(probe, "probe")


def origin_of(probe: HttpProbe, socket: str | None) -> Origin | None:
    """Return the server that a probe asks; None where there is no ``{socket}``. See :func:`ask`."""
    from mainspring.services.http_probe import place_of

    if SOCKET in probe.url and socket is None:
        return None
    return place_of(probe.url.replace(SOCKET, socket or ""), socket)[0]


async def ask(
    probe: Probe,
    *,
    timeout: float,
    run: Callable[[tuple[str, ...]], Awaitable[CommandResult]],
    socket: str | None = None,
) -> str | None:
    """Return None where the probe passes within ``timeout`` seconds, else why not, in a few words.

    See :func:`of_replica` for a probe that is asked more than once.

    It raises only a cancellation, and leaves no task, process or connection behind. A plain function may be left in its thread.

    :param run: runs the command of an :class:`ExecProbe`. Cancelled, it leaves no process behind.
    :param socket: stands for ``{socket}`` in addresses.
    """
    if callable(probe):
        return await verdict_of(_prober(probe), timeout=timeout)
    error: str | None = late(timeout)
    with anyio.move_on_after(timeout):
        try:
            error = await _ask(probe, timeout, run, socket)
        except OSError as refused:
            error = _in_words(refused)
        except SpawnError as refused:
            error = message_of(refused)
        except anyio.BrokenResourceError as broken:
            error = _in_words(broken)
        except Exception as raised:  # as of an answer that is no HTTP
            error = describe(raised)
    return error


async def _ask(
    probe: HttpProbe | TcpProbe | ExecProbe | GrpcProbe,
    timeout: float,
    run: Callable[[tuple[str, ...]], Awaitable[CommandResult]],
    socket: str | None,
) -> str | None:
    if isinstance(probe, ExecProbe):
        return (await run(probe.command)).error
    address = probe.url if isinstance(probe, HttpProbe) else probe.address
    if SOCKET in address:
        if socket is None:
            return f"there is no {SOCKET}"
        address = address.replace(SOCKET, socket)
    if isinstance(probe, HttpProbe):
        from mainspring.services.http_probe import ask_http

        return await ask_http(address, socket)
    if isinstance(probe, TcpProbe):
        host, port = host_port(address)
        await (await anyio.connect_tcp(host, port)).aclose()
        return None
    from mainspring.services.grpc_probe import check

    return await check(address, probe.service, timeout)


def _in_words(error: BaseException) -> str:
    """Return the cause of a failed connection, as ``"connection refused"``."""
    while True:
        if isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        elif (errno := getattr(error, "errno", None)) is not None and errno > 0:
            return os.strerror(errno).lower()
        elif error.__cause__ is None:
            break
        else:
            error = error.__cause__
    if isinstance(error, anyio.BrokenResourceError):
        return "the connection broke"
    return (getattr(error, "strerror", None) or message_of(error) or type(error).__name__).lower()
