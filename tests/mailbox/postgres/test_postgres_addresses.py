"""Where a reply to a PostgreSQL mailbox is sent: its address leads to it from other processes, by the same way."""

from __future__ import annotations

import os

import psycopg
import pytest

from mainspring import open_mailbox
from mainspring.mailbox.postgres.settings import (
    SCHEMA,
    PostgresOptions,
    conninfo_of,
    is_parameter,
    local_name,
    where_of,
)
from mainspring.mailbox.settings import read_url

WHERE = ("PGHOST", "PGHOSTADDR", "PGPORT", "PGDATABASE", "PGUSER", "PGSERVICE", "PGSSLMODE", "PGSSLROOTCERT")
TRUST = "channel_binding=require&sslmode=verify-full&sslrootcert=/etc/ca.pem&target_session_attrs=read-write"


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch):
    for name in WHERE:
        monkeypatch.delenv(name, raising=False)


def conninfo(url):
    """What libpq is told for a mailbox URL."""
    place = read_url(url, PostgresOptions.schemes)
    return conninfo_of(place.bare, {key: value for key, value in place.query if is_parameter(key)})


def name_on(url, address, schema=SCHEMA):
    """The name that an address means in the database of a mailbox URL; None where it leads elsewhere."""
    return local_name(address, conninfo(url), schema)


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("postgresql://ann:s3cret@db:6000/app?name=x", "postgresql://ann@db:6000/app?name=x"),
        ("postgresql://a,b:6000/app?name=x", "postgresql://a:5432,b:6000/app?name=x"),
        ("postgresql:///app?name=x&host=a,b&port=7", "postgresql://a:7,b:7/app?name=x"),
        ("postgresql://[::1]:6000/app?name=x", "postgresql://%3A%3A1:6000/app?name=x"),
        ("postgresql:///app?name=x&host=/run/pg", "postgresql://%2Frun%2Fpg:5432/app?name=x"),
        ("postgresql://ann@/app?name=x", "postgresql://ann@/app?name=x"),
        ("postgresql://:6000/app?name=x", "postgresql://:6000/app?name=x"),
        ("postgresql://db/app?name=x&hostaddr=10.0.0.1", "postgresql://db:5432/app?name=x&hostaddr=10.0.0.1"),
        ("postgresql:///app?name=x&hostaddr=10.0.0.1", "postgresql://10.0.0.1:5432/app?name=x"),
        ("postgresql:///?name=x&service=main", "postgresql:///?name=x&service=main"),
        ("postgresql://ann@db?name=x&dbname=a%2Fb", "postgresql://ann@db:5432/a%2Fb?name=x"),
        (
            f"postgresql://db/app?name=x&{TRUST}&connect_timeout=3&application_name=me&sslcert=/me.crt&password=s3cret",
            f"postgresql://db:5432/app?name=x&{TRUST}",
        ),
    ],
)
def test_an_address_leads_to_the_same_mailbox_by_the_same_way(url, address):
    mailbox = open_mailbox(url)
    assert mailbox.address == address
    assert name_on(url, address) == "x"
    again = open_mailbox(address)
    assert (again.address, again.name) == (address, "x")
    assert where_of(conninfo(address)) == where_of(conninfo(url))


def test_what_the_environment_says_is_in_the_address(monkeypatch):
    for name, value in {
        "PGHOST": "/var/run/pg", "PGPORT": "6000", "PGDATABASE": "app", "PGUSER": "ann", "PGSSLMODE": "require",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    mailbox = open_mailbox("postgresql://?name=x")
    address = "postgresql://ann@%2Fvar%2Frun%2Fpg:6000/app?name=x&sslmode=require"
    assert mailbox.address == address
    assert name_on("postgresql://?name=x", "postgresql:///app?name=y") == "y"
    known = conninfo("postgresql://?name=x")
    for name in WHERE:
        monkeypatch.delenv(name, raising=False)
    assert open_mailbox(address).address == address
    assert local_name("postgresql:///app?name=y", known, SCHEMA) is None


def test_a_service_of_the_environment_is_in_the_address_too(monkeypatch, tmp_path):
    services = tmp_path / "services.conf"
    services.write_text("[main]\nhost=db\nport=6000\ndbname=app\nsslmode=require\n")
    monkeypatch.setenv("PGSERVICEFILE", os.fspath(services))
    monkeypatch.setenv("PGSERVICE", "main")
    assert open_mailbox("postgresql://?name=x").address == "postgresql://db:6000/app?name=x&sslmode=require"


def test_the_environment_goes_before_the_defaults_of_a_mailbox(monkeypatch):
    monkeypatch.setenv("PGAPPNAME", "mine")
    monkeypatch.setenv("PGCONNECT_TIMEOUT", "4")
    assert "application_name" not in conninfo_of("postgresql://h/d", {})
    assert "connect_timeout" not in conninfo_of("postgresql://h/d", {})


@pytest.mark.parametrize(
    "other",
    [
        "postgresql://db:6000/other",
        "postgresql://b,a/app",
        "postgresql://a,b/app2",
        "postgresql://a,b/app?schema=x",
        "postgresql://h/d?host=%",
        "redis://a/0",
        "x://h",
    ],
)
def test_another_place_is_another(other):
    assert name_on("postgresql://a,b/app", other) is None


def test_a_name_or_another_users_url_is_of_this_place():
    assert name_on("postgresql://ann:secret@db.example:6000/app", "other") == "other"
    assert name_on("postgresql://ann:secret@db:6000/app", "postgres://bob@db:6000/app?name=there") == "there"
    assert name_on("postgresql://db/app", "postgresql://db/app?name=there&schema=mine", schema="mine") == "there"


@pytest.mark.anyio
@pytest.mark.loops("asyncio")
async def test_a_reply_comes_to_a_mailbox_of_several_hosts(place, anyio_backend):
    known = psycopg.conninfo.conninfo_to_dict(place.url)
    port = known.get("port", 5432)
    url = f"postgresql://{known.get('user', 'postgres')}@{known['host']}:{port},localhost:{port}/{known['dbname']}"
    async with place.mailbox("jobs", url=url) as jobs, place.mailbox("answers", url=url) as answers:
        await jobs.send("x", reply_to=answers)
        (message,) = await jobs.receive(wait_time_seconds=10)
        await message.reply("y")
        (reply,) = await answers.receive(wait_time_seconds=10)
        assert reply.body == "y"
