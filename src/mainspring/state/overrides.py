"""``Overrides``: texts in versions that replace those in the code, in a directory that many processes may use."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import stat
import threading
from collections.abc import Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from hashlib import sha256
from typing import TYPE_CHECKING, Any, TypeVar

from anyio import CapacityLimiter, to_thread

from mainspring.core import clock
from mainspring.errors import InvalidParameterError, OverrideDamagedError, OverrideError, OverrideLockedError
from mainspring.validation import is_number, is_whole

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


_PART = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_HASH = re.compile(r"[0-9a-f]{64}")
_INDEX, _NEW = "@index.json", "@new"
MOST_PARTS = 10


def parts_of(name: Any) -> tuple[str, ...]:
    """Return the parts of a name. Raise :class:`InvalidParameterError` if it could lead elsewhere."""
    parts = tuple(name.split("/")) if isinstance(name, str) else ()
    if not (parts and len(parts) <= MOST_PARTS and all(_PART.fullmatch(part) for part in parts)):
        raise refused(
            name, "write it like 'agents/planner.system': letters, digits, '.', '_' and '-', with '/' between"
        )
    return parts


def refused(name: Any, why: str) -> InvalidParameterError:
    return InvalidParameterError(f"{name!r} is no name of an override: {why}")


def is_part(word: str) -> bool:
    """True if a name may have it between two of its ``/``."""
    return _PART.fullmatch(word) is not None


class Index:
    """The versions of one name, which of them is current, and which were before it, the last one last; 0 is none.

    Versions that were rolled back from are not in ``before``.
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
            versions, current, before = data["versions"], data["current"], data["before"]
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


V = TypeVar("V")

_TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,99}")
_TAG_WORDS = "words of letters, digits, '.', '_', ':' and '-'"
_LOCK = "@lock"
_LOOK_AGAIN = 0.01
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class OverrideVersion:
    """One version of an override. ``sha256`` is that of its text in UTF-8; ``current`` says whether it is the one read."""

    version: int
    sha256: str
    tags: tuple[str, ...]
    written_at: datetime
    current: bool


