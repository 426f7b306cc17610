"""Lines of services: their labels and levels, and a writer that never waits for a reader."""

from __future__ import annotations

import contextlib
import json
import os
import threading

import pytest

from mainspring.cli.line_writer import LineWriter
from mainspring.cli.service_output import ServiceLines, level_of
from mainspring.events import ServiceOutput


@pytest.mark.parametrize(
    ("line", "level"),
    [
        ("INFO all is well", "INFO"),
        ("2026-01-02 03:04:05,678 ERROR app: it failed", "ERROR"),
        ("WARN: soon full", "WARNING"),
        ("FATAL: no disk", "CRITICAL"),
        ("2026/01/02 03:04:05 [error] 5#5: refused", "ERROR"),
        ('time=2026 level=warn msg="slow"', "WARNING"),
        ('level="error" x', "ERROR"),
        ("<3>as journald has it", "ERROR"),
        ("<7>more", "DEBUG"),
        ('{"level": "error", "msg": "x"}', "ERROR"),
        ('{"severity": "WARNING"}', "WARNING"),
        ('{"levelname": "critical"}', "CRITICAL"),
        ('{"level": 30, "msg": "x"}', None),
        ("an error of 3 %", None),
        ("INFORMATION", None),
        ("<9>x", None),
        ("{", None),
        ("", None),
        ("x" * 200 + " ERROR", None),
        ("[" * 5000, None),
        ('{"a":' * 5000, None),
    ],
)
def test_the_level_of_a_line(line: str, level: str | None) -> None:
    assert level_of(line) == level


class Written(list):
    """Stands for a writer."""

    def put(self, descriptor: int, line: str, *, own: bool = False) -> None:
        self.append((descriptor, line))


def test_a_line_has_its_replica_and_goes_where_the_process_wrote_it() -> None:
    written = Written()
    lines = ServiceLines(written, as_json=False)
    lines(ServiceOutput("worker", 1, "stdout", "tab\tand \x1b[1mbold\x1b[0m"))
    lines(ServiceOutput("worker", 2, "stderr", "bell\x07 and\rreturn"))
    assert written == [(1, "worker.1 | tab\tand \x1b[1mbold\x1b[0m"), (2, "worker.2 | bell\\x07 and\\rreturn")]


def test_levels_are_coloured_on_a_terminal_only() -> None:
    written = Written()
    lines = ServiceLines(written, as_json=False, coloured=frozenset({2}))
    for stream in ("stdout", "stderr"):
        lines(ServiceOutput("a", 1, stream, "ERROR x"))
        lines(ServiceOutput("a", 1, stream, "x"))
    assert [line for _, line in written] == ["a.1 | ERROR x", "a.1 | x", "\x1b[31ma.1 | ERROR x\x1b[0m", "a.1 | x"]


def test_lines_as_json_have_the_level_and_the_record() -> None:
    written = Written()
    lines = ServiceLines(written, as_json=True)
    lines(ServiceOutput("a", 1, "stdout", "plain \x07"))
    lines(ServiceOutput("a", 1, "stderr", '{"level": "error", "n": 5}'))
    plain, record = (json.loads(line) for _, line in written)
    assert plain.pop("time")
    assert plain == {"service": "a", "replica": 1, "stream": "stdout", "message": "plain \x07"}
    assert (record["level"], record["record"]) == ("ERROR", {"level": "error", "n": 5})


@pytest.fixture
def pipe():
    reader, writer = os.pipe()
    yield reader, writer
    for descriptor in (reader, writer):
        with contextlib.suppress(OSError):
            os.close(descriptor)


def test_lines_of_several_threads_come_whole_and_in_order(pipe) -> None:
    reader, descriptor = pipe
    writer = LineWriter()
    texts = [f"{name}" * 3000 for name in "abcd"]
    threads = [
        threading.Thread(target=lambda text=text: [writer.put(descriptor, text) for _ in range(20)]) for text in texts
    ]
    for thread in threads:
        thread.start()
    got = b""
    while got.count(b"\n") < 80:
        got += os.read(reader, 1 << 20)
    for thread in threads:
        thread.join()
    assert sorted(set(got.decode().splitlines())) == texts
    assert writer.close()


def test_a_reader_that_is_too_slow_costs_lines_and_no_time(pipe, capfd) -> None:
    reader, descriptor = pipe
    writer = LineWriter(kept_bytes=1000)
    writer.put(descriptor, "x" * 900)  # small enough for the pipe
    for _ in range(300):
        writer.put(descriptor, "y" * 900)
    dropped = writer.dropped
    assert dropped
    writer.put(descriptor, "of our own", own=True)
    assert writer.dropped == dropped
    got = b""
    while b"of our own" not in got:
        got += os.read(reader, 1 << 20)
    assert not writer.close()
    assert got.count(b"\n") == 302 - dropped
    assert f"mainspring: {dropped} lines of output could not be written" in capfd.readouterr().err


def test_what_waits_is_written_at_the_end(pipe) -> None:
    reader, descriptor = pipe
    writer = LineWriter()
    for number in range(100):
        writer.put(descriptor, str(number))
    assert writer.close()
    assert os.read(reader, 1 << 20).decode().split() == [str(number) for number in range(100)]


def test_a_reader_that_never_reads_does_not_hold_up_the_end(pipe) -> None:
    _, descriptor = pipe
    writer = LineWriter()
    writer.put(descriptor, "x" * (1 << 20))
    assert not writer.close(0.05)


def test_a_reader_that_has_gone_and_a_full_disk_are_no_error(pipe) -> None:
    reader, descriptor = pipe
    os.close(reader)
    with open("/dev/full", "wb") as full:
        writer = LineWriter()
        stream = writer.stream(full.fileno())
        assert stream.write("a record\n") == 9
        stream.flush()
        writer.put(descriptor, "x")
        writer.put(descriptor, "y")
        assert not writer.close()
    assert writer.dropped == 3


def test_a_descriptor_that_does_not_block_is_waited_for(pipe) -> None:
    reader, descriptor = pipe
    os.set_blocking(descriptor, False)
    writer = LineWriter()
    for _ in range(300):
        writer.put(descriptor, "z" * 1000)
    got = b""
    while got.count(b"\n") < 300:
        got += os.read(reader, 1 << 16)
    assert writer.close()
