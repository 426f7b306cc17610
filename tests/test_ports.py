"""Ports for those who listen later: outside the kernel's, no two of them alike, and nobody has them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import ports

FEW = 40
"""More than a block has."""


@pytest.mark.parametrize(
    ("first", "last", "room"),
    [
        (32_768, 60_999, range(20_000, 32_768)),  # Linux
        (49_152, 65_535, range(20_000, 49_152)),  # macOS, and what IANA says
        (16_384, 32_767, range(32_768, 65_536)),
        (1_024, 65_535, range(20_000, 65_536)),  # nothing is outside
        (22_000, 65_000, range(20_000, 65_536)),  # too little is
    ],
)
def test_they_are_none_that_the_kernel_gives(first: int, last: int, room: range) -> None:
    assert ports.room(first, last) == room


def test_the_kernels_are_those_that_it_gives() -> None:
    first, last = ports.kernels()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert first <= listener.getsockname()[1] <= last


def test_none_is_given_twice() -> None:
    given = [ports.free_port() for _ in range(FEW)] + [*ports.neighbours(5), *ports.neighbours(31), ports.free_port()]
    assert len(set(given)) == len(given)
    assert set(given) <= set(ports.room(*ports.kernels()))


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.2", "", "::1", "::"])
def test_one_that_somebody_has_is_passed_by_and_so_are_those_beside_it(address: str) -> None:
    if ":" in address and not socket.has_dualstack_ipv6():
        pytest.skip("no IPv6 here")
    first, second, third = ports.neighbours(1)[0], *ports.neighbours(2)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as other:
        other.bind((address, second))  # it does not even listen
        assert ports.is_free(first)
        assert not ports.is_free(second)
        assert ports.is_free(third)
    assert ports.is_free(second)


def test_neighbours_are_beside_each_other_and_all_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "_left", range(100, 110))
    monkeypatch.setattr(ports, "is_free", lambda port: port != 104)
    assert ports.neighbours(3) == range(100, 103)
    assert ports.neighbours(3) == range(106, 109)


def test_where_somebody_connects_from_it_a_port_is_not_free() -> None:
    port = ports.free_port()
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as wire:
        wire.bind(("127.0.0.1", port))
        wire.connect(listener.getsockname())
        assert not ports.is_free(port)


OTHER = """
import os
os.getpid = lambda: {pid}  # it begins where this process did
import ports
print([ports.free_port() for _ in range({count})], flush=True)
input()
"""


def test_two_processes_share_none() -> None:
    mine = {ports.free_port() for _ in range(FEW)}
    others: list[set[int]] = []
    processes = []
    try:
        for _ in range(2):
            process = subprocess.Popen(
                [sys.executable, "-c", OTHER.format(pid=os.getpid(), count=FEW)],
                cwd=Path(__file__).parent,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            processes.append(process)
            assert process.stdout is not None
            others.append(set(map(int, process.stdout.readline().strip("[]\n").split(","))))
    finally:
        for process in processes:
            process.communicate("\n")
    assert len(mine | others[0] | others[1]) == 3 * FEW
