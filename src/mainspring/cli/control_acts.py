"""``mainspring start``, ``stop``, ``restart`` and ``drain``: ask for it, say how far it is, and wait until it is done."""

from __future__ import annotations

import json
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

import typer

from mainspring.cli.control_client import LateAnswerError, NotReachedError, find_server
from mainspring.cli.control_status import ServicePlace, find_place
from mainspring.cli.user_errors import FAILED, UserError, printable, say
from mainspring.core import clock

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mainspring.cli.control_client import ControlClient

LONGEST_WAIT = 86_400.0
_POLL = 0.2
_DONE = {"start": "started", "stop": "stopped", "restart": "restarted"}


def act_on(act: str, url: str | None, name: str | None, wait: float | None, as_json: bool) -> int:
    """Start, stop or restart a service, a replica or (restart alone) all services. ``wait``: seconds; None until it is done."""
    server = find_server(url)
    status = server.status()
    if status["kind"] != "orchestrator":
        raise UserError(f"{status['name']!r} is a group of loops, not a supervisor: it has no services to {act}")
    place = None if name is None else find_place(status, name)
    path = f"/{act}" if place is None else f"{place.path}/{act}"
    seconds = LONGEST_WAIT if wait is None else min(wait, LONGEST_WAIT)
    query = {**({} if place is None else place.query), "wait": seconds}
    what = f"{act} of {'all services' if place is None else place.name}"
    outcome: SimpleQueue[Any] = SimpleQueue()
    Thread(target=_ask, args=(server, path, query, seconds, outcome), daemon=True).start()
    watch = _Watch(act, status, place)
    try:
        answer = _await(server, outcome, watch, told=not as_json)
    except KeyboardInterrupt:
        say(f"no longer waiting; {what} goes on, see `mainspring status`")
        return 130
    if isinstance(answer, UserError):
        raise answer
    done = f"{'all services' if place is None else place.name} {_DONE[act]}"
    if as_json:
        typer.echo(json.dumps({"status": answer["status"], "state": answer["state"]}))
    elif answer["done"] or not seconds:
        typer.echo(printable(done if answer["done"] else f"{what} is under way"))
    if answer["done"] or not seconds:
        return 0
    say(f"{what} is not done after {seconds:g} s; it goes on, see `mainspring status`")
    return FAILED


def _ask(server: ControlClient, path: str, query: dict[str, object], wait: float, outcome: SimpleQueue[Any]) -> None:
    try:
        outcome.put(server.post(path, query, wait=wait))
    except UserError as problem:
        outcome.put(problem)


def _await(server: ControlClient, outcome: SimpleQueue[Any], watch: _Watch, *, told: bool) -> Any:
    """Return the answer of the request, or its error. Until then print a line for each replica that is done."""
    answer = None
    while answer is None:
        with suppress(Empty):
            answer = outcome.get(timeout=_POLL)
        if told:
            with suppress(NotReachedError):  # the request's own failure is what is told
                for line in watch.news(server.status()):
                    typer.echo(printable(line))
    return answer


class _Watch:
    """What has become of the replicas since an act was asked for, by their processes and states."""

    def __init__(self, act: str, status: dict[str, Any], place: ServicePlace | None) -> None:
        self._act = act
        self._place = place
        self._before = {key: replica["pid"] for key, replica in self._replicas(status)}
        self._said: set[tuple[str, int]] = set()
        if act != "restart":  # what is so already is no news
            self._said.update(key for key, replica in self._replicas(status) if self._is_done(key, replica))

    def news(self, status: dict[str, Any]) -> Iterator[str]:
        """Yield a line for each replica that is done now and was not before."""
        for key, replica in self._replicas(status):
            if key not in self._said and self._is_done(key, replica):
                self._said.add(key)
                pid = "" if self._act == "stop" else f" (pid {replica['pid']})"
                yield f"{key[0]}.{key[1]} {'has stopped' if self._act == 'stop' else 'runs'}{pid}"

    def _replicas(self, status: dict[str, Any]) -> Iterator[tuple[tuple[str, int], dict[str, Any]]]:
        for service in status.get("services", ()):
            for replica in service["replicas"]:
                mine = self._place is None or (
                    service["name"] == self._place.service["name"]
                    and (self._place.replica is None or self._place.replica["number"] == replica["number"])
                )
                if mine:
                    yield (service["name"], replica["number"]), replica

    def _is_done(self, key: tuple[str, int], replica: dict[str, Any]) -> bool:
        if self._act == "stop":
            return bool(replica["state"] == "stopped")
        fresh = replica["pid"] is not None and (self._act == "start" or replica["pid"] != self._before.get(key))
        return fresh and replica["state"] in ("running", "degraded")


def drain(url: str | None, wait: float, as_json: bool) -> int:
    """Ask for the orderly end of a supervisor or a group. ``wait``: seconds to wait for the end."""
    server = find_server(url)
    answer = server.post("/drain")
    name = answer.get("orchestrator") or answer.get("group")
    if as_json:
        typer.echo(json.dumps({"status": answer["status"], "name": name, "state": answer["state"]}))
    else:
        typer.echo(printable(f"{name}: draining"))
    if not wait:
        return 0
    deadline = clock.monotonic() + wait
    try:
        while clock.monotonic() < deadline:
            if not _is_there(server, deadline - clock.monotonic()):
                if not as_json:
                    typer.echo(printable(f"{name}: has ended"))
                return 0
            Event().wait(_POLL)
    except KeyboardInterrupt:
        say(f"no longer waiting; {name} goes on draining")
        return 130
    say(f"{name} has not ended within {wait:g} s; it goes on draining")
    return FAILED


def _is_there(server: ControlClient, within: float) -> bool:
    try:
        server.get("/health/live", within=max(_POLL, within))
    except LateAnswerError:
        return True
    except NotReachedError:
        return False
    except UserError:  # a group that is being stopped may say that it does not live
        return True
    return True
