"""The supervisors that are compared, each set up as its documentation says: its files, its commands, its way to stop."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING

from common import peer, version

if TYPE_CHECKING:
    from supervisors.running import Service

CONFIG = Path(__file__).parent / "config"
ENDLESS = 1_000_000
ANSWER = 10.0
"""Seconds that a status command may take."""


def filled(file: str, **values: object) -> str:
    return Template((CONFIG / file).read_text()).substitute({key: str(value) for key, value in values.items()})


def depth(service: Service, services: list[Service]) -> int:
    """How many services must be ready before this one."""
    before = next((other for other in services if other.name == service.after), None)
    return 0 if before is None else 1 + depth(before, services)


class System:
    """One supervisor."""

    title = ""
    tells = True
    """It tells when its services run."""
    answers = True
    """It has a command that tells their state."""

    def missing(self) -> str | None:
        """Why it is not measured here."""
        return None

    def version(self) -> str:
        return ""

    def environment(self, home: Path) -> dict[str, str]:
        return dict(os.environ)

    def write(self, home: Path, services: list[Service]) -> None:
        raise NotImplementedError

    def command(self, home: Path) -> list[str]:
        raise NotImplementedError

    def status(self, home: Path, names: list[str]) -> str:
        """What its status command prints of these services."""
        raise NotImplementedError

    def all_running(self, home: Path, names: list[str]) -> bool:
        raise NotImplementedError

    def stop(self, process: subprocess.Popen[bytes], home: Path, services: list[Service]) -> None:
        """Have it stop all services and end."""
        process.send_signal(signal.SIGTERM)

    def output(self, home: Path, service: str) -> list[Path]:
        """The files with the output of a service, in order."""
        return [home / "logs" / service]

    @staticmethod
    def run(*command: str, cwd: Path | None = None) -> str:
        return subprocess.run(
            command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=ANSWER, check=False
        ).stdout


class Mainspring(System):
    """``mainspring up`` with a YAML file. Its log tells when all services run."""

    title = "Mainspring"

    def missing(self) -> str | None:
        help_text = self.run(sys.executable, "-m", "mainspring", "up", "--help")
        return None if "FILE" in help_text else "mainspring up is not there yet"

    def write(self, home: Path, services: list[Service]) -> None:
        said = {"services": {one.name: self.keys(one, home) for one in services}}
        (home / "services.yaml").write_text(json.dumps(said, indent=1))  # JSON is YAML

    @staticmethod
    def keys(service: Service, home: Path) -> dict[str, object]:
        patience = service.patience
        lifecycle: dict[str, object] = {
            "shutdown": {"timeout": patience + 10, "drain_timeout": patience, "force_kill_timeout": 5}
        }
        if service.endless:
            lifecycle["restart_policy"] = {"max_retries": ENDLESS, "initial_delay": 0}
            lifecycle["startup"] = {"max_retries": ENDLESS}
        said: dict[str, object] = {"command": service.command(home), "lifecycle": lifecycle}
        if not service.again:
            said["restart"] = "temporary"
        if service.after is not None:
            said["depends_on"] = [service.after]
        if service.program == "ordered":
            said["ready_line"] = "is ready"
        return said

    def command(self, home: Path) -> list[str]:
        return [
            sys.executable, "-m", "mainspring", "up", str(home / "services.yaml"), "--control", str(home / "control.sock"),
        ]  # fmt: skip

    def status(self, home: Path, names: list[str]) -> str:
        return self.run(sys.executable, "-m", "mainspring", "status", "--url", f"unix:{home}/control.sock")

    def all_running(self, home: Path, names: list[str]) -> bool:
        return "services: running (" in (home / "out").read_text(errors="replace")

    def output(self, home: Path, service: str) -> list[Path]:
        return [home / "out"]


class Supervisord(System):
    """supervisord with supervisorctl over its socket."""

    title = "supervisord"

    def __init__(self) -> None:
        python = peer("supervisor", "supervisor")
        self.python = python
        self.bin = python.parent if python else Path()

    def missing(self) -> str | None:
        return None if self.python else "not installable here"

    def version(self) -> str:
        return version(self.python, "supervisor") if self.python else ""

    def write(self, home: Path, services: list[Service]) -> None:
        text = filled("supervisord.conf", home=home)
        for service in services:
            text += filled(
                "supervisord-program.conf", home=home, name=service.name, command=" ".join(service.command(home)),
                priority=depth(service, services), again=str(service.again).lower(),
                tries=ENDLESS if service.endless else 3, patience=service.patience,
            )  # fmt: skip
            if not service.again:
                text += "startsecs=0\n"  # as documented for a program that may end at once
        if not any(service.after for service in services):  # else it stops one after the other
            text += f"\n[group:all]\nprograms={','.join(service.name for service in services)}\n"
        (home / "supervisord.conf").write_text(text)

    def command(self, home: Path) -> list[str]:
        return [str(self.bin / "supervisord"), "-c", str(home / "supervisord.conf")]

    def status(self, home: Path, names: list[str]) -> str:
        return self.run(str(self.bin / "supervisorctl"), "-c", str(home / "supervisord.conf"), "status")

    def all_running(self, home: Path, names: list[str]) -> bool:
        return self.status(home, names).count(" RUNNING ") == len(names)


class Circus(System):
    """circusd with circusctl over its socket."""

    title = "circus"

    def __init__(self, check_delay: float = 5.0) -> None:
        python = peer("circus", "circus")
        self.python = python
        self.bin = python.parent if python else Path()
        self.check_delay = check_delay
        """Seconds between two looks at the processes: 5 where nothing is said."""

    def missing(self) -> str | None:
        return None if self.python else "not installable here"

    def version(self) -> str:
        return version(self.python, "circus") if self.python else ""

    def environment(self, home: Path) -> dict[str, str]:
        return {**os.environ, "PYTHONPATH": str(CONFIG)}

    def write(self, home: Path, services: list[Service]) -> None:
        text = filled("circus.ini", home=home, check_delay=self.check_delay)
        for service in services:
            text += filled(
                "circus-watcher.ini", home=home, name=service.name, command=" ".join(service.command(home)),
                priority=10 - depth(service, services), again=service.again, tries=-1 if service.endless else 5,
                patience=service.patience,
            )  # fmt: skip
            if service.after is not None:
                text += "hooks.before_start = circus_hooks.wait_until_ready\n"
                text += f"\n[env:{service.name}]\nAFTER = {home}/{service.after}.ready\n"
        (home / "circus.ini").write_text(text)

    def command(self, home: Path) -> list[str]:
        return [str(self.bin / "circusd"), str(home / "circus.ini")]

    def status(self, home: Path, names: list[str]) -> str:
        return self.run(str(self.bin / "circusctl"), "--endpoint", f"ipc://{home}/ctl", "status")

    def all_running(self, home: Path, names: list[str]) -> bool:
        return self.status(home, names).count(": active") == len(names)

    def output(self, home: Path, service: str) -> list[Path]:
        return [home / "logs" / service, home / "logs" / f"{service}.err"]


class Honcho(System):
    """honcho with a Procfile. It restarts nothing: the end of a process ends all."""

    title = "honcho"
    tells = False
    answers = False

    def __init__(self) -> None:
        python = peer("honcho", "honcho")
        self.python = python
        self.bin = python.parent if python else Path()

    def missing(self) -> str | None:
        return None if self.python else "not installable here"

    def version(self) -> str:
        return version(self.python, "honcho") if self.python else ""

    def write(self, home: Path, services: list[Service]) -> None:
        lines = [f"{service.name}: exec {' '.join(service.command(home))}\n" for service in services]
        (home / "Procfile").write_text("".join(lines))

    def command(self, home: Path) -> list[str]:
        return [str(self.bin / "honcho"), "-f", str(home / "Procfile"), "start"]

    def output(self, home: Path, service: str) -> list[Path]:
        return [home / "out"]


class Directories(System):
    """s6 and runit: a directory for each service, with a program ``run``, and ``log/run`` where its output matters."""

    package = ""
    program = ""

    def missing(self) -> str | None:
        return None if shutil.which(self.program) else f"not installed here (apt install {self.package})"

    def version(self) -> str:
        return self.run("dpkg-query", "-W", "-f", "${Version}", self.package)

    def write(self, home: Path, services: list[Service]) -> None:
        for service in services:
            at = home / "services" / service.name
            at.mkdir(parents=True)
            self.write_service(at, service, home)

    def directories(self, home: Path, names: list[str]) -> list[str]:
        return [str(home / "services" / name) for name in names]

    def write_service(self, at: Path, service: Service, home: Path) -> None:
        raise NotImplementedError

    @staticmethod
    def script(path: Path, *lines: str) -> None:
        path.parent.mkdir(exist_ok=True)
        path.write_text("#!/bin/sh\n" + "\n".join(lines) + "\n")
        path.chmod(0o755)

    def output(self, home: Path, service: str) -> list[Path]:
        logs = home / "logs" / service
        return [*sorted(logs.glob("@*")), logs / "current"]


class S6(Directories):
    """s6-svscan with an s6-supervise for each service, and an s6-log where output matters."""

    title = "s6"
    package = "s6"
    program = "s6-svscan"

    def write_service(self, at: Path, service: Service, home: Path) -> None:
        waits = [f"s6-svwait -U -t 30000 ../{service.after} || exit 1"] if service.after else []
        (at / "notification-fd").write_text("3\n")  # what was ready is restarted at once, all else after a second
        self.script(at / "run", "exec 2>&1", *waits, "export NOTIFY_FD=3", f"exec {' '.join(service.command(home))}")
        (at / "timeout-kill").write_text(f"{service.patience * 1000}\n")
        if not service.again:
            self.script(at / "finish", "exit 125")
        if service.logged:
            self.script(at / "log" / "run", f"exec s6-log n1000 s16777215 {home}/logs/{service.name}")

    def command(self, home: Path) -> list[str]:
        return ["s6-svscan", "-c", "1000", str(home / "services")]

    def status(self, home: Path, names: list[str]) -> str:
        return "".join(self.run("s6-svstat", one) for one in self.directories(home, names))

    def all_running(self, home: Path, names: list[str]) -> bool:
        directories = self.directories(home, names)
        return subprocess.run(["s6-svwait", "-U", "-t", "1000", *directories], check=False).returncode == 0


class Runit(Directories):
    """runsvdir with a runsv for each service, and an svlogd where output matters."""

    title = "runit"
    package = "runit"
    program = "runsvdir"

    def write_service(self, at: Path, service: Service, home: Path) -> None:
        waits = [f"sv -w 30 start ../{service.after} || exit 1"] if service.after else []
        if service.program == "ordered":
            self.script(at / "check", f"exec test -e {home}/{service.name}.ready")
        self.script(at / "run", "exec 2>&1", *waits, f"exec {' '.join(service.command(home))}")
        if not service.again:
            self.script(at / "finish", "exec sv down .")
        if service.logged:
            logs = home / "logs" / service.name
            logs.mkdir()
            (logs / "config").write_text("s16777215\nn1000\n")
            self.script(at / "log" / "run", f"exec svlogd {logs}")

    def command(self, home: Path) -> list[str]:
        return ["runsvdir", "-P", str(home / "services")]

    def status(self, home: Path, names: list[str]) -> str:
        return self.run("sv", "status", *self.directories(home, names))

    def all_running(self, home: Path, names: list[str]) -> bool:
        return self.status(home, names).count("run: ") >= len(names)

    def stop(self, process: subprocess.Popen[bytes], home: Path, services: list[Service]) -> None:
        """As Debian's ``/etc/runit/3`` does: force-stop, which alone ends by SIGKILL, then the runsv."""
        longest = str(max(service.patience for service in services))
        names = [service.name for service in services]
        command = ["sv", "-w", longest, "force-stop", *self.directories(home, names)]
        subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
        process.send_signal(signal.SIGHUP)  # it has each runsv exit


def systems() -> list[System]:
    return [Mainspring(), Supervisord(), Circus(), Honcho(), S6(), Runit()]
