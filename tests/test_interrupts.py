"""The interruptions by which signal handlers are tested."""

from __future__ import annotations

import gc
from types import SimpleNamespace

from interrupts import Interruption

HERE = SimpleNamespace(__file__=__file__)


class Garbage:
    """Which only a collection finds, and whose end is code that can be interrupted too."""

    def __init__(self):
        self.itself = self

    def __del__(self):
        self.gone = True


def work(*numbers):
    Garbage()
    return [number + 1 for number in numbers]


def test_before_each_line_once_whatever_garbage_is_collected_on_the_way():
    def handler():
        kept.append([Garbage().__del__ for _ in range(10)])  # takes the room of whatever was let go of

    kept, lines = [], 0
    before = gc.get_threshold()
    gc.set_threshold(1)
    try:
        while True:
            with Interruption((HERE,), lines, handler) as between:
                assert [work(number) for number in range(20)] == [[number + 1] for number in range(20)]
            if not between.happened:
                break
            lines += 1
    finally:
        gc.set_threshold(*before)
    assert lines > 60
    assert len(kept) == lines
