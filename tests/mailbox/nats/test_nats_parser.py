"""What a NATS server sends, taken apart, wherever the network has cut it."""

from __future__ import annotations

import random

import pytest

pytest.importorskip("nats", reason="the extra 'nats' is not installed")

from nats.errors import ProtocolError
from nats.protocol.parser import Parser

from mainspring.mailbox.nats.client import QuickParser, RawMessage, UnreadableError

pytestmark = [pytest.mark.anyio, pytest.mark.loops("asyncio")]

STATUS = b"NATS/1.0 409 Exceeded MaxWaiting\r\nNats-Pending-Messages: 1\r\n\r\n"
INSIDE = b"MSG a.b 7 1\r\nx\r\n"
SAID = [
    (b"MSG a.b 7 3\r\nxyz\r\n", RawMessage(b"a.b", b"", b"", b"xyz")),
    (b"PING\r\n", "ping"),
    (b"MSG a.b 7 back.to 0\r\n\r\n", RawMessage(b"a.b", b"back.to", b"", b"")),
    (b"HMSG a.b 7 %d %d\r\n%b\r\n" % (len(STATUS), len(STATUS), STATUS), RawMessage(b"a.b", b"", STATUS, b"")),
    (b"MSG a.b 7 %d\r\n%b\r\n" % (len(INSIDE), INSIDE), RawMessage(b"a.b", b"", b"", INSIDE)),
    (
        b"HMSG a.b 7 back.to 12 15\r\nNATS/1.0\r\n\r\nxyz\r\n",
        RawMessage(b"a.b", b"back.to", b"NATS/1.0\r\n\r\n", b"xyz"),
    ),
    (b"MSG c 8 back.to 2\r\nhi\r\n", (8, b"c", b"back.to", b"hi", b"")),
    (b"-ERR 'Permissions Violation'\r\n", "'Permissions Violation'"),
    (b"MSG a.b 7 70000\r\n%b\r\n" % (b"x" * 70_000), RawMessage(b"a.b", b"", b"", b"x" * 70_000)),
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

    async def _process_info(self, info):
        self.told.append(info["connect_urls"])

    async def _process_msg(self, *what):
        self.told.append((*what[:4], what[4] or b""))  # the driver's own gives None for no headers

    async def _error_cb(self, error):
        self.told.append(repr(error))


def listening(**options):
    """A parser with a callback for subscription 7, and its client."""
    client = Client(**options)
    parser = QuickParser(client)
    parser.callbacks[b"7"] = client.told.append
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

    parser.callbacks[b"6"] = raises
    await parser.parse(b"MSG a 6 1\r\nx\r\nMSG a 7 1\r\ny\r\n")
    assert client.told == ["RuntimeError(b'x')", RawMessage(b"a", b"", b"", b"y")]


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
    assert client.told == ["'Stale Connection'", RawMessage(b"a", b"", b"", b"y")]
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
    assert RawMessage(b"a", b"", head, b"").status == status


# --------------------------------------------------------------------------------------------- beside the driver's own


def frames(rng, count):
    """So many frames as a server sends them."""
    made = []
    for _ in range(count):
        subject = b".".join(rng.choices((b"a", b"bc", b"_INBOX", b"$JS", b"x" * 60), k=rng.randint(1, 4)))
        reply = rng.choice((b"", b" back.to.%d" % rng.randint(0, 9)))
        number = rng.choice((b"7", b"8", b"12"))
        body = rng.choice((b"", b"x", b"\r\n", b"PING\r\n", INSIDE, rng.randbytes(rng.randint(0, 300))))
        head = rng.choice((b"NATS/1.0\r\n\r\n", STATUS, b"NATS/1.0\r\nA: \r\nB: MSG a 7 1\r\n\r\n"))
        made.append(
            rng.choice(
                (
                    b"MSG %b %b%b %d\r\n%b\r\n" % (subject, number, reply, len(body), body),
                    b"HMSG %b %b%b %d %d\r\n%b%b\r\n"
                    % (subject, number, reply, len(head), len(head) + len(body), head, body),
                    b"PING\r\n",
                    b"PONG\r\n",
                    b"+OK\r\n",
                    b"-ERR 'permissions violation for publish to \"x\"'\r\n",  # the driver's makes small letters of all
                    b'INFO {"server_id":"x","connect_urls":["%b"]}\r\n' % (b"h:1" * rng.choice((0, 1, 2_000))),
                )
            )
        )
    return made


async def told_of(parser_of, pieces):
    """What the client is told by a parser, and whether that refused a piece."""
    client = Client()
    parser = parser_of(client)
    for piece in pieces:
        try:
            await parser.parse(piece)
        except ProtocolError as error:
            return [entry for entry in client.told if entry != repr(error)], True
    return client.told, False


def cut(stream, rng, most):
    """The stream in pieces of at most so many bytes."""
    pieces = []
    while stream:
        size = rng.randint(1, most)
        pieces.append(stream[:size])
        stream = stream[size:]
    return pieces


@pytest.mark.own_time(2)
@pytest.mark.parametrize("seed", range(20))
async def test_it_tells_what_the_drivers_parser_tells(seed, anyio_backend):
    rng = random.Random(seed)
    stream = b"".join(frames(rng, 40))
    wanted = await told_of(Parser, [stream])
    assert not wanted[1]
    for most in (1, 3, 100, 100_000):
        assert await told_of(QuickParser, cut(stream, rng, most)) == wanted


async def test_it_tells_so_cut_at_each_byte(anyio_backend):
    stream = b"".join(frames(random.Random(7), 12)).replace(b"h:1" * 2_000, b"")
    wanted = await told_of(Parser, [stream])
    for place in range(len(stream)):
        assert await told_of(QuickParser, [stream[:place], stream[place:]]) == wanted


@pytest.mark.parametrize("seed", range(40))
async def test_broken_bytes_are_refused_and_nothing_else_happens(seed, anyio_backend):
    """Whatever comes: what is told does not depend on how it is cut, and what cannot be read has one kind of error."""
    rng = random.Random(seed)
    stream = bytearray(b"".join(frames(rng, 10)))
    for _ in range(rng.randint(1, 4)):
        place = rng.randrange(len(stream))
        how = rng.randrange(3)
        if how == 0:
            stream[place] = rng.randrange(256)
        elif how == 1:
            del stream[place : place + rng.randint(1, 5)]
        else:
            stream[place:place] = rng.choice((b"\r\n", b" ", b"-9", b"\0", rng.randbytes(3)))
    whole = await told_of(QuickParser, [bytes(stream)])
    for most in (1, 5, 1_000):
        assert await told_of(QuickParser, cut(bytes(stream), rng, most)) == whole


@pytest.mark.parametrize(
    "said",
    [
        b"SAY " + b"x" * 5_000 + b"\r\n",
        b"-ERRATIC\r\n",
        b"HTTP/1.1 400 Bad Request",
        b"\x15\x03\x03\x00\x02",
        b"INFO " + b"x" * 2_000_000,
        b"INFO {\r\n",
        b"INFO []\r\n",
        b"INFO \xff\r\n",
        b"MSG a x 1\r\ny\r\n",
        b"MSG a 7 1\r\nyy\r\n",
        b"MSG a 7 -9\r\n",
        b"MSG a 7 9999999999999\r\n",
        b"MSG a 7 b c 1\r\n",
        b"HMSG a 7 9 5\r\n",
        b"\r\n",
    ],
)
async def test_what_cannot_be_read_is_refused_by_name(said, anyio_backend):
    parser, client = listening()
    with pytest.raises(UnreadableError) as refused:
        await parser.parse(b"PING\r\n" + said)
    assert client.told == ["ping", repr(refused.value)]
    assert "cannot be read" in str(refused.value)
    assert len(str(refused.value)) < 200


@pytest.mark.parametrize("said", [b"-ERR\r\n", b"-ERR \r\n", b"-ERR ''\r\n", b"-ERR no quotes\r\n"])
async def test_a_refusal_of_few_words_is_one(said, anyio_backend):
    parser, client = listening()
    await parser.parse(said)
    assert client.told == [said[4:].strip().decode()]
