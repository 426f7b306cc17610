"""What a NATS server sends, taken apart, wherever the network has cut it."""

from __future__ import annotations

import random

import pytest

pytest.importorskip("nats", reason="the extra 'nats' is not installed")

from nats.errors import ProtocolError

from mainspring.mailbox.nats_parser import Heard, QuickParser

pytestmark = [pytest.mark.anyio, pytest.mark.parametrize("anyio_backend", ["asyncio"])]

STATUS = b"NATS/1.0 409 Exceeded MaxWaiting\r\nNats-Pending-Messages: 1\r\n\r\n"
INSIDE = b"MSG a.b 7 1\r\nx\r\n"
SAID = [
    (b"MSG a.b 7 3\r\nxyz\r\n", Heard(b"a.b", b"", b"", b"xyz")),
    (b"PING\r\n", "ping"),
    (b"MSG a.b 7 back.to 0\r\n\r\n", Heard(b"a.b", b"back.to", b"", b"")),
    (b"HMSG a.b 7 %d %d\r\n%b\r\n" % (len(STATUS), len(STATUS), STATUS), Heard(b"a.b", b"", STATUS, b"")),
    (b"MSG a.b 7 %d\r\n%b\r\n" % (len(INSIDE), INSIDE), Heard(b"a.b", b"", b"", INSIDE)),
    (b"HMSG a.b 7 back.to 12 15\r\nNATS/1.0\r\n\r\nxyz\r\n", Heard(b"a.b", b"back.to", b"NATS/1.0\r\n\r\n", b"xyz")),
    (b"MSG c 8 back.to 2\r\nhi\r\n", (8, b"c", b"back.to", b"hi", b"")),
    (b"-ERR 'Permissions Violation'\r\n", "'permissions violation'"),
    (b"MSG a.b 7 70000\r\n%b\r\n" % (b"x" * 70_000), Heard(b"a.b", b"", b"", b"x" * 70_000)),
    (b"PONG\r\n", "pong"),
]


class Client:
    """What a parser wants of the driver's client; ``told`` is all that it is told, in order."""

    def __init__(self, hangs_up=False):
        self.told = []
        self.is_connected = True
        self._hangs_up = hangs_up

    async def _process_ping(self):
        self.told.append("ping")

    async def _process_pong(self):
        self.told.append("pong")

    async def _process_err(self, text):
        self.told.append(text)
        self.is_connected = not self._hangs_up

    async def _process_msg(self, *what):
        self.told.append(what)

    async def _error_cb(self, error):
        self.told.append(repr(error))


def listening(**options):
    """A parser with a hearer for subscription 7, and its client."""
    client = Client(**options)
    parser = QuickParser(client)
    parser.hearers[b"7"] = client.told.append
    return parser, client


@pytest.mark.parametrize("most", [1, 2, 7, 50, 5_000, 32_768, 100_000])
async def test_all_is_told_in_order_wherever_it_is_cut(most, anyio_backend):
    parser, client = listening()
    rng = random.Random(most)
    said, wanted = zip(*SAID, strict=True)
    stream = b"".join(said)
    while stream:
        cut = rng.randint(1, most)
        await parser.parse(stream[:cut])
        stream = stream[cut:]
    assert client.told == list(wanted)
    assert not parser.buf


async def test_what_a_hearer_raises_costs_the_others_nothing(anyio_backend):
    parser, client = listening()

    def raises(heard):
        raise RuntimeError(heard.data)

    parser.hearers[b"6"] = raises
    await parser.parse(b"MSG a 6 1\r\nx\r\nMSG a 7 1\r\ny\r\n")
    assert client.told == ["RuntimeError(b'x')", Heard(b"a", b"", b"", b"y")]


@pytest.mark.parametrize("line", [b"MSG a 7 many", b"MSG", b"HMSG a 7", b"HMSG a 7 x 5", b"SAY what"])
async def test_what_is_no_protocol_is_refused(line, anyio_backend):
    parser, _ = listening()
    with pytest.raises(ProtocolError):
        await parser.parse(line + b"\r\n")


async def test_nothing_of_a_connection_that_is_over_is_kept_for_the_next(anyio_backend):
    """The driver begins the next one while this one's last bytes are still being looked at."""
    parser, client = listening(hangs_up=True)
    await parser.parse(b"-ERR 'Stale Connection'\r\nMSG a 7 5\r\nx")
    client.is_connected = True
    await parser.parse(b"MSG a 7 1\r\ny\r\n")
    assert client.told == ["'stale connection'", Heard(b"a", b"", b"", b"y")]
    client.is_connected = False
    await parser.parse(b"MSG a 7 5\r\nx")
    client.is_connected = True
    await parser.parse(b"MSG a 7 1\r\nw\r\n")
    assert client.told[-1].data == b"w"
    await parser.parse(b"MSG a 7 100\r\n")
    parser.reset()
    await parser.parse(b"MSG a 7 1\r\nz\r\n")
    assert client.told[-1].data == b"z"


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"", ("", "")),
        (b"NATS/1.0\r\nA: b\r\n\r\n", ("", "")),
        (b"NATS/1.0 503\r\n\r\n", ("503", "")),
        (b"NATS/1.0 404 No Messages\r\n\r\n", ("404", "No Messages")),
        (STATUS, ("409", "Exceeded MaxWaiting")),
    ],
)
async def test_the_status_of_a_message(head, status, anyio_backend):
    assert Heard(b"a", b"", head, b"").status == status
