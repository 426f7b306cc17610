"""Jobs in interpreters of this process, each with its own lock: from Python 3.14 on."""

from __future__ import annotations

import sys
import threading
from importlib import import_module
from typing import TYPE_CHECKING, Any

from mainspring.core.introspection import name_of
from mainspring.errors import ConfigError, OffloadWorkerDiedError, describe
from mainspring.offload.processes import opened, pack, unpack
from mainspring.offload.worker_main import perform

if TYPE_CHECKING:
    from collections.abc import Callable

MODULE = "concurrent.interpreters"


class Interpreters:
    """The interpreters of one pool. An interpreter is made when a job finds none idle.

    :raises ConfigError: this Python has no interpreters.
    """

    kills = False

    def __init__(self) -> None:
        try:
            self._module: Any = import_module(MODULE)
        except ImportError:
            version = ".".join(map(str, sys.version_info[:2]))
            raise ConfigError(
                f"interpreters need Python 3.14 or newer, and this is {version}; use kind='process' or 'thread'"
            ) from None
        self._lock = threading.Lock()
        self._idle: list[Any] = []
        self._closed = False

    def job(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> InterpreterJob:
        """Return a job for an interpreter."""
        return InterpreterJob(self, fn, args)

    def call(self, job: bytes) -> bytes:
        """Have an idle interpreter, or a new one, do a job."""
        with self._lock:
            interpreter = self._idle.pop() if self._idle else None
        if interpreter is None:
            interpreter = self._module.create()
            interpreter.exec(f"import sys; sys.path[:] = {sys.path!r}")
        try:
            answer: bytes = interpreter.call(perform, job)
        except BaseException:
            interpreter.close()
            raise
        with self._lock:
            if not self._closed:
                self._idle.append(interpreter)
                return answer
        interpreter.close()
        return answer

    def close(self) -> None:
        """Close idle interpreters now, and a busy one when its job ends."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for interpreter in idle:
            interpreter.close()


class InterpreterJob:
    """One call in an interpreter."""

    killable = False
    is_told = False
    where = ""

    def __init__(self, interpreters: Interpreters, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self.fn = fn
        self._args = args
        self._interpreters = interpreters

    def perform(self) -> Any:
        """Have an interpreter do the job. Return its result or raise its exception."""
        job = pack(self.fn, self._args)
        try:
            answer = self._interpreters.call(job)
        except Exception as error:
            raise OffloadWorkerDiedError(f"the interpreter of {name_of(self.fn)} failed: {describe(error)}") from error
        return unpack(self.fn, opened(answer))

    def on_worker_start(self, starting: Callable[[bool], object]) -> None:
        """Do nothing: an interpreter is started at once."""

    def give_up(self) -> bool:
        """Do nothing: an interpreter cannot be stopped from outside."""
        return True
