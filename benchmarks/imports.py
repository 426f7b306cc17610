"""How long `import mainspring` takes beside the peers' imports, each in a fresh interpreter."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from common import Row, median, peer, quick, report, version

ROUNDS = 5 if quick() else 15


def seconds(python: Path, code: str) -> float:
    began = time.perf_counter()
    subprocess.run([str(python), "-c", code], check=True)
    return time.perf_counter() - began


def import_time(python: Path, module: str) -> float:
    """Seconds that the import adds to an interpreter that does nothing, in pairs."""
    seconds(python, f"import {module}")
    return median([seconds(python, f"import {module}") - seconds(python, "pass") for _ in range(ROUNDS)])


def main() -> None:
    ours = import_time(Path(sys.executable), "mainspring")
    report(
        Row("import mainspring / 100 ms", f"{ours * 1e3:.1f} ms", "100 ms", ours / 0.1, 1.0, at_most=True,
            note=f"median of {ROUNDS}, a fresh interpreter each, less an empty one")
    )  # fmt: skip
    names = import_time(Path(sys.executable), "mainspring; from mainspring import LoopGroup, MainLoop, open_mailbox")
    for name, packages in (("saq", ("saq[redis]", "typing_extensions")), ("arq", ("arq",)), ("taskiq", ("taskiq",))):
        python = peer(name, *packages)
        if python is None:
            report(
                Row(f"import mainspring / import {name}", f"{ours * 1e3:.1f} ms", "not installable here", None, None)
            )
            continue
        theirs = import_time(python, name)
        report(
            Row(f"import mainspring / import {name}", f"{ours * 1e3:.1f} ms", f"{theirs * 1e3:.1f} ms", ours / theirs, 1.0,
                at_most=True, note=f"{name} {version(python, name)}"),
            Row(f"import of LoopGroup, MainLoop, open_mailbox / import {name}", f"{names * 1e3:.1f} ms",
                f"{theirs * 1e3:.1f} ms", names / theirs, None, at_most=True,
                note="mainspring imports at first use: this is what a service pays")
        )  # fmt: skip


if __name__ == "__main__":
    main()
