"""What the server's compiler finds in the library of functions: it knows each global name that the library uses."""

from __future__ import annotations

import struct

import pytest

from mainspring.mailbox.redis.client import library
from redis_support import place

COMPILED = "local made, why = loadstring(ARGV[1]); return made and string.dump(made) or redis.error_reply(why)"
DEFINED = "return rawget(_G, ARGV[1]) ~= nil and 1 or 0"
GET_GLOBAL, SET_GLOBAL = 5, 7


class Chunk:
    """A chunk of Lua 5.1 as ``string.dump`` writes it, and the globals that its functions get and set, with their lines."""

    def __init__(self, dump: bytes) -> None:
        self._dump, self._at = dump, 12  # behind the header
        self.read: dict[str, int] = {}
        self.written: dict[str, int] = {}
        self._function()

    def _take(self, kind: str):
        (value,) = struct.unpack_from(f"<{kind}", self._dump, self._at)
        self._at += struct.calcsize(f"<{kind}")
        return value

    def _text(self) -> str:
        size = self._take("Q")
        return self._take(f"{size}s")[:-1].decode()

    def _constant(self) -> object:
        kind = self._take("B")
        return {0: lambda: None, 1: lambda: self._take("B"), 3: lambda: self._take("d"), 4: self._text}[kind]()

    def _function(self) -> None:
        self._text()
        self._at += 12  # where it is defined; how many upvalues, parameters and registers it has
        code = [self._take("I") for _ in range(self._take("I"))]
        constants = [self._constant() for _ in range(self._take("I"))]
        for _ in range(self._take("I")):
            self._function()
        lines = [self._take("I") for _ in range(self._take("I"))]
        for _ in range(self._take("I")):
            self._text()  # a local name, and where it holds
            self._at += 8
        for _ in range(self._take("I")):
            self._text()  # an upvalue
        for instruction, line in zip(code, lines, strict=True):
            names = {GET_GLOBAL: self.read, SET_GLOBAL: self.written}.get(instruction & 63)
            if names is not None:
                names[str(constants[instruction >> 14])] = line


@pytest.fixture
def compiled(redis_url):
    """A function that has the server compile a text, and a function that returns the globals that it does not define."""
    with place(redis_url) as here:

        def undefined(chunk):
            return {name: line for name, line in chunk.read.items() if not here.call("EVAL", DEFINED, 0, name)}

        yield lambda text: Chunk(here.call("EVAL", COMPILED, 0, text)), undefined


def test_the_library_uses_no_global_that_the_server_does_not_define(compiled):
    compile_text, undefined = compiled
    text, _ = library()
    chunk = compile_text(text.partition(b"\n")[2])  # behind the line that names it
    assert {"redis", "math"} <= chunk.read.keys()
    assert (undefined(chunk), chunk.written) == ({}, {})


def test_a_misspelt_name_is_found_in_any_function(compiled):
    compile_text, undefined = compiled
    chunk = compile_text(
        "local one = 1.5\nlocal function two(x)\n  return function() three(x, one) end\nend\nfour = two"
    )
    assert (undefined(chunk), chunk.written) == ({"three": 3}, {"four": 5})
