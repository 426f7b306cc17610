"""The part of ``mainspring check`` about limits of tasks: it prints them, and finds limits that cannot be reached."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mainspring.group.calibration import Rule, retries, seconds, span
from mainspring.mailbox.limiters import Blocks
from mainspring.tasks.runs import TaskHandlers
from mainspring.validation import as_seconds, counted
from mainspring.worker.main_loop import MainLoop

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mainspring.group.calibration import Timeouts
    from mainspring.group.group import LoopGroup
    from mainspring.policies import Rate
    from mainspring.tasks.task import Task


def limit_rules(group: LoopGroup) -> list[Rule]:
    """Return the rules of the limits of its tasks, judged."""
    return [rule for loop, task in _tasks(group) for rule in (*_expiry(loop, task), *_sizes(loop, task))]


def limit_lines(group: LoopGroup) -> list[str]:
    """Return a line for each task with limits: what may run, and what holds up a key."""
    whole = {
        task.tasks: f"{loop.name}: {task.tasks.max_concurrency} messages of the mailbox at once in the whole fleet"
        for loop, task in _tasks(group)
        if task.tasks.max_concurrency is not None
    }
    return [*whole.values(), *(_line(loop, task) for loop, task in _tasks(group) if task.handling.is_limited)]


def retry_lines(group: LoopGroup, loops: list[Timeouts]) -> list[str]:
    """Return a line for each loop, or for each of the policies by which its tasks are tried again."""
    by_loop: dict[str, dict[Timeouts, list[str]]] = {timeouts.loop: {} for timeouts in loops}
    known = {timeouts.loop: timeouts for timeouts in loops}
    for loop, task in _tasks(group):
        retry, dead_letter = task.handling.retry or loop.retry, task.handling.dead_letter or loop.dead_letter
        own = replace(
            known[loop.name],
            max_attempts=dead_letter.max_attempts,
            max_crashes=dead_letter.max_crashes,
            horizon=retry.horizon(dead_letter.max_attempts),
        )
        by_loop[loop.name].setdefault(own, []).append(task.name)
    lines: list[str] = []
    for name, policies in by_loop.items():
        if set(policies) <= {known[name]}:
            lines.append(retries(known[name]))
        else:
            lines += [retries(own, f"call of {', '.join(names)}") for own, names in policies.items()]
    return lines


def _tasks(group: LoopGroup) -> list[tuple[MainLoop, Task[..., Any]]]:
    """Return the tasks of a group, each with the first loop that runs it. Import what registers them."""
    found: dict[Task[..., Any], MainLoop] = {}
    for loop in group.loops:
        if isinstance(loop, MainLoop) and isinstance(loop.handlers, TaskHandlers):
            loop.handlers.tasks.import_modules()
            for task in loop.handlers.tasks.registered.values():
                found.setdefault(task, loop)
    return [(loop, task) for task, loop in found.items()]


def _line(loop: MainLoop, task: Task[..., Any]) -> str:
    limits = task.handling.limits
    parts = [
        *_rate("", limits.rate),
        *([f"{limits.concurrency} at once"] if limits.concurrency is not None else []),
        *_rate(" of each key", limits.key_rate),
        *_of_key(loop, task),
    ]
    lease = seconds(loop.visibility_timeout)
    return (
        f"{loop.name}: task {task.name} in the whole fleet: {', '.join(parts)}; what ran in a worker that is killed counts"
        f" for up to {lease} more"
    )


def _rate(of: str, rate: Rate | None) -> list[str]:
    if rate is None:
        return []
    at_once = f" (up to {rate.burst} together)" if rate.burst > 1 else ""
    return [f"{counted(rate.limit, 'call')}{of} in {seconds(float(as_seconds(rate.per)))}{at_once}"]


def _of_key(loop: MainLoop, task: Task[..., Any]) -> list[str]:
    limits = task.handling.limits
    if limits.key_concurrency is None:
        return []
    said = f"{limits.key_concurrency} of each key at once"
    if limits.blocks is Blocks.RUNNING:
        return [said]
    dead_letter = task.handling.dead_letter or loop.dead_letter
    retry = task.handling.retry or loop.retry
    longest = span(retry.horizon(dead_letter.max_attempts)[1])
    after = ", and a dead letter until it is replayed and done, or purged" if limits.blocks is Blocks.DEAD else ""
    return [f"{said}: a failing one holds up its key for up to {longest}{after}"]


def _expiry(loop: MainLoop, task: Task[..., Any]) -> Iterator[Rule]:
    """Require of a call that expires that more than one of its kind can begin before that."""
    expires_in = as_seconds(task.sending.expires_in)
    limits = task.handling.limits
    for name, rate in (("rate", limits.rate), ("key_rate", limits.key_rate)):
        if expires_in is None or rate is None:
            continue
        yield Rule(
            f"a call of task {task.name} has its turn before it expires",
            f"{task.name}: expires_in > the interval of {name}",
            float(expires_in),
            rate.interval,
            expires_in > rate.interval,
            f"let the calls of {task.name} expire after more than {seconds(rate.interval)}, or raise its {name}",
            "expires_in",
            rate.interval,
            loop.name,
        )


def _sizes(loop: MainLoop, task: Task[..., Any]) -> Iterator[Rule]:
    """Require of the numbers of a task that each can be reached."""
    limits = task.handling.limits
    sizes = [
        ("batch", task.handling.batch, "concurrency", limits.concurrency),
        ("key_concurrency", limits.key_concurrency, "concurrency", limits.concurrency),
        ("batch", task.handling.batch, "max_concurrency", task.tasks.max_concurrency),
        ("concurrency", limits.concurrency, "max_concurrency", task.tasks.max_concurrency),
    ]
    for name, value, over, most in sizes:
        if value is None or most is None:
            continue
        yield Rule(
            f"the {name} of task {task.name} can be reached",
            f"{task.name}: {name} <= {over}",
            value,
            most,
            value <= most,
            f"no more than {most} run at once: set {name}={most} for {task.name}, or raise {over}",
            name,
            most,
            loop.name,
            unit="",
        )
