"""What tests of services share: a spawner that runs nothing, and plays commands on anyio's clock."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import anyio

from mainspring.services.commands import CommandResult, run_command
from mainspring.services.spawning import Launch, ProcessEnd, SpawnError

if TYPE_CHECKING:
    from mainspring.services.spawning import ProcessListener


@dataclass
class Play:
    """What a command does: it writes lines, and ends after some seconds. ``leaves``: seconds that its leftovers live on."""

    lines: tuple[str, ...] = ()
    seconds: float = 0.0
    returncode: int = 0
    leaves: float = 0.0
    refused: str | None = None
    hard_to_kill: float = 0.0


class PlayedProcess:
    """A process that a :class:`PlayingSpawner` plays."""

    def __init__(self, play: Play, listener: ProcessListener) -> None:
        self.pid = 1
        self.play = play
        self.listener = listener
        self.began = anyio.current_time()
        self.killed_at: float | None = None

    async def wait(self) -> ProcessEnd:
        await anyio.sleep(self.play.seconds)
        for line in self.play.lines:
            self.listener.on_line("stdout", line)
        return ProcessEnd(self.play.returncode)

    async def wait_empty(self) -> None:
        if self.killed_at is None:
            await anyio.sleep_until(self.began + self.play.seconds + self.play.leaves)
        else:
            await anyio.sleep_until(self.killed_at + self.play.hard_to_kill)

    def send_signal(self, signum: int) -> None:
        pass

    def kill(self) -> None:
        if self.killed_at is None:
            self.killed_at = anyio.current_time()

    @property
    def gone(self) -> bool:
        """True if nothing of it is left."""
        end = self.began + self.play.seconds + self.play.leaves
        if self.killed_at is not None:
            end = min(end, self.killed_at + self.play.hard_to_kill)
        return anyio.current_time() >= end


@dataclass
class PlayingSpawner:
    """Plays commands by their names."""

    plays: dict[str, Play] = field(default_factory=dict)
    processes: list[PlayedProcess] = field(default_factory=list)

    async def __aenter__(self) -> PlayingSpawner:
        return self

    async def __aexit__(self, *exc: object) -> None:
        pass

    async def spawn(self, launch: Launch, listener: ProcessListener) -> PlayedProcess:
        await anyio.lowlevel.checkpoint()
        play = self.plays[launch.command[0]]
        if play.refused is not None:
            raise SpawnError(play.refused)
        self.processes.append(PlayedProcess(play, listener))
        return self.processes[-1]

    async def run(self, command: tuple[str, ...]) -> CommandResult:
        """Run a command as a replica does for its probes and hooks."""
        return await run_command(self, Launch("shop", 1, command), timeout=1000)

    @property
    def commands(self) -> list[Play]:
        """What was started, in order."""
        return [process.play for process in self.processes]


async def no_command(command: tuple[str, ...]) -> CommandResult:
    """Run none: the probe or hook is no command."""
    raise AssertionError(command)
