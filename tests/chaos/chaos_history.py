"""From the journals of the processes to what the judgement needs."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from chaos_calls import Call, Tick
from chaos_journal import Reader
from chaos_judge import Run

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from chaos_judge import Life


class Progress:
    """Follows the journals while they are written: what was accepted, how much was done, who is ready."""

    def __init__(self, directory: Path) -> None:
        self.done = 0
        self.accepted: dict[str, tuple[int, float]] = {}
        """The number of each id, and when it was known."""
        self._directory = directory
        self._readers: dict[str, tuple[Reader, Life]] = {}

    def follow(self, name: str, life: Life) -> None:
        """From now on look at this journal too; several lives can write it, one after the other."""
        reader = self._readers[name][0] if name in self._readers else Reader(self._directory / f"{name}.jsonl")
        self._readers[name] = (reader, life)

    def look(self) -> int:
        """Read on; how many effects there were."""
        for reader, life in list(self._readers.values()):
            for line in reader.lines():
                match line["what"]:
                    case "effect":  # a tick counts for nothing: it comes by itself
                        self.done += 1
                    case "accepted":
                        self.accepted.setdefault(line["id"], (line["number"], line["at"]))
                    case "ready" if line["at"] >= life.started:
                        life.ready, life.handlers = line["at"], line.get("handlers", 0)
        return self.done


def read_runs(directory: Path) -> list[Run]:
    """All runs of handlers, by the workers' journals."""
    return [run for path in directory.glob("worker-*.jsonl") for run in runs_of(path.stem, Reader(path).lines())]


def given_back(directory: Path) -> int:
    """How many deliveries were released before their handlers had begun."""
    number = 0
    for path in directory.glob("worker-*.jsonl"):
        begun: set[tuple[str, str]] = set()
        for line in Reader(path).lines():
            if line["what"] == "begun":
                begun.add((line["id"], line["receipt"]))
            elif line["what"] == "outcome" and line["outcome"] == "released":
                number += (line["id"], line["receipt"]) not in begun
    return number


def runs_of(process: str, lines: Iterable[dict[str, Any]]) -> list[Run]:
    """The runs of one worker.

    An outcome is told by the message and the receipt of the delivery: two mailboxes of a worker can give the same receipt. A
    server that forgot can have given the same one twice: then it is the first run's that has ended and of which no outcome is
    known.
    """
    runs: dict[int, Run] = {}
    unsettled: defaultdict[tuple[str, str], list[Run]] = defaultdict(list)
    for line in lines:
        match line["what"]:
            case "begun":
                run = Run(line["id"], line["receipt"], process, line["at"], line["leased"], hand=line["hand"])
                if "task" in line:
                    run.call = Call(line["task"], line["key"], line["number"])
                if "tick" in line:
                    run.tick = Tick(line["schedule"], line["tick"])
                runs[line["run"]] = run
                unsettled[run.message, run.receipt].append(run)
            case "effect" | "ticked":
                run = runs[line["run"]]
                run.effect, run.committed = line["at"], line.get("committed", False)
            case "committing":
                runs[line["run"]].committing = line["at"]
            case "ended":
                runs[line["run"]].ended, runs[line["run"]].how = line["at"], line["how"]
            case "outcome":
                run = next((each for each in unsettled[line["id"], line["receipt"]] if each.ended is not None), None)
                if run is not None:  # else it was given back, or given up, before its handler began
                    run.settled, run.outcome = line["at"], line["outcome"]
                    unsettled[run.message, run.receipt].remove(run)
    return list(runs.values())
