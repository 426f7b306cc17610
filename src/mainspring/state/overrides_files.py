"""How an override lies in its directory: its name, the index of its versions, and the files that hold their texts."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
from datetime import datetime
from typing import Any

from mainspring.errors import InvalidParameterError, OverrideDamagedError
from mainspring.validation import is_whole

_PART = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_HASH = re.compile(r"[0-9a-f]{64}")
_INDEX, _NEW = "@index.json", "@new"
MOST_PARTS = 10


def parts_of(name: Any) -> tuple[str, ...]:
    """The parts of a name, or :class:`InvalidParameterError` for what could lead elsewhere."""
    parts = tuple(name.split("/")) if isinstance(name, str) else ()
    if not (parts and len(parts) <= MOST_PARTS and all(_PART.fullmatch(part) for part in parts)):
        raise refused(
            name, "write it like 'agents/planner.system': letters, digits, '.', '_' and '-', with '/' between"
        )
    return parts


def refused(name: Any, why: str) -> InvalidParameterError:
    return InvalidParameterError(f"{name!r} is no name of an override: {why}")


def is_part(word: str) -> bool:
    """Whether a name may have it between two of its ``/``."""
    return _PART.fullmatch(word) is not None


class Index:
    """The versions of one name, which of them is current, and which were before it, the last one last; 0 is none.

    Those that were rolled back from are not in ``before``.
    """

    def __init__(self, versions: list[dict[str, Any]], current: int, before: list[int]) -> None:
        self.versions = versions
        self.current = current
        self.before = before

    @classmethod
    def load(cls, folder: int, parts: tuple[str, ...]) -> Index | None:
        from pydantic_core import from_json

        raw = content_of(folder, _INDEX, parts)
        if raw is None:
            return None
        try:
            data = from_json(raw)
            versions, current = data["versions"], data["current"]
            before = data["before"] if "before" in data else list(range(current))  # an earlier release did not keep it
            for found in versions:
                datetime.fromisoformat(found["written_at"])
                if not (_HASH.fullmatch(found["sha256"]) and all(isinstance(tag, str) for tag in found["tags"])):
                    raise TypeError
        except (ValueError, KeyError, TypeError):
            versions, current, before = [], -1, []
        kept = isinstance(versions, list) and isinstance(before, list)
        if not (kept and all(is_whole(n, 0) and n <= len(versions) for n in (current, *before))):
            raise OverrideDamagedError(f"override {'/'.join(parts)!r}: its index ({_INDEX}) is not what was written")
        return cls(versions, current, before)

    def save(self, folder: int, parts: tuple[str, ...]) -> None:
        from pydantic_core import to_json

        index = {"current": self.current, "before": self.before, "versions": self.versions}
        put(folder, _INDEX, to_json(index, indent=1), parts)

    def go_on_to(self, number: int) -> None:
        self.before.append(self.current)
        self.current = number

    def go_back_to(self, number: int) -> None:
        """Forget what came after it; to one that was not before the current one there is no way back but onwards."""
        if number in self.before:
            del self.before[self.before.index(number) :]
            self.current = number
        elif number != self.current:
            self.go_on_to(number)

    def check_version(self, what: str, parts: tuple[str, ...], number: int) -> None:
        """Raise unless there is such a version (or it is 0, which means none)."""
        if number > len(self.versions):
            raise InvalidParameterError(
                f"{what}: override {'/'.join(parts)!r} has no version {number}; there are {len(self.versions)}"
            )

    def move_tag(self, tag: str, to: int) -> None:
        for number, found in enumerate(self.versions, 1):
            kept = [other for other in found["tags"] if other != tag]
            found["tags"] = [*kept, tag] if number == to else kept

    def newest(self, tag: str) -> int:
        return max((number for number, found in enumerate(self.versions, 1) if tag in found["tags"]), default=0)


def text_file(number: int, digest: str) -> str:
    return f"@{number:06}-{digest[:12]}.txt"


def open_file(folder: int, name: str, flags: int, parts: tuple[str, ...]) -> int:
    """Open a plain file, and nothing else that may stand in its place: a link leads elsewhere, a FIFO keeps its readers."""
    try:
        file = os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666, dir_fd=folder)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise refused("/".join(parts), f"its {name} is no plain file") from None
        raise
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise refused("/".join(parts), f"its {name} is no plain file")
    return file


def content_of(folder: int, name: str, parts: tuple[str, ...]) -> bytes | None:
    try:
        file = open_file(folder, name, os.O_RDONLY, parts)
    except FileNotFoundError:
        return None
    with open(file, "rb") as content:
        return content.read()


def put(folder: int, name: str, raw: bytes, parts: tuple[str, ...]) -> None:
    """Make ``name`` a file with that content, at once and for good; called by the one writer that has the lock."""
    with contextlib.suppress(FileNotFoundError):  # of a writer that died; or another name of a file elsewhere
        os.unlink(_NEW, dir_fd=folder)
    with open(open_file(folder, _NEW, os.O_WRONLY | os.O_CREAT | os.O_EXCL, parts), "wb") as content:
        content.write(raw)
        content.flush()
        os.fsync(content.fileno())
    os.replace(_NEW, name, src_dir_fd=folder, dst_dir_fd=folder)
    os.fsync(folder)
