"""Messages that join the transaction of a plain thread, on the thread's own synchronous connection."""

from __future__ import annotations

import threading

import psycopg
import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from mainspring import ConfigError, InMemoryMailbox, InvalidParameterError, MailboxFullError
from mainspring.errors import MailboxError


@pytest.fixture
def jobs(place):
    return place.mailbox()


@pytest.fixture
def mailbox(place, jobs):
    with jobs.sync as opened:
        place.execute("CREATE TABLE SCHEMA.effects (what text)")
        yield opened


@pytest.fixture
def engine(place):
    made = create_engine(place.url.replace("postgresql://", "postgresql+psycopg://"))
    yield made
    made.dispose()


def effects(place):
    return [what for (what,) in place.execute("SELECT what FROM SCHEMA.effects ORDER BY what")]


def bodies(mailbox):
    return [message.body for message in mailbox.receive(max_messages=99)]


def test_a_message_exists_if_and_when_the_threads_transaction_commits(place, mailbox):
    with psycopg.connect(place.url, row_factory=psycopg.rows.dict_row) as connection:
        connection.execute(f"INSERT INTO {place.schema}.effects VALUES ('order')")
        sent = mailbox.send("x", connection=connection)
        more = mailbox.send_many(["y", "z"], connection=connection, priority=1, headers={"k": "v"})
        assert mailbox.receive() == []
        connection.commit()
        found = mailbox.receive(max_messages=9)
        assert [message.id for message in found] == [*more, sent]
        assert dict(found[0].headers) == {"k": "v"}
        mailbox.send("never", connection=connection, dedup_key="k", delay=60)
        connection.rollback()
        with connection.transaction():
            first = mailbox.send("a", connection=connection, dedup_key="k")
            assert mailbox.send("b", connection=connection, dedup_key="k") == first
    assert bodies(mailbox) == ["a"]
    assert effects(place) == ["order"]


def test_only_the_calling_thread_uses_its_connection(place, mailbox):
    users = set()

    class Own(psycopg.Connection):
        def wait(self, *args, **keywords):
            users.add(threading.get_ident())
            return super().wait(*args, **keywords)

    with Own.connect(place.url) as connection:
        mailbox.send("x", connection=connection)
    assert users == {threading.get_ident()}


def test_the_commit_wakes_a_receiver_of_another_thread(place, mailbox):
    got = []
    receiver = threading.Thread(target=lambda: got.extend(mailbox.receive(wait_time_seconds=20)))
    with psycopg.connect(place.url) as connection:
        receiver.start()
        mailbox.send("x", connection=connection)
    receiver.join(10)
    assert [message.body for message in got] == ["x"]


def test_with_sqlalchemy(place, mailbox, engine):
    statement = text(f"INSERT INTO {place.schema}.effects VALUES (:what)")
    with engine.begin() as connection:
        connection.execute(statement, {"what": "1"})
        mailbox.send("1", connection=connection)
    with pytest.raises(LookupError), engine.begin() as connection:  # noqa: PT012
        mailbox.send("2", connection=connection)
        raise LookupError
    with engine.connect() as connection:
        mailbox.send("3", connection=connection)  # the first thing on it
        connection.commit()
    with Session(engine) as session:
        mailbox.send("4", connection=session)
        session.execute(statement, {"what": "4"})
        session.commit()
    with Session(engine) as session:
        mailbox.send("5", connection=session)
    sessions = scoped_session(sessionmaker(engine))
    mailbox.send("6", connection=sessions)
    sessions.commit()
    sessions.remove()
    assert bodies(mailbox) == ["1", "3", "4", "6"]
    assert effects(place) == ["1", "4"]


def test_what_is_no_transaction_of_its_own_is_refused(place, jobs, mailbox):
    with psycopg.connect(place.url, autocommit=True) as connection:
        with pytest.raises(InvalidParameterError, match="in autocommit and in no transaction"):
            mailbox.send("x", connection=connection)
        with connection.transaction():
            mailbox.send("y", connection=connection)
    with pytest.raises(
        InvalidParameterError, match=r"sync\.send: connection must be a psycopg or psycopg2 connection, a"
    ):
        mailbox.send("x", connection=object())
    with psycopg.connect(place.url) as connection:
        with pytest.raises(InvalidParameterError, match=r"not async are for mailbox\.sync\.send"):
            mailbox.call(jobs.send, "x", connection=connection)
        connection.execute(f"UPDATE {place.schema}.store SET id = 'another'")
        with pytest.raises(InvalidParameterError, match="not to the database of the mailbox"):
            mailbox.send("x", connection=connection)
        connection.rollback()
        for elsewhere in ("SCHEMA {} RENAME TO {}_away", "FUNCTION {}.check_store RENAME TO away"):
            connection.execute(f"ALTER {elsewhere.format(place.schema, place.schema)}")
            with pytest.raises(InvalidParameterError, match="not to the database of the mailbox"):
                mailbox.send("x", connection=connection)
            connection.rollback()
        with pytest.raises(psycopg.errors.UndefinedTable):
            connection.execute("SELECT * FROM nowhere")
        with pytest.raises(MailboxError, match="transaction is aborted"):
            mailbox.send("x", connection=connection)
    assert bodies(mailbox) == ["y"]


def test_mailboxes_that_take_none_refuse_it(place, engine):
    with InMemoryMailbox("jobs").sync as other, pytest.raises(ConfigError, match="has no transactions"):
        other.send("x", connection=object())
    with place.mailbox(capacity=1).sync as bounded, engine.begin() as connection:
        with pytest.raises(InvalidParameterError, match="has a capacity"):
            bounded.send("x", connection=connection)
        bounded.send("x")
        with pytest.raises(MailboxFullError):
            bounded.send("y", connection=None)
