"""The loops of a group, each as an actor with a name of its own."""

from __future__ import annotations

from collections.abc import Iterable

from mainspring.errors import ConfigError
from mainspring.worker.actor import LoopActor
from mainspring.worker.adapter import ForeignLoop
from mainspring.worker.runnable import AnyRunnable, Runnable


def actors_of(loops: Iterable[AnyRunnable]) -> list[LoopActor]:
    """The actors of the loops; one that is an actor already stays as it is."""
    if isinstance(loops, Runnable) or not isinstance(loops, Iterable):
        raise ConfigError(f"LoopGroup: its first argument is a list of loops, not {loops!r}")
    actors: list[LoopActor] = []
    names: set[str] = set()
    for loop in loops:
        if not isinstance(loop, Runnable):
            raise ConfigError(
                f"LoopGroup: {loop!r} is no loop; it needs run(), shutdown(), running and heartbeat (see Runnable)"
            )
        actor = loop if isinstance(loop, LoopActor) else LoopActor(loop)
        if any(_own(other) is _own(actor) for other in actors):
            raise ConfigError(f"LoopGroup: {loop!r} stands in it twice")
        unique, count = actor.name, 1
        while unique in names:
            count += 1
            unique = f"{actor.name}-{count}"
        names.add(unique)
        actor.loop.name = unique
        actors.append(actor)
    if not actors:
        raise ConfigError("LoopGroup: it needs at least one loop")
    return actors


def _own(actor: LoopActor) -> AnyRunnable:
    """What the user made."""
    return actor.loop.loop if isinstance(actor.loop, ForeignLoop) else actor.loop
