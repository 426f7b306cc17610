"""From the journals of the processes to what the judgement needs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from chaos_journal import Reader
from chaos_judge import Run

if TYPE_CHECKING:
    from pathlib import Path

    from chaos_judge import Life


class Progress:
    """Follows the journals while they are written: what was accepted, how much was done, who is ready."""

    def __init__(self, directory: Path) -> None:
        self.done = 0
        self.accepted: dict[str, int] = {}
        """The number of each id."""
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
                    case "effect":
                        self.done += 1
                    case "accepted":
                        self.accepted[line["id"]] = line["number"]
                    case "ready" if line["at"] >= life.started:
                        life.ready = line["at"]
        return self.done


def read_runs(directory: Path) -> list[Run]:
    """All runs of handlers, by the workers' journals."""
    found = []
    for path in directory.glob("worker-*.jsonl"):
        runs: dict[str, Run] = {}
        for line in Reader(path).lines():
            if line["what"] == "begun":
                run = Run(line["id"], line["run"], path.stem, line["at"], line["leased"])
                runs[line["run"]] = run
                continue
            run = runs.get(line.get("run"))
            if run is None:  # it was given back, or given up, before its handler began
                continue
            match line["what"]:
                case "effect":
                    run.effect = line["at"]
                case "ended":
                    run.ended, run.how = line["at"], line["how"]
                case "outcome":
                    run.settled, run.outcome = line["at"], line["outcome"]
        found += runs.values()
    return found
