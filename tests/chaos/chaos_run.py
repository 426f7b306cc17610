"""One run on one backend: plan, carry out, judge."""

from __future__ import annotations

from typing import TYPE_CHECKING

from chaos_fleet import Fleet
from chaos_judge import judge
from chaos_plan import Settings
from chaos_report import Outcome

if TYPE_CHECKING:
    from pathlib import Path

    from chaos_backends import Backend


def full(messages: int, seed: int) -> Settings:
    """The settings of a long run: a fault of each kind for every 2,500 messages, and three at least."""
    return Settings(messages, seed, each=max(3, messages // 2_500), must_claim_ahead=messages >= 2_000)


def short(messages: int, seed: int) -> Settings:
    """Those of a run of seconds: the handlers take longer, so that the faults find somebody at work."""
    return Settings(
        messages, seed, each=3, concurrency=8, takes=0.05, ahead=300, quiet=60, burst=250, per_second=8,
        must_claim_ahead=False,
    )  # fmt: skip


async def one(backend: Backend, settings: Settings, directory: Path) -> Outcome:
    """A run and its judgement."""
    fleet = Fleet(backend, settings, directory)
    history = await fleet.run()
    seconds = max(0.0, fleet.ended - fleet.began)
    return Outcome(backend.name, history, judge(history), fleet.faults, seconds)
