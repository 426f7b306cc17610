"""Running many behaviours and saying how they went."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from unittest import SkipTest

import anyio

from mainspring.core.process import async_library
from mainspring.errors import ConfigError
from mainspring.testing.mailbox_contract.harness import Backend, Behaviour, ContractError, Harness, raises

if TYPE_CHECKING:
    from collections.abc import Iterable


@dataclass
class Report:
    """How a backend did: the names of the behaviours, and why where they did not pass. ``str(report)`` is for people."""

    backend: str
    passed: list[str] = field(default_factory=list)
    failed: dict[str, BaseException] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    undeclared: list[str] = field(default_factory=list)
    """Those of ``skipped`` that the backend's capabilities do not account for."""
    lacking: frozenset[str] = frozenset()
    """What the contract checks and the backend declares that it cannot do: names of ``Capabilities``, and "serializes"."""
    claims: dict[str, str] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Nothing failed, something passed, and no more is skipped than the capabilities declare."""
        return not self.failed and not self.undeclared and bool(self.passed)

    def __str__(self) -> str:
        verdict = "keeps the contract" if self.ok else "does not keep the contract"
        lines = [
            f"{self.backend} {verdict}: {len(self.passed)} passed, {len(self.failed)} failed, {len(self.skipped)} skipped"
        ]
        for name, error in self.failed.items():
            lines.append(f"  failed   {name}: {error!r}\n           {self.claims.get(name, '')}")
        for name, reason in self.skipped.items():
            lines.append(f"  skipped  {name}: {reason}")
        if self.undeclared:
            lines.append(f"  {len(self.undeclared)} skipped that the capabilities do not declare")
        return "\n".join(lines)


async def run_all(
    backend: Backend,
    behaviours: list[Behaviour],
    *,
    only: Iterable[str] | None,
    exclude: Iterable[str],
    concurrency: int,
) -> Report:
    """See :func:`mainspring.testing.mailbox_contract.run`."""
    wanted = None if only is None else set(only)
    left_out = set(exclude)
    known = {behaviour.name for behaviour in behaviours}
    unknown = ((wanted or set()) | left_out) - known
    if unknown:
        raise ConfigError(f"the contract has no behaviour named {', '.join(sorted(unknown))}")
    if concurrency < 1:
        raise ConfigError(f"concurrency must be at least 1, not {concurrency}")
    harness = Harness(backend)
    lacking = frozenset(need for behaviour in behaviours for need in behaviour.needs if not harness.can(need))
    report = Report(harness.name, claims={behaviour.name: behaviour.claim for behaviour in behaviours}, lacking=lacking)
    if async_library() not in harness.capabilities.async_backends:
        await _check_refusal(harness, report)
    limiter = anyio.CapacityLimiter(concurrency)
    async with anyio.create_task_group() as group:
        for behaviour in behaviours:
            if wanted is not None and behaviour.name not in wanted:
                continue
            if behaviour.name in left_out:
                report.skipped[behaviour.name] = "left out by the caller"
                if behaviour.missing(harness) is None:
                    report.undeclared.append(behaviour.name)
                continue
            await limiter.acquire_on_behalf_of(behaviour)
            group.start_soon(_run_one, behaviour, backend, report, limiter, name=behaviour.name)
    return report


async def _run_one(behaviour: Behaviour, backend: Backend, report: Report, limiter: anyio.CapacityLimiter) -> None:
    try:
        await behaviour(backend)
    except SkipTest as reason:
        report.skipped[behaviour.name] = str(reason)
    except Exception as error:
        report.failed[behaviour.name] = error
    else:
        report.passed.append(behaviour.name)
    finally:
        limiter.release_on_behalf_of(behaviour)


async def _check_refusal(harness: Harness, report: Report) -> None:
    """On an event loop that the backend does not run on, opening says so."""
    name = "opening_on_an_unsupported_event_loop_is_a_config_error"
    try:
        with raises(ConfigError, f"opening it on {async_library()}"):
            async with harness.open():
                pass
    except ContractError as error:
        report.failed[name] = error
    else:
        report.passed.append(name)
