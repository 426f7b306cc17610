"""What an idle service costs: processor time of 1,000 waiting loops, resident memory, the guardian's memory."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import anyio

from common import HERE, MIB, Row, on_uvloop, quick, report
from mainspring import LoopGroup, MainLoop, open_mailbox

LOOPS = 1_000
SECONDS = 5.0 if quick() else 35.0
"""Long enough for each loop to begin a new long poll of 30 s."""

SLEEPER = """
import importlib, json, sys, time
for name in json.loads(sys.stdin.readline()):
    try:
        importlib.import_module(name)
    except Exception:
        pass
print("up", flush=True)
time.sleep(600)
"""


def cpu_seconds() -> float:
    """Processor seconds of this process and of its guardian so far."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    total = usage.ru_utime + usage.ru_stime
    return total + sum(map(seconds_of, children(os.getpid())))


def seconds_of(pid: int) -> float:
    """Processor seconds of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def waiting_loops(url: str) -> float:
    """The share of one core that 1,000 loops take while they wait for work (block watch and watchdog included)."""

    async def handle(job: str) -> None:
        """Nothing comes."""

    loops = [MainLoop(open_mailbox(f"{url}{n}"), handle, name=f"loop-{n}") for n in range(LOOPS)]
    async with LoopGroup(loops, guardian=True):
        await anyio.sleep(2.0)
        before, began = cpu_seconds(), time.perf_counter()
        await anyio.sleep(SECONDS)
        return (cpu_seconds() - before) / (time.perf_counter() - began)


def resident(pid: int) -> int:
    """Resident bytes of a process (VmRSS)."""
    status = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmRSS"))


def children(pid: int) -> list[int]:
    return [
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    ]


def memory() -> list[Row]:
    """The idle service beside a process that has only imported the same modules, and its guardian."""
    dump = (
        "import sys, json, atexit; from mainspring.cli import main; "
        "atexit.register(lambda: open(__import__('os').environ['BENCH_MODULES'], 'w').write(json.dumps("
        "[n for n in sys.modules if not n.startswith(('mainspring', 'ours', '__'))]))); "
        "sys.argv = ['mainspring', 'run', 'ours:group']; main()"
    )
    with tempfile.TemporaryDirectory() as name:
        modules = Path(name) / "modules.json"
        environment = {
            **os.environ, "BENCH_DB": f"{name}/jobs.db", "BENCH_HEALTH_PORT": "0", "BENCH_MODULES": str(modules),
        }  # fmt: skip
        service = subprocess.Popen(
            [sys.executable, "-c", dump], cwd=HERE / "services", env=environment, stderr=subprocess.PIPE, text=True
        )
        assert service.stderr is not None
        for line in service.stderr:
            if "mainspring: running" in line:
                break
        time.sleep(2.0)
        ours = resident(service.pid)
        guardians = [resident(child) for child in children(service.pid)]
        service.send_signal(signal.SIGTERM)
        service.communicate()
        names = json.loads(modules.read_text())
    bare = subprocess.Popen([sys.executable, "-c", SLEEPER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert bare.stdin is not None
    assert bare.stdout is not None
    bare.stdin.write(json.dumps(names) + "\n")
    bare.stdin.flush()
    bare.stdout.readline()
    time.sleep(1.0)
    theirs = resident(bare.pid)
    bare.kill()
    bare.communicate()
    extra = (ours - theirs) / MIB
    rows = [
        Row("idle service: resident memory above its imports / 10 MiB", f"{ours / MIB:.1f} MiB", f"{theirs / MIB:.1f} MiB",
            [extra / 10], 1.0, at_most=True, note=f"{extra:+.1f} MiB, {len(names)} modules, VmRSS")
    ]  # fmt: skip
    rows += [
        Row("guardian: resident memory / 12 MiB", f"{size / MIB:.1f} MiB", "12 MiB", [size / MIB / 12], 1.0, at_most=True,
            note="VmRSS")
        for size in guardians
    ]  # fmt: skip
    return rows


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        for label, url in (("memory", "memory://idle-"), ("SQLite", f"sqlite:///{name}/idle.db?name=q")):
            share = on_uvloop(waiting_loops, url)
            report(
                Row(f"idle: {LOOPS:,} loops waiting on {label} / 2 % of a core", f"{share:.2%}", "2 %", [share / 0.02], 1.0,
                    at_most=True, note=f"uvloop, {SECONDS:.0f} s, one mailbox each, with watchdog and guardian")
            )  # fmt: skip
    report(*memory())


if __name__ == "__main__":
    main()
