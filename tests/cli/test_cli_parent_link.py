"""The line between parent and child: news up, and an end when the parent is gone."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

from mainspring.cli.parent_link import VARIABLE, ParentLink, link_for_child

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator

    import pytest

CHILD = """
import signal, threading
from mainspring.cli import parent_link
parent_link.LOAD_TIMEOUT, parent_link.MARGIN = 0.0, 0.2
signal.signal(signal.SIGTERM, {on_sigterm})
parent = parent_link.ParentLink.from_environment()
parent.tell(number=parent.number, again=parent_link.ParentLink.from_environment() is not None)
parent.start()
signal.pause()
threading.Event().wait()
"""


@contextmanager
def child(on_sigterm: str) -> Iterator[tuple[subprocess.Popen[bytes], socket.socket]]:
    ours, theirs, environment = link_for_child(3)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", CHILD.format(on_sigterm=on_sigterm)], env=environment, pass_fds=[theirs.fileno()]
        )
    with ours:
        try:
            yield process, ours
        finally:
            process.kill()
            process.wait()


def test_the_child_tells_who_it_is_and_is_told_to_stop_when_the_parent_is_gone() -> None:
    with child("signal.SIG_DFL") as (process, ours):
        with ours.makefile("rb") as lines:
            assert json.loads(lines.readline()) == {"number": 3, "again": False}
        ours.close()
        assert process.wait(60) == -signal.SIGTERM


def test_a_child_that_does_not_heed_it_is_killed() -> None:
    with child("lambda *args: None") as (process, ours):
        with ours.makefile("rb") as lines:
            lines.readline()
        ours.close()
        assert process.wait(60) == -signal.SIGKILL


def test_without_a_parent_there_is_no_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert ParentLink.from_environment() is None
    for inherited in ("987:1", "nonsense", ":"):
        monkeypatch.setenv(VARIABLE, inherited)
        assert ParentLink.from_environment() is None


def test_news_for_a_parent_that_is_gone_are_dropped() -> None:
    ours, theirs, _ = link_for_child(1)
    ours.close()
    with theirs:
        assert ParentLink(theirs, 1).tell(finished=True) is False
