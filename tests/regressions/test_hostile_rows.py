"""What another program wrote into the file, and addresses that nobody can reply to: one message's matter, never its loop's."""

from __future__ import annotations

import apsw
import pytest

from mainspring import InvalidParameterError, LoopGroup, MainLoop, ReplyNotAvailableError
from mainspring.mailbox.sqlite.mailbox import SQLiteMailbox

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("headers", ["", "no json", "[1]", '{"a": 1}', "null", "[" * 100_000])
async def test_headers_that_are_none_go_to_the_dead_letters_and_their_neighbours_come_out(tmp_path, headers):
    path = tmp_path / "mail.db"
    async with SQLiteMailbox(path) as mailbox:
        ids = await mailbox.send_many(["first", "spoiled", "spoiled", "last"], headers={"kind": "letter"})
        connection = apsw.Connection(str(path))
        connection.execute("UPDATE messages SET headers = ? WHERE id IN (?, ?)", (headers, *ids[1:3]))
        connection.close()
        received = [(await mailbox.receive())[0] for _ in range(2)]
        assert [message.body for message in received] == ["first", "last"]
        assert received[0].headers == {"kind": "letter"}
        assert await mailbox.receive() == []
        dead = await mailbox.dead_letters()
        assert [(letter.body, letter.error_type, letter.headers) for letter in dead] == [
            ("spoiled", "NotJsonError", {})
        ] * 2
        counts = await mailbox.counts()
        assert (counts.pending, counts.in_flight, counts.dead) == (0, 2, 2)


async def test_an_address_that_is_no_url_ends_the_message_at_once_and_not_by_its_lease(tmp_path):
    async def answer(question: str) -> str:
        return question

    mailbox = SQLiteMailbox(tmp_path / "mail.db")
    async with mailbox:
        await mailbox.send("where to?", reply_to="http://[nowhere")
        group = LoopGroup([MainLoop(mailbox, answer)], block_threshold=None)
        await group.run(install_signals=False, until_empty=True)
        (letter,) = await mailbox.dead_letters()
    assert letter.error_type == ReplyNotAvailableError.__name__
    assert letter.attempt == 1
    assert "http://[nowhere" in letter.error


@pytest.mark.parametrize("address", ["", b"replies", 5, object()])
async def test_what_is_no_address_is_refused_at_the_send(tmp_path, address):
    async with SQLiteMailbox(tmp_path / "mail.db") as mailbox:
        with pytest.raises(InvalidParameterError, match="reply_to must be"):
            await mailbox.send("where to?", reply_to=address)
        with pytest.raises(InvalidParameterError, match="reply_to must be"):
            await mailbox.send_many(["where to?"], reply_to=address)
        assert (await mailbox.counts()).pending == 0
