"""How messages, names and addresses are written on a NATS server."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mainspring import open_mailbox
from mainspring.errors import ConfigError
from mainspring.mailbox.message import Dead, Envelope
from mainspring.mailbox.nats.mailbox import NatsMailbox
from mainspring.mailbox.nats.messages import MARK, StoredMessage, dead_headers, decode, read_dead, token_of, tokens_of
from mainspring.mailbox.nats.names import Names, check_stream, encoded
from mainspring.mailbox.nats.settings import NatsOptions, Server

TEXT = st.text(max_size=30)
NAMES = st.text(max_size=10)  # short enough for a server, whatever they are made of


@given(
    body=st.binary(max_size=50),
    headers=st.dictionaries(TEXT, TEXT, max_size=3),
    reply_to=st.none() | st.text(min_size=1, max_size=30),
    key=st.none() | st.text(min_size=1, max_size=30),
    expires_in=st.none() | st.floats(0.1, 1e6),
    charge=st.booleans(),
    history=st.none() | st.text(min_size=1, max_size=30),
)
@pytest.mark.slow
def test_a_record_comes_back_as_it_was(body, headers, reply_to, key, expires_in, charge, history):
    sent = StoredMessage.of(Envelope("id", body, 0.0, reply_to, key, 0, headers, expires_in), 1_000.5)
    assert decode(sent.encode(), 7, 0.0) == sent
    back = sent.returned(received_at=1_001.25, charge=charge, kept=True, history=history)
    assert decode(back.encode(), 7, 0.0) == back
    assert (back.deliveries, back.charged, back.kept) == (1, int(charge), True)
    assert decode(back.replayed(None).encode(), 7, 0.0).deliveries == 0


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"{}",
        b"\xff\x00",
        MARK,
        MARK + b"\n",
        MARK + b"[]\nx",
        MARK + b'{"i":1,"t":2}\nx',
        MARK + b'{"i":"a"}\nx',
        MARK + b'{"i":"a","t":01.5}\nx',
        MARK + b'{"i":"a","t":1.2.5}\nx',
        MARK + b'{"i":"a","t":0,"h":{"a":1}}\nx',
        MARK + b'{"i":"a","t":0,"n":"many"}\nx',
        MARK + b'{"i":"a","t":0,"x":"soon"}\nx',
        MARK + b'{"i":"a","t":0,"r":5}\nx',
    ],
)
def test_what_another_program_wrote_is_a_body(payload):
    record = decode(payload, 7, 12.5)
    assert (record.message_id, record.body, record.enqueued_at) == ("nats-7", payload, 12.5)


@pytest.mark.own_time(3)
@given(NAMES, NAMES)
def test_names_differ_where_mailboxes_do(one, other):
    for name in (one, other):
        assert set(encoded(name)) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_")
    if one != other:
        assert not set(Names.of(one).streams) & set(Names.of(other).streams)


def test_a_name_can_be_too_long():
    with pytest.raises(ConfigError, match="longer than"):
        encoded("é" * 100)


def test_one_dedup_key_has_one_place_and_its_ids_tell_it():
    one, other = (StoredMessage.of(Envelope(name, b"", dedup_key="k"), 0.0) for name in ("a", "b"))
    assert one.token == other.token
    assert one.message_id != other.message_id
    assert tokens_of(one.message_id) == (one.token, token_of(one.message_id))
    assert tokens_of("plain") == (StoredMessage("plain", b"", 0.0).token,)


@given(
    error=st.text(max_size=3_000),
    kind=st.text(max_size=200),
    trace=st.text(max_size=3_000),
    room=st.integers(4_000, 9_000),
)
def test_a_reason_keeps_within_its_room(error, kind, trace, room):
    headers = dead_headers(Dead(error, kind, trace), 5.25, room)
    assert all("\n" not in value and "\r" not in value for value in headers.values())
    dead, at = read_dead(headers, 0.0)
    assert at == 5.25
    assert error.startswith(dead.error)
    if len(json.dumps(error) + json.dumps(kind) + json.dumps(trace)) <= room:
        assert dead == Dead(error, kind, trace)
    else:
        assert trace.endswith(dead.traceback)
        assert sum(map(len, headers.values())) <= room + 100


def test_headers_that_are_no_json_are_taken_as_they_are():
    dead, at = read_dead({"Mainspring-Error": "plain", "Mainspring-Died-At": "soon"}, 3.0)
    assert (dead.error, dead.error_type, at) == ("plain", "", 3.0)


DEFAULTS = {
    "name": "jobs", "timeout": 5, "silence": 5, "ack_wait": 60, "replicas": 1, "storage": "file", "credentials": None,
}  # fmt: skip


def options_of(url, **options):
    """Those of a mailbox with that URL."""
    return NatsOptions.of(url, **{**DEFAULTS, **options})


def test_a_server_is_its_hosts():
    url = "nats://me:p%40ss@one:4223,two"
    server = Server.of(url, options_of(url))
    assert server.hosts == (("one", 4223), ("two", 4222))
    assert (server.user, server.password) == ("me", "p@ss")
    assert server.address == "nats://one:4223,two:4222"
    assert server.urls == ["nats://one:4223", "nats://two:4222"]
    assert server.options == {"user": "me", "password": "p@ss"}
    assert "p@ss" not in repr(server)
    mailbox = NatsMailbox(url, name="jobs")
    assert mailbox.backend.local_name("nats://two?name=a%20b") == "a b"
    assert mailbox.backend.local_name("nats://three") is None
    assert mailbox.backend.local_name("redis://two") is None
    assert mailbox.backend.local_name(mailbox.address) == "jobs"


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("nats://[::1]:4223", "nats://[::1]:4223"),
        ("nats://", "nats://localhost:4222"),
        ("nats://:4223", "nats://localhost:4223"),
        ("nats://HOST", "nats://host:4222"),
    ],
)
def test_an_address_has_host_and_port(url, address):
    assert NatsMailbox(url).address == f"{address}?name=default"


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("nats://secret@host/jobs", "its name is an option"),
        ("nats://secret@host:many", "no host and port"),
        ("http://secret@host", "begins with nats:// or tls://"),
    ],
)
def test_a_bad_url_is_one_line_without_the_secret(url, told):
    with pytest.raises(ConfigError, match=told) as caught:
        NatsMailbox(url)
    assert "secret" not in str(caught.value)


def test_options_are_read_in_their_types():
    options = options_of("nats://h", ack_wait="30", replicas="3", name="x")
    assert (options.ack_wait, options.replicas, options.name) == (30.0, 3, "x")
    with pytest.raises(ConfigError, match=r"^'nats://h': a NATS mailbox has no option 'nam'; it has name"):
        options_of("nats://secret@h", nam="x")
    for replicas in ("three", "2", 4, 0, 7, None):
        with pytest.raises(ConfigError, match=f"replicas must be 1, 3 or 5, not {replicas!r}"):
            options_of("nats://h", replicas=replicas)


def test_a_stream_of_another_make_is_refused():
    wanted = Names.of("jobs").configs(replicas=1, storage="file")[0]
    check_stream(wanted, {**wanted, "num_replicas": 3, "max_msgs": 10})
    with pytest.raises(ConfigError, match="with max_bytes, near which the server drops"):
        check_stream(wanted, {**wanted, "max_bytes": 10})
    with pytest.raises(ConfigError, match="retention"):
        check_stream(wanted, {**wanted, "retention": "limits"})
    with pytest.raises(ConfigError, match="without the subjects"):
        check_stream(wanted, {**wanted, "subjects": ["other"]})


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"ack_wait": 0}, "ack_wait must be"),
        ({"timeout": 0}, "timeout must be"),
        ({"replicas": 2}, "replicas must be"),
        ({"storage": "tape"}, "storage must be"),
        ({"size": 1}, "no option 'size'"),
    ],
)
def test_bad_options(options, told):
    with pytest.raises(ConfigError, match=told):
        open_mailbox("nats://localhost", **options)


def test_an_address_has_no_password():
    box = open_mailbox("nats://me:secret@localhost?name=a b")
    assert box.address == "nats://localhost:4222?name=a%20b"
    assert "secret" not in repr(box)


def test_without_the_driver_one_line_names_the_extra():
    program = (
        "import sys; sys.modules['nats'] = None\n"
        "import mainspring.mailbox.nats.messages, mainspring.mailbox.nats.settings, mainspring.mailbox.nats.names\n"
        "from mainspring import open_mailbox, ConfigError\n"
        "try: open_mailbox('nats://localhost?name=jobs')\n"
        "except ConfigError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert "pip install 'mainspring[nats]'" in done.stdout
