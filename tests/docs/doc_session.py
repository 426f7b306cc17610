"""Runs the examples of a page as its reader would: files saved, commands typed, services in the foreground, Ctrl-C."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from importlib.util import find_spec
from typing import TYPE_CHECKING

from doc_blocks import Block, pattern_of, steps_of

from ports import free_port

if TYPE_CHECKING:
    from pathlib import Path

    from doc_blocks import Step

PATIENCE = 60.0
"""Seconds after which something that should have happened counts as not happening; far above what it takes."""

CURL = """#!{python}
import sys, urllib.request
from argparse import ArgumentParser
parser = ArgumentParser()
parser.add_argument("-s", action="store_true")
for option in ("-X", "-H", "-d"):
    parser.add_argument(option)
parser.add_argument("url")
given = parser.parse_args()
headers = dict([given.H.split(": ", 1)]) if given.H else {{}}
data = given.d.encode() if given.d is not None else None
request = urllib.request.Request(given.url, data, headers, method=given.X)
try:
    answer = urllib.request.urlopen(request, timeout=30)
except urllib.error.HTTPError as error:
    answer = error
sys.stdout.write(answer.read().decode())
"""
"""As much of curl as the pages use, for machines that have none."""

SERVICE = re.compile(r"^(?:[A-Z_]+=\S+ )*(?:mainspring run|uvicorn|gunicorn|flask --app \S+ run) ")
PORT = re.compile(r"\b80(?:00|80)\b")


def is_missing(module: str) -> bool:
    """True if ``module`` is not installed here, and may be missing."""
    return os.environ.get("CI") != "true" and find_spec(module) is None


class Service:
    """A process in the foreground of a terminal, whose output is read as it comes."""

    def __init__(self, command: str, where: str, directory: Path, environment: dict[str, str]) -> None:
        self.where = where
        self.output = ""
        self.read = 0
        self.process = subprocess.Popen(
            ["bash", "-c", f"exec {command}"],
            cwd=directory,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._news = threading.Condition()
        self._reader = threading.Thread(target=self._listen, daemon=True)
        self._reader.start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._news:
                self.output += line
                self._news.notify_all()

    def expect(self, lines: tuple[str, ...], where: str) -> None:
        """Wait until it prints these lines, whatever it says before them: its log has an order of its own."""
        if not lines:
            return
        pattern = pattern_of(("...", *lines))
        deadline = time.monotonic() + PATIENCE
        with self._news:
            while (found := pattern.match(self.output, self.read)) is None:
                left = deadline - time.monotonic()
                over = not self._reader.is_alive() or left <= 0
                assert not over, _differs(where, lines, self.output[self.read :])
                self._news.wait(min(left, 0.2))
            self.read = found.end()

    def interrupt(self) -> None:
        """Ctrl-C: the terminal signals the whole group."""
        os.killpg(self.process.pid, signal.SIGINT)

    def wait(self) -> int:
        """Its exit status, with all its output read."""
        status = self.process.wait(PATIENCE)
        self._finish_reading()
        return status

    def kill(self) -> None:
        """End it and what it started, whatever state it is in."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(PATIENCE)
        self._finish_reading()

    def _finish_reading(self) -> None:
        self._reader.join(PATIENCE)
        if self.process.stdout is not None:
            self.process.stdout.close()


class Session:
    """A reader at a page: one directory, one shell after the other, at most a few services in the foreground."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._services: list[Service] = []
        self._finished: Service | None = None
        self._status = 0
        self._ports: dict[str, str] = {}
        binaries = os.path.dirname(sys.executable)
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "MAINSPRING_"))}
        given = [path for path in (os.environ.get("PYTHONPATH"),) if path]
        self._environment = {
            **clean,
            "PATH": f"{binaries}:{os.environ.get('PATH', '')}",
            "NO_COLOR": "1",
            "TERM": "dumb",
            "COLUMNS": "100",
            "PYTHONPATH": os.pathsep.join([self._line_by_line(directory / ".python"), *given]),
        }
        if shutil.which("curl") is None:
            self._make_curl(directory / ".bin")

    def _line_by_line(self, modules: Path) -> str:
        """Have Python write each printed line in one piece, as on a terminal: others write to the same pipe."""
        modules.mkdir()
        customize = "import sys\n\nsys.stdout.reconfigure(line_buffering=True, write_through=False)\n"
        (modules / "sitecustomize.py").write_text(customize, encoding="utf-8")
        return str(modules)

    def _make_curl(self, binaries: Path) -> None:
        binaries.mkdir()
        curl = binaries / "curl"
        curl.write_text(CURL.format(python=sys.executable), encoding="utf-8")
        curl.chmod(0o755)
        self._environment["PATH"] += f":{binaries}"

    def close(self) -> None:
        """Leave nothing running."""
        for service in self._services:
            service.kill()

    def play(self, block: Block) -> None:
        """Do with a block what its reader would."""
        if block.not_run is not None or (block.needs is not None and is_missing(block.needs)):
            return
        if block.title is not None:
            path = self.directory / block.title
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(self.with_free_ports(block.text), encoding="utf-8")
        elif block.language == "python":
            script = self.directory / f"_block_at_line_{block.line}.py"
            script.write_text(self.with_free_ports(block.text), encoding="utf-8")
            self._command(f"python {script.name}", (), block.place, last_word=False)
        elif block.language == "console":
            steps = steps_of(block)
            for step, following in zip(steps, [*steps[1:], None], strict=True):
                self._step(block, step, following)

    def _step(self, block: Block, step: Step, following: Step | None) -> None:
        where = f"{block.page.name}:{step.line}"
        expected = tuple(self.with_free_ports(line) for line in step.expected)
        command = None if step.command is None else self.with_free_ports(step.command)
        if command is not None and not (SERVICE.match(command) or step.interrupt):
            asked = following is not None and following.command == "echo $?"
            self._command(command, expected, where, last_word=asked)
            return
        if command is not None:
            self._services.append(Service(command, where, self.directory, self._environment))
            self._finished = None
        if not step.interrupt and step.command is None and self._finished is not None:
            self._finished.expect(expected, where)
            return
        assert self._services, f"{where}: output of a service, but none is running; a command begins with `$ `"
        service = self._services[-1]
        service.expect(expected, where)
        if step.interrupt:
            service.interrupt()
            self._status = service.wait()
            self._finished = self._services.pop()

    def _command(self, command: str, expected: tuple[str, ...], where: str, *, last_word: bool) -> None:
        """Run one command; an exit status other than 0 must be asked for by ``echo $?`` right after it."""
        ended = subprocess.run(
            ["bash", "-c", f"(exit {self._status}); {command}"],
            cwd=self.directory,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=PATIENCE * 2,
            check=False,
        )
        self._status = ended.returncode
        assert last_word or ended.returncode == 0, f"{where}: exit status {ended.returncode}\n{ended.stdout}"
        if expected:
            printed = ended.stdout if ended.stdout.endswith("\n") else f"{ended.stdout}\n"
            found = pattern_of(expected).fullmatch(printed)
            assert found is not None, _differs(where, expected, ended.stdout)

    def with_free_ports(self, text: str) -> str:
        """The page's ports may be taken here: each gets a free one, the same through the whole page."""
        return PORT.sub(lambda found: self._ports.setdefault(found[0], str(free_port())), text)


def _differs(where: str, expected: tuple[str, ...], found: str) -> str:
    return f"{where}: the page says\n{chr(10).join(expected)}\n\nbut this came:\n{found}"
