"""The control sockets of supervisors on this machine: where a new one goes, and which supervisors run."""

from __future__ import annotations

import os
import re
import socket
import stat
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from mainspring.cli.user_errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable

RUNTIME_DIRECTORY = "MAINSPRING_RUNTIME_DIR"
NO_SOCKET = "none"
PATH_BYTES = 107
"""Bytes of the path of a Unix socket, at most."""
_NAME_LENGTH = 40
_CONNECT_TIMEOUT = 1.0


def control_for(name: str, wanted: str | None, warn: Callable[[str], object]) -> str | None:
    """Return the path of the control socket of a supervisor that starts, or None if it has none.

    :param name: what it runs, as part of the file's name.
    :param wanted: the path that the user has given, ``none``, or None for the default.
    :param warn: hears one line if the default one cannot be made.
    :raises UserError: the path that the user has given cannot be used.
    """
    if wanted == NO_SOCKET:
        return None
    if wanted is not None:
        path = os.path.abspath(wanted)
        _check_length(path)
        return path
    try:
        return _default_path(name)
    except (UserError, OSError) as error:
        why = f"{error.strerror}: {error.filename}" if isinstance(error, OSError) and error.filename else str(error)
        warn(f"no control socket ({why}): `mainspring status`, `restart` and so on do not find this supervisor")
        return None


def running_supervisors() -> list[str]:
    """Return the paths of the control sockets of this user that accept a connection.

    :raises UserError: a directory of sockets cannot be trusted.
    """
    found = []
    login = Path(f"/run/user/{os.getuid()}/mainspring")  # of a supervisor that was started in a session of this user
    directories = _directories()
    for directory in dict.fromkeys(directories if RUNTIME_DIRECTORY in os.environ else [*directories, login]):
        if directory.is_symlink() or directory.exists():
            _check_directory(directory)
            found += [str(path) for path in sorted(directory.glob("*.sock")) if _accepts(path)]
    return found


def _default_path(name: str) -> str:
    """Make the directory, remove what dead supervisors have left, and try to bind the path."""
    directory = _directories()[0]
    with suppress(FileExistsError):
        directory.mkdir(mode=0o700)
    _check_directory(directory)
    for left in directory.glob("*.sock"):
        if not (_accepts(left) or _is_starting(left)):
            left.unlink(missing_ok=True)
    path = directory / f"{re.sub(r'[^A-Za-z0-9_.-]', '_', name)[:_NAME_LENGTH]}.{os.getpid()}.sock"
    _check_length(str(path))
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as attempt:
        try:
            attempt.bind(str(path))
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from None
    path.unlink()
    return str(path)


def _directories() -> list[Path]:
    """Return the directories in which sockets are looked for. New ones go into the first."""
    if given := os.environ.get(RUNTIME_DIRECTORY):
        return [Path(os.path.abspath(given))]
    user = os.getuid()
    shared = Path("/run/mainspring") if user == 0 else Path(f"/tmp/mainspring-{user}")  # noqa: S108 - checked
    own = os.environ.get("XDG_RUNTIME_DIR", "")
    if os.path.isabs(own) and os.path.isdir(own) and os.stat(own).st_uid == user:
        return [Path(own, "mainspring"), shared]
    return [shared]


def _check_directory(directory: Path) -> None:
    """Refuse a directory in which another user could have put a socket."""
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise UserError(f"{directory} is no directory; remove it")
    if found.st_uid != os.getuid():
        raise UserError(f"{directory} belongs to another user; set {RUNTIME_DIRECTORY} to a directory of this user")
    if stat.S_IMODE(found.st_mode) & 0o077:
        raise UserError(f"{directory} is open to other users; run `chmod 700 {directory}`")


def _check_length(path: str) -> None:
    length = len(os.fsencode(path))
    if length > PATH_BYTES:
        raise UserError(
            f"{path} has {length} bytes, and the path of a Unix socket has at most {PATH_BYTES}; choose a shorter one"
        )


def _is_starting(path: Path) -> bool:
    """True if the process that a socket is named after exists: it may be about to listen."""
    _, _, pid = path.stem.rpartition(".")
    return pid.isascii() and pid.isdigit() and os.path.exists(f"/proc/{pid}")


def _accepts(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as attempt:
        attempt.settimeout(_CONNECT_TIMEOUT)
        try:
            attempt.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:  # it listens, and is busy or stopped
            return True
    return True
