"""What went wrong where a process could not be started, in one line: the program, the cause, and what to do."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

from mainspring.services.spawning import SpawnError

if TYPE_CHECKING:
    from mainspring.services.spawning import Launch

TOO_MANY_FILES = "too many open files: raise the limit of the supervisor (ulimit -n)"


def spawn_error(launch: Launch, cause: str) -> SpawnError:
    """Return the error for a launch that failed for this cause."""
    return SpawnError(f"service {launch.service!r}: {launch.command[0]!r} cannot be started: {cause}")


def cause_of(launch: Launch, stage: str, number: int, detail: str) -> str:
    """Return what failed at a stage of the start, and what to do. ``number``: the errno; ``detail``: what it says."""
    said = detail or os.strerror(number)
    if number in (errno.EMFILE, errno.ENFILE):
        return TOO_MANY_FILES
    if number == errno.ENOMEM:
        return "the system is out of memory: free some, or start fewer processes"
    if number == errno.EAGAIN:
        return "there are too many processes: raise the limit (resources.processes, ulimit -u, pids.max) or start fewer"
    if stage == "user":
        if number == errno.EPERM:
            return (
                f"there is no permission to change to user {launch.user!r}: run the supervisor as root, or drop 'user'"
            )
        return f"it cannot change to user {launch.user!r}: {said}"
    if stage == "directory":
        what = "there is no directory" if number in (errno.ENOENT, errno.ENOTDIR) else f"{said}:"
        return f"{what} {launch.directory!r}: create it, or correct 'working_directory'"
    if stage == "niceness":
        return f"niceness {launch.resources.niceness} is refused ({said}): only root can go below the supervisor's own"
    if stage.startswith("limits "):
        name = stage.removeprefix("limits ")
        value = getattr(launch.resources, name)
        return f"the limit {name} = {value} is refused ({said}): it must not be above the supervisor's own (ulimit -H)"
    if stage == "program":
        return _program(launch, number, detail)
    return f"{said} (at its {stage})"


def _program(launch: Launch, number: int, path: str) -> str:
    """Return what is wrong with the program at ``path``; "" where there is none of that name."""
    program = launch.command[0]
    if number == 0:
        return path
    if number == errno.E2BIG:
        return "its arguments and environment are too long: shorten them, or hand them over in a file"
    if path:
        return f"{_fault_of(os.path.join(launch.directory or '', path), number, launch.user)}; correct it, or 'command'"
    if "/" not in program:
        folders = launch.environment.get("PATH", os.defpath)
        return f"there is no such program in PATH ({folders}): install it, or correct 'command'"
    where = "" if program.startswith("/") else f" below {launch.directory or os.curdir!r}"
    return f"there is no such program{where}: install it, or correct 'command'"


def _fault_of(path: str, number: int, user: str | None) -> str:
    if os.path.isdir(path):
        return f"{path} is a directory"
    if not os.path.exists(path):
        return f"{path} is a link to nothing" if os.path.islink(path) else f"{path}: {os.strerror(number)}"
    if not os.access(path, os.X_OK):
        return f"{path} is not executable (chmod +x)"
    try:
        with open(path, "rb") as file:
            first = file.readline(256)
    except OSError:
        first = b""
    if first.startswith(b"#!") and number in (errno.ENOENT, errno.EACCES, errno.ENOTDIR):
        interpreter = first[2:].decode("utf-8", "replace").split()[:1]
        return f"{path} or its interpreter {''.join(interpreter)!r} cannot be read or run" + (
            f" by {user!r}" if user else ""
        )
    if number == errno.ENOENT:
        return f"{path} needs a loader that this system does not have"
    if number == errno.ENOEXEC:
        return f"{path} is no program: give it a first line such as #!/bin/sh"
    return f"{path}: {os.strerror(number)}" + (f" for user {user!r}" if user else "")