class Overrides:
    """A directory of overrides, for any number of tasks, threads and processes at once.

    Names are like ``"agents/planner.system"``: at most 10 parts with ``/`` between them, each of at most 100 letters, digits,
    ``.``, ``_`` and ``-``, the first of them a letter or a digit. Anything else (``..``, an absolute path, NUL), and what is no
    plain file or directory anywhere below the directory (a symbolic link, a FIFO), raises :class:`InvalidParameterError`.
    Where the operating system refuses what is needed, each call raises :class:`OverrideError`.

    The work is done in worker threads. A call that is cancelled waits until its thread is done; a write may then have
    happened.

    :param directory: made with the first write.
    :param lock_timeout: seconds that a writer waits for another one.
    """

    def __init__(self, directory: str | os.PathLike[str], *, lock_timeout: float = 10.0) -> None:
        if not is_number(lock_timeout, 0):
            raise InvalidParameterError(f"Overrides: lock_timeout must be 0 or more seconds, not {lock_timeout!r}")
        path = os.fspath(directory) if isinstance(directory, str | os.PathLike) else None
        if not isinstance(path, str) or not path or "\0" in path:
            raise InvalidParameterError(f"Overrides: directory must be the path of a directory, not {directory!r}")
        self.directory = os.path.abspath(path)
        self._lock_timeout = lock_timeout

    def __repr__(self) -> str:
        return f"<Overrides in {self.directory}>"

    async def read(self, name: str, default: str, *, tag: str | None = None) -> str:
        """Return the text of the current version, or of the newest one with the ``tag``; ``default`` if there is none.

        :raises OverrideDamagedError: the text is not what was written.
        """
        return await _in_thread(self._read, parts_of(name), default, tag)

    async def write(self, name: str, text: str, *, tags: Iterable[str] = ()) -> int:
        """Keep ``text`` as the next version, and make it the current one. Return its number, from 1. It is on the disk then.

        :param tags: of this version: what :meth:`read` can ask for. Letters, digits, ``.``, ``_``, ``:``, ``-``.
        :raises OverrideLockedError: others have written for ``lock_timeout`` seconds.
        """
        if not isinstance(text, str):
            raise InvalidParameterError(f"write: the text must be a string, not {text!r}")
        try:
            raw = text.encode()
        except UnicodeEncodeError as error:
            raise InvalidParameterError(f"write: the text cannot be written as UTF-8: {error.reason}") from None
        words = tuple(tags) if isinstance(tags, Iterable) and not isinstance(tags, str) else None
        if words is None or not all(map(_is_tag, words)):
            raise InvalidParameterError(f"write: tags are {_TAG_WORDS}, not {tags!r}")
        return await _in_thread(self._write, parts_of(name), raw, tuple(dict.fromkeys(words)), clock.utc_now())

    async def versions(self, name: str) -> tuple[OverrideVersion, ...]:
        """Return all versions, the oldest first; none if there is no such override."""
        return await _in_thread(self._versions, parts_of(name))

    async def rollback(self, name: str, version: int | None = None) -> int:
        """Make another version the current one. Return its number. 0 is that of no override.

        Every version remains, and the next one written is a new one.

        :param version: None: the one that was current before this one. What was rolled back from is not returned to: after
            a rollback from 2 to 1, and the writing of 3, the one before 3 is 1.
        :raises InvalidParameterError: there is no such version.
        :raises OverrideLockedError: as :meth:`write`.
        """
        if version is not None and not is_whole(version, 0):
            raise InvalidParameterError(f"rollback: version must be a whole number from 0, or None, not {version!r}")
        return await _in_thread(self._rollback, parts_of(name), version)

    async def tag(self, name: str, tag: str, version: int) -> None:
        """Move ``tag``: from now on ``version`` has it, and no other one. 0: none has it.

        :raises InvalidParameterError: there is no such version.
        :raises OverrideLockedError: as :meth:`write`.
        """
        if not _is_tag(tag):
            raise InvalidParameterError(f"tag: a tag is one of the {_TAG_WORDS}, not {tag!r}")
        if not is_whole(version, 0):
            raise InvalidParameterError(f"tag: version must be a whole number from 0, not {version!r}")
        await _in_thread(self._move_tag, parts_of(name), tag, version)

    async def names(self) -> tuple[str, ...]:
        """Return the names that have versions, sorted."""
        return await _in_thread(self._names, ())

    # ----------------------------------------------------------------------------------------------- in worker threads

    def _read(self, parts: tuple[str, ...], default: str, tag: str | None) -> str:
        with self._opened(parts, make=False) as folder:
            index = None if folder is None else Index.load(folder, parts)
            if folder is None or index is None:
                return default
            number = index.current if tag is None else index.newest(tag)
            if not number:
                return default
            found = index.versions[number - 1]
            raw = content_of(folder, text_file(number, found["sha256"]), parts)
            if raw is None or sha256(raw).hexdigest() != found["sha256"]:
                raise OverrideDamagedError(
                    f"override {'/'.join(parts)!r}: version {number} is not what was written; roll back to another one"
                )
            return raw.decode()

    def _write(self, parts: tuple[str, ...], raw: bytes, tags: tuple[str, ...], now: datetime) -> int:
        with self._opened(parts, make=True) as folder:
            if folder is None:
                raise FileNotFoundError(errno.ENOENT, "it was removed just now", self.directory)
            with self._locked(folder, parts):
                index = Index.load(folder, parts) or Index([], 0, [])
                number, digest = len(index.versions) + 1, sha256(raw).hexdigest()
                put(folder, text_file(number, digest), raw, parts)
                index.versions.append({"sha256": digest, "tags": list(tags), "written_at": now.isoformat()})
                index.go_on_to(number)
                index.save(folder, parts)
                return number

    def _versions(self, parts: tuple[str, ...]) -> tuple[OverrideVersion, ...]:
        with self._opened(parts, make=False) as folder:
            index = None if folder is None else Index.load(folder, parts)
        if index is None:
            return ()
        return tuple(
            OverrideVersion(
                number,
                found["sha256"],
                tuple(found["tags"]),
                datetime.fromisoformat(found["written_at"]),
                number == index.current,
            )
            for number, found in enumerate(index.versions, 1)
        )

    def _rollback(self, parts: tuple[str, ...], version: int | None) -> int:
        with self._changed("rollback", parts) as index:
            if version is None and not index.before:
                raise InvalidParameterError(
                    f"rollback: override {'/'.join(parts)!r} has nothing before its version {index.current}; give a number"
                )
            wanted = index.before[-1] if version is None else version
            index.check_version("rollback", parts, wanted)
            index.go_back_to(wanted)
            return wanted

    def _move_tag(self, parts: tuple[str, ...], tag: str, version: int) -> None:
        with self._changed("tag", parts) as index:
            index.check_version("tag", parts, version)
            index.move_tag(tag, version)

    @contextmanager
    def _changed(self, what: str, parts: tuple[str, ...]) -> Iterator[Index]:
        """Hand the index of a name to the block, which changes it, and save it then."""
        with self._opened(parts, make=False) as folder:
            if folder is None:
                raise InvalidParameterError(f"{what}: there is no override {'/'.join(parts)!r}; write() makes one")
            with self._locked(folder, parts):
                index = Index.load(folder, parts) or Index([], 0, [])
                yield index
                index.save(folder, parts)

    def _names(self, parts: tuple[str, ...]) -> tuple[str, ...]:
        """Return the names below ``parts``."""
        with self._opened(parts, make=False) as folder:
            if folder is None:
                return ()
            entries = [entry.name for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False)]
            own = ("/".join(parts),) if parts and Index.load(folder, parts) is not None else ()
        deeper = sorted(entry for entry in entries if is_part(entry)) if len(parts) < MOST_PARTS else []
        return (*own, *(name for entry in deeper for name in self._names((*parts, entry))))

    @contextmanager
    def _opened(self, parts: tuple[str, ...], *, make: bool) -> Iterator[int | None]:
        """Open the directory of a name; None if it is not there."""
        folder = self._open(parts, make)
        try:
            yield folder
        finally:
            if folder is not None:
                os.close(folder)

    def _open(self, parts: tuple[str, ...], make: bool) -> int | None:
        """Go there step by step, none of which may be a link."""
        if make and not os.path.isdir(self.directory):
            os.makedirs(self.directory, exist_ok=True)
        folder = None
        try:
            folder = os.open(self.directory, _DIRECTORY)
            for part in parts:
                if make:
                    with contextlib.suppress(FileExistsError):
                        os.mkdir(part, dir_fd=folder)
                        os.fsync(folder)
                above, folder = folder, os.open(part, _DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
                os.close(above)
        except OSError as error:
            if folder is not None:
                os.close(folder)
            if error.errno == errno.ENOENT:
                return None
            if error.errno in (errno.ELOOP, errno.ENOTDIR):
                raise refused("/".join(parts), "part of its path is a link or a file, not a directory") from None
            raise
        return folder

    @contextmanager
    def _locked(self, folder: int, parts: tuple[str, ...]) -> Iterator[None]:
        """Let one writer in at a time. The lock goes with its process."""
        lock = open_file(folder, _LOCK, os.O_RDWR | os.O_CREAT, parts)
        try:
            began, pause = clock.monotonic(), threading.Event()
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if clock.monotonic() - began >= self._lock_timeout:
                        raise OverrideLockedError(
                            f"override {'/'.join(parts)!r} is being written by others for longer than"
                            f" {self._lock_timeout:g} s; try again"
                        ) from None
                    pause.wait(_LOOK_AGAIN)
            yield
        finally:
            with contextlib.suppress(OSError):
                fcntl.flock(
                    lock, fcntl.LOCK_UN
                )  # a process that was forked meanwhile has it open too, and would keep it
            os.close(lock)


def _is_tag(tag: object) -> bool:
    return isinstance(tag, str) and _TAG.fullmatch(tag) is not None


async def _in_thread(fn: Callable[..., V], parts: tuple[str, ...], *args: Any) -> V:
    try:
        with clock.real_work():
            return await to_thread.run_sync(fn, parts, *args, limiter=CapacityLimiter(1))
    except OSError as error:
        named = f"override {'/'.join(parts)!r}" if parts else "the overrides"
        raise OverrideError(f"{named}: {error.strerror or error}") from error
