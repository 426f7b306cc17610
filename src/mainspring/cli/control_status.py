"""``mainspring status``: services and replicas of a supervisor, or loops of a group, as a table; what ``top`` shows as well."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple

import typer

from mainspring.cli.control_client import find_server
from mainspring.cli.user_errors import FAILED, UserError, printable
from mainspring.redaction import one_line

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_WORKING = ("running", "degraded")
SERVICE_COLUMNS = ("service", "state", "pid", "uptime", "restarts", "cpu", "memory", "")
LOOP_COLUMNS = ("loop", "state", "ready", "in hand", "uptime", "restarts", "mailbox", "")


class ServicePlace(NamedTuple):
    """A service, or one replica of it."""

    service: dict[str, Any]
    replica: dict[str, Any] | None = None

    @property
    def name(self) -> str:
        """How the command line names it: ``worker`` or ``worker.2``."""
        name = str(self.service["name"])
        return name if self.replica is None else f"{name}.{self.replica['number']}"

    @property
    def path(self) -> str:
        """The path of its routes."""
        return f"/services/{self.service['name']}"

    @property
    def query(self) -> dict[str, object]:
        """What names the replica in a query."""
        return {} if self.replica is None else {"replica": self.replica["number"]}

    @property
    def replicas(self) -> list[dict[str, Any]]:
        """The replicas that are meant."""
        return list(self.service["replicas"]) if self.replica is None else [self.replica]

    @property
    def works(self) -> bool:
        """True if one of its replicas works, or it has done its work."""
        if any(each["state"] in _WORKING for each in self.replicas):
            return True
        left = self.service["failed"] or self.service["stopped"]
        return not left and all(each["state"] == "stopped" for each in self.replicas)


def find_place(status: dict[str, Any], name: str) -> ServicePlace:
    """Return the service or the replica (``worker.2``) that a name means.

    :raises UserError: there is none, or the status is that of a group.
    """
    if status["kind"] != "orchestrator":
        raise UserError(f"{status['name']!r} is a group of loops, not a supervisor of services: it has no {name!r}")
    services = {service["name"]: service for service in status["services"]}
    if name in services:
        return ServicePlace(services[name])
    head, _, number = name.rpartition(".")
    for replica in services[head]["replicas"] if head in services else ():
        if number == str(replica["number"]):
            return ServicePlace(services[head], replica)
    if head in services:
        there = ", ".join(str(replica["number"]) for replica in services[head]["replicas"]) or "none"
        raise UserError(f"service {head!r} has no replica {number!r}; there are: {there}")
    raise UserError(f"{name!r} is no service of {status['name']!r}; there are: {', '.join(services)}")


def show_status(url: str | None, name: str | None, as_json: bool) -> int:
    """Print the status. Return 0 if all that was asked for is ready, else 1."""
    server = find_server(url)
    status = server.status()
    if name is not None:
        place = find_place(status, name)
        if as_json:
            typer.echo(json.dumps(place.service if place.replica is None else place.replica))
        else:
            _print_table(SERVICE_COLUMNS, place_rows(_with_replicas(place)))
        return 0 if place.works else FAILED
    if as_json:
        typer.echo(json.dumps(status))
    else:
        typer.echo(printable(f"{headline(status)}  ({server.url})"))
        for reason in status["reasons"]:
            typer.echo(printable(f"not ready: {one_line(reason)}"))
        _print_table(*table(status))
    return 0 if status["ready"] else FAILED


def headline(status: dict[str, Any]) -> str:
    """Return the name and the state of the whole, as one line."""
    ready = "ready" if status["ready"] else "not ready"
    return f"{status['name']}: {status['state']} for {span(status['state_seconds'])}, {ready}"


def table(
    status: dict[str, Any], cpu: dict[tuple[str, int], float] | None = None
) -> tuple[Sequence[str], list[list[str]]]:
    """Return the head and the rows of all services with their replicas, or of all loops."""
    if status["kind"] == "group":
        return LOOP_COLUMNS, [_loop_row(loop) for loop in status["loops"]]
    return SERVICE_COLUMNS, place_rows(places(status), cpu)


def places(status: dict[str, Any]) -> list[ServicePlace]:
    """Return the services, each with its replicas if it has several, in the order in which they are shown."""
    return [place for service in status["services"] for place in _with_replicas(ServicePlace(service))]


def _with_replicas(place: ServicePlace) -> list[ServicePlace]:
    several = place.replica is None and len(place.replicas) > 1
    return [place, *(ServicePlace(place.service, replica) for replica in place.replicas if several)]


def place_rows(shown: Iterable[ServicePlace], cpu: dict[tuple[str, int], float] | None = None) -> list[list[str]]:
    """Return a row for each. ``cpu``: shares of a core by service and replica; None shows the CPU time used so far."""
    return [_place_row(place, cpu) for place in shown]


def _place_row(place: ServicePlace, cpu: dict[tuple[str, int], float] | None) -> list[str]:
    service, replicas = place.service, place.replicas
    one = replicas[0] if len(replicas) == 1 else None
    used = [each["usage"] for each in replicas if each.get("usage")]
    if cpu is None:
        processor = f"{sum(each['cpu_seconds'] for each in used):.1f} s" if used else "-"
    else:
        shares = [cpu[key] for each in replicas if (key := (service["name"], each["number"])) in cpu]
        processor = f"{sum(shares):.0%}" if shares else "-"
    state = service["state"] if place.replica is None else place.replica["state"]
    if service["failed"] and not place.works:
        state = "failed"
    uptime = max((each["uptime"] for each in replicas), default=0.0)
    return [
        place.name if place.replica is None else f"  {place.name}",
        state,
        str(one["pid"] or "-") if one is not None else f"{len(replicas)} replicas",
        span(uptime) if uptime else "-",
        str(sum(each["restarts"] for each in replicas)),
        processor,
        size(sum(each["memory_bytes"] for each in used)) if used else "-",
        one_line(_remark(place)),
    ]


def _remark(place: ServicePlace) -> str:
    """Return what is to be said of a place: its error, what its own status says is wrong, or its last notice."""
    service, replicas = place.service, place.replicas
    error = service["error"] if place.replica is None else place.replica["error"]
    if error:
        return str(error)
    for each in replicas:
        child = each.get("child")
        if isinstance(child, dict) and child.get("reasons"):
            return f"says: {child['reasons'][0]}"
    if place.replica is None and service["stopped"]:
        return "stopped by request"
    return str(replicas[0]["notice"]) if len(replicas) == 1 else ""


def _loop_row(loop: dict[str, Any]) -> list[str]:
    return [
        loop["name"],
        "paused" if loop["paused"] else loop["state"],
        "yes" if loop["ready"] else "no",
        f"{loop['in_flight']} of {loop['concurrency']}",
        span(loop["uptime"]) if loop["uptime"] else "-",
        str(loop["restarts"]),
        loop["mailbox"] or "-",
        one_line(loop["reason"] or ""),
    ]


def _print_table(head: Sequence[str], rows: list[list[str]]) -> None:
    for line in aligned([[each.upper() for each in head], *rows]):
        typer.echo(line)


def aligned(rows: list[list[str]]) -> list[str]:
    """Return rows as lines whose columns begin at the same place, without what a terminal would obey."""
    clean = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*clean, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in clean]


def span(seconds: float) -> str:
    """Return a length of time in its two largest units: ``3d 4h``, ``5m 2s``, ``12s``."""
    left = int(seconds)
    parts: list[str] = []
    for unit, length in (("d", 86_400), ("h", 3600), ("m", 60), ("s", 1)):
        number, left = divmod(left, length)
        if number or parts or unit == "s":
            parts.append(f"{number}{unit}")
    return " ".join(parts[:2])


def size(count: float) -> str:
    """Return bytes in a unit that fits: ``12.5 MiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            break
        count /= 1024
    return f"{count:.0f} {unit}" if count >= 100 or unit == "B" else f"{count:.1f} {unit}"
