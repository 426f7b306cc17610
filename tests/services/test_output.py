"""Output of processes: whole lines, a bounded amount at a time, nothing lost."""

from __future__ import annotations

import os

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mainspring.services.output import LINES_A_STEP, LONGEST_LINE, OutputLines, as_text, whole_characters
from mainspring.services.spawner import ProcessSpawner
from spawner_support import Heard, runs, shell


class Pipe:
    """A pipe, the lines that were told of it, and how often it was settled."""

    def __init__(self):
        self.told = []
        self.settled = 0
        reading, self.writing = os.pipe()
        os.set_blocking(reading, False)
        os.set_blocking(self.writing, False)
        self.lines = OutputLines(reading, self.told.append)

    def settle(self):
        def settled():
            self.settled += 1

        self.lines.settle(settled)

    def read(self):
        while self.lines.step():
            pass

    def write(self, data):
        assert os.write(self.writing, data) == len(data)

    def end(self):
        os.close(self.writing)
        self.writing = -1

    def close(self):
        os.close(self.lines.descriptor)
        if self.writing >= 0:
            os.close(self.writing)


@pytest.fixture
def pipe():
    made = Pipe()
    yield made
    made.close()


@given(st.lists(st.binary(max_size=2000), max_size=30), st.booleans())
def test_what_was_written_is_told_line_by_line_however_it_was_cut(pieces, settled_first):
    pipe = Pipe()
    try:
        for piece in pieces:
            pipe.write(piece)
            pipe.lines.step()
        if settled_first:
            pipe.settle()
        pipe.end()
        pipe.read()
        pipe.read()
    finally:
        pipe.close()
    *whole, rest = b"".join(pieces).split(b"\n")
    assert pipe.told == [as_text(line) for line in ([*whole, rest] if rest else whole)]
    assert pipe.settled == settled_first
    assert pipe.lines.at_end


def test_half_a_line_is_told_when_it_is_whole(pipe):
    pipe.write(b"one\nha")
    pipe.read()
    assert pipe.told == ["one"]
    pipe.write(b"lf\r\n")
    pipe.read()
    assert pipe.told == ["one", "half"]


def test_settling_tells_what_is_there_and_not_what_comes_later(pipe):
    """As at the end of a process whose child still holds the pipe."""
    pipe.write(b"one\nhalf")
    pipe.settle()
    assert pipe.settled == 0
    pipe.read()
    assert pipe.told == ["one", "half"]
    assert pipe.settled == 1
    pipe.write(b"later\n")
    pipe.read()
    assert pipe.told == ["one", "half", "later"]


def test_an_empty_stream_is_settled_at_once(pipe):
    pipe.settle()
    assert pipe.settled == 1
    pipe.end()
    pipe.read()
    pipe.settle()
    assert pipe.settled == 2


def test_each_step_tells_a_bounded_number_of_lines(pipe):
    pipe.write(b"y\n" * (LINES_A_STEP * 2 + 1))
    assert pipe.lines.step()
    assert len(pipe.told) == LINES_A_STEP
    pipe.end()
    pipe.read()
    pipe.read()
    assert pipe.told == ["y"] * (LINES_A_STEP * 2 + 1)


def test_a_very_long_line_comes_in_parts_that_cut_no_character(pipe):
    text = "é" * (LONGEST_LINE // 2 - 1) + "x€y"
    data = text.encode() + b"\nnext\n"
    while data:
        try:
            data = data[os.write(pipe.writing, data) :]
        except BlockingIOError:
            pipe.read()
    pipe.read()
    assert [len(line.encode()) for line in pipe.told] == [LONGEST_LINE - 1, 4, 4]
    assert "".join(pipe.told) == text + "next"


def test_bytes_that_are_no_text_are_replaced(pipe):
    pipe.write(b"\xff\xfe\0ok\n")
    pipe.read()
    assert pipe.told == ["\ufffd\ufffd\0ok"]


@given(st.text("aé€😀", min_size=1, max_size=9), st.integers(1, 36))
def test_a_cut_is_never_within_a_character(text, size):
    data = text.encode()[:size]
    whole = whole_characters(data)
    assert len(data) - 4 < whole <= len(data)
    assert whole == len(data) or text.startswith(data[:whole].decode())


# ---- of real processes

pytestmark = pytest.mark.anyio


@pytest.mark.every_loop
async def test_a_flood_leaves_others_their_turn_and_is_held_back():
    flood, other = Heard(), Heard()
    async with ProcessSpawner() as spawner:
        flooding = await spawner.spawn(shell("exec yes 'a line of a flood'"), flood)
        await flood.wait_for("a line of a flood")
        quiet = await spawner.spawn(shell("echo here"), other)
        with anyio.fail_after(5):
            await quiet.wait()
        flooding.kill()
        await flooding.wait_empty()
    assert other.lines == [("stdout", "here")]
    assert set(flood.lines) <= {("stdout", "a line of a flood"), ("stdout", flood.lines[-1][1])}


async def test_a_grandchild_that_holds_the_pipe_does_not_delay_the_end():
    heard = Heard()
    async with ProcessSpawner() as spawner:
        spawned = await spawner.spawn(shell("yes flood & echo $!; sleep 0.05; exit 5"), heard)
        with anyio.fail_after(5):
            assert (await spawned.wait()).returncode == 5
        assert runs(int(heard.of("stdout")[0]))
        spawned.kill()
        await spawned.wait_empty()
        told = len(heard.lines)
        await anyio.sleep(0.02)
        assert len(heard.lines) == told


async def test_all_that_was_written_is_told_when_the_end_is():
    heard = Heard()
    async with ProcessSpawner() as spawner:
        spawned = await spawner.spawn(shell("seq 1 20000; printf end"), heard)
        await spawned.wait()
        assert heard.of("stdout") == [*map(str, range(1, 20001)), "end"]


async def test_lines_of_two_streams_are_whole():
    heard = Heard()
    async with ProcessSpawner() as spawner:
        script = "for i in 1 2 3 4 5; do printf 'o'; printf 'e' >&2; printf '%s\\n' $i; printf '%s\\n' $i >&2; done"
        await (await spawner.spawn(shell(script), heard)).wait()
    assert heard.of("stdout") == [f"o{each}" for each in range(1, 6)]
    assert heard.of("stderr") == [f"e{each}" for each in range(1, 6)]
