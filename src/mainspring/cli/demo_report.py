"""The demo's account: what became of each file, and whether that is as promised."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from mainspring.mailbox.message import Counts, DeadLetter


@dataclass(frozen=True, slots=True)
class DemoReport:
    """The figures of one run. ``problems`` says what is not as promised, one line each."""

    files: int
    sent: int
    done: int
    redelivered: int
    run_twice: int
    dead_lettered: Mapping[str, str]
    seconds: float
    workers: Mapping[int, int]
    killed: int | None
    drained: int | None
    service_exit_status: int | None
    missing: Sequence[str]
    problems: Sequence[str]
    summary: Mapping[str, Any]

    @property
    def ok(self) -> bool:
        """True if every file is accounted for, exactly once."""
        return not self.problems

    @property
    def rate(self) -> float:
        """Messages per second, from the first send to the last settlement."""
        return (self.done + len(self.dead_lettered)) / self.seconds if self.seconds else 0.0

    def as_json(self) -> dict[str, Any]:
        """Return the figures for a program."""
        seconds, rate = round(self.seconds, 2), round(self.rate, 1)
        return {"ok": self.ok, **asdict(self), "seconds": seconds, "messages_per_second": rate}


def account(
    *,
    paths: Sequence[str],
    broken: str,
    sent: int,
    rows: Sequence[Mapping[str, Any]],
    dead: Iterable[DeadLetter],
    counts: Counts,
    seconds: float,
    killed: int | None,
    drained: int | None,
    service_status: int | None,
    summary: Mapping[str, Any],
) -> DemoReport:
    """Compare what was sent with what came out."""
    dead = list(dead)
    errors = {
        str(getattr(letter.body, "path", letter.message_id)): f"{letter.error_type}: {letter.error}" for letter in dead
    }
    done = {str(row["path"]) for row in rows}
    missing = sorted(set(paths) - done - errors.keys())
    workers: dict[int, int] = {}
    for row in rows:
        workers[row["worker"]] = workers.get(row["worker"], 0) + 1
    checks = {
        f"{len(missing)} of {len(paths)} files are missing, the first is {missing[0] if missing else ''}": not missing,
        "a message was not sent": sent == len(set(paths)) == len(paths),
        "there are results of files that were not sent": done | errors.keys() <= set(paths),
        "a file is both among the results and among the dead letters": not done & errors.keys(),
        f"{counts.waiting} messages are still waiting": counts.waiting == 0,
        f"{len(done)} results, but {counts.settled} messages acknowledged": len(done) == counts.settled,
        "the broken file is not among the dead letters": broken in errors,
        f"the service left with exit status {service_status}": service_status == 0,
        "no worker was killed: there were too few files, or too few workers": killed is not None,
        "no worker was told to stop: there were too few files, or too few workers": drained is not None,
    }
    return DemoReport(
        files=len(paths),
        sent=sent,
        done=len(done),
        redelivered=sum(row["deliveries"] > 1 for row in rows) + sum(letter.delivery_count > 1 for letter in dead),
        run_twice=sum(row["runs"] > 1 for row in rows),
        dead_lettered=errors,
        seconds=seconds,
        workers=workers,
        killed=killed,
        drained=drained,
        service_exit_status=service_status,
        missing=missing,
        problems=[text for text, holds in checks.items() if not holds],
        summary=summary,
    )
