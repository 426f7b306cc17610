"""``mainspring dead``: list, show, replay and purge, of those that are meant and of no others."""

from __future__ import annotations

import json
import os
import pty
import subprocess
from contextlib import closing
from os import close, fdopen, write
from typing import TYPE_CHECKING, Any

import anyio
import apsw
import pytest
from cli_helpers import MAINSPRING, PATIENCE, only_line, run

from mainspring import InMemoryMailbox, open_mailbox
from mainspring.cli import dead
from mainspring.cli.app import call

if TYPE_CHECKING:
    from pathlib import Path

    from mainspring import Mailbox, Message

pytestmark = pytest.mark.own_time(2)


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'jobs.db'}?name=emails"


def with_mailbox(url: str, act: Any) -> Any:
    async def main() -> Any:
        async with open_mailbox(url) as mailbox:
            return await act(mailbox)

    return anyio.run(main)


async def _die(message: Message[Any, Any]) -> None:
    try:
        raise (LookupError if message.body % 2 else TimeoutError)(f"no answer to {message.body}")
    except Exception as error:
        await message.dead_letter(error)


@pytest.fixture
def ids(url: str) -> list[str]:
    """Six dead letters, 0 to 5, of which the odd ones died of a LookupError; one more message waits."""

    async def fill(mailbox: Mailbox[Any, Any]) -> list[str]:
        sent = await mailbox.send_many(range(6), headers={"tenant": "a"}, reply_to="elsewhere")
        (first, *others) = await mailbox.receive(max_messages=6)
        await first.nack(error=ConnectionError("at first"))
        for message in others:
            await _die(message)
        await _die((await mailbox.receive())[0])
        await mailbox.send("alive")
        return [*sent[1:], sent[0]]

    found: list[str] = with_mailbox(url, fill)
    return found


def counts(url: str) -> tuple[int, int, int]:
    """How many are pending, dead, settled."""

    async def look(mailbox: Mailbox[Any, Any]) -> tuple[int, int, int]:
        found = await mailbox.counts()
        return found.pending, found.dead, found.settled

    seen: tuple[int, int, int] = with_mailbox(url, look)
    return seen


def dead_bodies(url: str) -> list[int]:
    async def look(mailbox: Mailbox[Any, Any]) -> list[int]:
        return sorted(letter.body for letter in await mailbox.dead_letters())

    found: list[int] = with_mailbox(url, look)
    return found


def age(url: str, message_ids: list[str], seconds: float) -> None:
    """Let some of them have died that much earlier."""
    path = url.removeprefix("sqlite:///").partition("?")[0]
    with closing(apsw.Connection(path)) as connection:
        marks = ",".join("?" * len(message_ids))
        connection.execute(f"UPDATE dead SET dead_at = dead_at - {seconds} WHERE id IN ({marks})", message_ids)


# ---------------------------------------------------------------------------------------------------------------- list


def test_the_list_has_a_line_for_each_the_oldest_first(url: str, ids: list[str], capsys: Any) -> None:
    assert call(["dead", "list", url]) == 0
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    assert [line.split()[0] for line in lines] == ids
    assert "LookupError: no answer to 1" in lines[0]
    assert "attempt 2" in lines[-1]
    assert only_line(printed.err) == "mainspring: 6 dead letter(s) in emails"


def test_a_filter_of_the_list_says_how_many_of_all(url: str, ids: list[str], capsys: Any) -> None:
    assert call(["dead", "list", url, "--error-type", "LookupError", "--limit", "2"]) == 0
    printed = capsys.readouterr()
    assert [line.split()[0] for line in printed.out.splitlines()] == [ids[0], ids[2]]
    assert only_line(printed.err) == "mainspring: 3 of 6 dead letter(s) in emails, 1 more are not shown (--limit)"


def test_the_list_as_json(url: str, ids: list[str], capsys: Any) -> None:
    assert call(["dead", "list", url, "--match", "ANSWER TO 3", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    (letter,) = printed.pop("letters")
    assert printed == {"mailbox": "emails", "dead": 6, "matched": 1}
    assert (letter["message_id"], letter["body"], letter["error_type"]) == (ids[2], 3, "LookupError")
    assert (letter["headers"], letter["reply_to"]) == ({"tenant": "a"}, "elsewhere")
    assert "traceback" not in letter


@pytest.mark.parametrize(
    ("since", "matched"), [("1h", 4), ("3d", 6), ("0", 0), ("2001-01-01", 6), ("2999-01-01T00:00:00", 0)]
)
def test_since_is_an_age_or_a_date(url: str, ids: list[str], capsys: Any, since: str, matched: int) -> None:
    age(url, ids[:2], 7_200)
    assert call(["dead", "list", url, "--since", since, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["matched"] == matched


@pytest.mark.parametrize(
    ("window", "matched"),
    [
        (["--older-than", "1h"], 2),
        (["--older-than", "3d"], 0),
        (["--older-than", "0"], 6),
        (["--older-than", "2001-01-01"], 0),
        (["--older-than", "1h", "--since", "3h"], 2),
        (["--older-than", "1h", "--error", "LookupError"], 1),
    ],
)
def test_older_than_selects_the_old_ones(
    url: str, ids: list[str], capsys: Any, window: list[str], matched: int
) -> None:
    age(url, ids[:2], 7_200)
    assert call(["dead", "list", url, *window, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["matched"] == matched
    assert {letter["message_id"] for letter in found["letters"]} <= set(ids[:2] if matched <= 2 else ids)


def test_replay_and_purge_take_the_old_ones_only(url: str, ids: list[str]) -> None:
    age(url, ids[:2], 7_200)
    age(url, ids[2:3], 200_000)
    assert call(["dead", "replay", url, "--older-than", "1h", "--since", "1d", "--yes"]) == 0
    assert counts(url) == (3, 4, 0)
    assert call(["dead", "purge", url, "--older-than", "1h", "--yes"]) == 0
    assert counts(url) == (3, 3, 1)


def test_a_window_that_holds_no_time(url: str, ids: list[str], capsys: Any) -> None:
    assert call(["dead", "purge", url, "--older-than", "3h", "--since", "1h", "--yes"]) == 2
    assert "--since must be the longer ago" in only_line(capsys.readouterr().err)
    assert counts(url) == (1, 6, 0)


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["latin-1", "cp1252:strict", "utf-8:strict"])
def test_what_the_terminal_cannot_show_is_escaped(tmp_path: Path, url: str, encoding: str) -> None:
    async def fill(mailbox: Mailbox[Any, Any]) -> str:
        sent = await mailbox.send("日本 🙂 é")
        await (await mailbox.receive())[0].dead_letter("kein Weg nach 日本 🙂")
        return sent

    sent = with_mailbox(url, fill)

    def printed(*words: str) -> str:
        ended = subprocess.run(
            [*MAINSPRING, *words],
            capture_output=True,
            env={**os.environ, "PYTHONIOENCODING": encoding},
            check=False,
            timeout=PATIENCE,
            cwd=tmp_path,
        )
        assert b"Traceback" not in ended.stderr, ended.stderr
        return (ended.stdout + ended.stderr).decode(encoding.partition(":")[0])

    escaped = not encoding.startswith("utf")
    listed, shown = printed("dead", "list", url), printed("dead", "show", url, sent)
    if encoding == "latin-1":
        assert r"\u65e5\u672c \U0001f642" in listed
        assert r"\u65e5\u672c \U0001f642 é" in shown
    assert ("日本" in listed) is not escaped
    (letter,) = json.loads(printed("dead", "list", url, "--json").rpartition("}")[0] + "}")["letters"]
    assert letter["body"] == "日本 🙂 é"
    missing = printed("dead", "show", url, "日本")
    assert ("there is no dead letter " + (r"\u65e5\u672c" if escaped else "日本")) in missing


def test_match_looks_into_the_headers_too(url: str, ids: list[str], capsys: Any) -> None:
    async def send_one_with_another_header(mailbox: Mailbox[Any, Any]) -> None:
        await mailbox.send(99, headers={"tenant": "b"})
        for message in await mailbox.receive(max_messages=5):
            if message.body == 99:
                await _die(message)

    with_mailbox(url, send_one_with_another_header)
    for text, matched in (("tenant=b", 1), ("Tenant", 7), ("=a", 6)):
        assert call(["dead", "list", url, "--match", text, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["matched"] == matched


def test_match_looks_into_the_body_too(url: str, ids: list[str], capsys: Any) -> None:
    async def more(mailbox: Mailbox[Any, Any]) -> None:
        await mailbox.send({"to": "Ann@example.org"}, priority=1)
        await (await mailbox.receive())[0].dead_letter("bounced")

    with_mailbox(url, more)
    assert call(["dead", "list", url, "--match", "ann@", "--json"]) == 0
    assert [letter["error"] for letter in json.loads(capsys.readouterr().out)["letters"]] == ["bounced"]


def test_errors_and_headers_cannot_speak_to_the_terminal(url: str, capsys: Any) -> None:
    async def one(mailbox: Mailbox[Any, Any]) -> str:
        sent: str = await mailbox.send("job", headers={"title \x1b]0;x\x07": "\x1b]0;y\x07"})
        await (await mailbox.receive())[0].dead_letter("red \x1b[31m\nand a line of its own")
        return sent

    message_id = with_mailbox(url, one)
    assert call(["dead", "list", url]) == 0
    assert only_line(capsys.readouterr().out).endswith(r"Reject: red \x1b[31m\nand a line of its own")
    assert call(["dead", "show", url, message_id]) == 0
    assert "\x1b" not in capsys.readouterr().out


# ---------------------------------------------------------------------------------------------------------------- show


def test_show_tells_everything(url: str, ids: list[str], capsys: Any) -> None:
    assert call(["dead", "show", url, ids[-1]]) == 0
    out = capsys.readouterr().out
    for part in (
        f"id        {ids[-1]}",
        "error     TimeoutError: no answer to 0",
        "attempts  2 (2 deliveries)",
        "reply to  elsewhere",
        "header tenant a",
        "body      0",
        "attempt 1, ",
        "ConnectionError: at first",
        "Traceback (most recent call last)",
    ):
        assert part in out


def test_show_as_json(url: str, ids: list[str], capsys: Any) -> None:
    assert call(["dead", "show", url, ids[-1], "--json"]) == 0
    letter = json.loads(capsys.readouterr().out)
    assert [(one["attempt"], one["error_type"]) for one in letter["history"]] == [
        (1, "ConnectionError"),
        (2, "TimeoutError"),
    ]
    assert letter["traceback"].startswith("Traceback")
    assert letter["dead_lettered_at"].endswith("+00:00")


def test_a_body_that_is_no_json_is_shown_as_it_is(url: str, capsys: Any) -> None:
    async def corrupt(mailbox: Mailbox[Any, Any]) -> str:
        sent: str = await mailbox.send("job")
        return sent

    message_id = with_mailbox(url, corrupt)
    with closing(apsw.Connection(url.removeprefix("sqlite:///").partition("?")[0])) as connection:
        connection.execute("UPDATE messages SET body = ?", (b"\xff{",))

    async def take(mailbox: Mailbox[Any, Any]) -> None:
        assert await mailbox.receive() == []

    with_mailbox(url, take)
    assert call(["dead", "show", url, message_id]) == 0
    assert r"body      \xff{" in capsys.readouterr().out
    assert call(["dead", "show", url, message_id, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["raw"] == "\ufffd{"


def test_one_that_is_not_there(url: str, ids: list[str], capsys: Any) -> None:
    assert call(["dead", "show", url, "no-such-id"]) == 1
    assert "no dead letter no-such-id in emails" in only_line(capsys.readouterr().err)


# ---------------------------------------------------------------------------------------------------- replay and purge


def test_replay_of_some_by_their_ids(url: str, ids: list[str], capsys: Any) -> None:
    assert call(["dead", "replay", url, ids[0], ids[1]]) == 0
    assert capsys.readouterr().out == "2 dead letter(s) replayed\n"
    assert counts(url) == (3, 4, 0)


def test_an_id_that_is_none_is_told_and_the_others_are_done(url: str, ids: list[str], capsys: Any) -> None:
    assert call(["dead", "replay", url, ids[0], "no-such-id", "--json"]) == 1
    printed = capsys.readouterr()
    assert json.loads(printed.out) == {"mailbox": "emails", "replayed": 1, "missing": 1}
    assert "1 of the ids" in only_line(printed.err)
    assert counts(url) == (2, 5, 0)


def test_replay_of_all(url: str, ids: list[str]) -> None:
    assert call(["dead", "replay", url, "--all", "--yes"]) == 0
    assert counts(url) == (7, 0, 0)


def test_filters_are_joined_by_and(url: str, ids: list[str]) -> None:
    age(url, ids[2:], 7_200)
    assert (
        call(["dead", "replay", url, "--error-type", "LookupError", "--since", "1h", "--match", "answer", "--yes"]) == 0
    )
    assert dead_bodies(url) == [0, 2, 3, 4, 5]


def test_a_filter_that_fits_nothing_does_nothing(url: str, ids: list[str], capsys: Any) -> None:
    assert call(["dead", "replay", url, "--match", "nothing like it", "--yes"]) == 0
    assert capsys.readouterr().out == "0 dead letter(s) replayed\n"
    assert counts(url) == (1, 6, 0)


def test_purge_by_id_does_not_ask(url: str, ids: list[str]) -> None:
    assert call(["dead", "purge", url, ids[0]]) == 0
    assert counts(url) == (1, 5, 1)


@pytest.mark.parametrize("verb", ["replay", "purge"])
@pytest.mark.parametrize("which", [["--all"], ["--error-type", "LookupError"]])
def test_without_a_terminal_many_want_yes(
    url: str, ids: list[str], tmp_path: Path, verb: str, which: list[str]
) -> None:
    ended = run("dead", verb, url, *which, cwd=tmp_path)
    assert ended.returncode == 2
    assert "--yes" in only_line(ended.stderr)
    assert counts(url) == (1, 6, 0)


def test_purge_with_yes(url: str, ids: list[str]) -> None:
    assert call(["dead", "purge", url, "--error-type", "TimeoutError", "--yes"]) == 0
    assert dead_bodies(url) == [1, 3, 5]
    assert call(["dead", "purge", url, "--all", "-y"]) == 0
    assert counts(url) == (1, 0, 6)


@pytest.mark.slow
@pytest.mark.parametrize(("answer", "status", "left"), [(b"y\n", 0, 0), (b"n\n", 1, 6)])
@pytest.mark.parametrize(
    ("verb", "asks"),
    [
        ("purge", "Forget 6 dead letter(s) of emails for good?"),
        ("replay", "Send 6 dead letter(s) of emails to their mailbox again?"),
    ],
)
def test_many_are_asked_for_at_a_terminal(
    url: str, ids: list[str], verb: str, asks: str, answer: bytes, status: int, left: int
) -> None:
    master, slave = pty.openpty()
    try:
        write(master, answer)
        ended = subprocess.run(
            [*MAINSPRING, "dead", verb, url, "--all"],
            stdin=slave,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
    finally:
        close(slave)
        fdopen(master, "wb").close()
    assert ended.returncode == status, ended.stderr
    assert asks in ended.stderr
    assert counts(url)[1] == left


def test_more_than_a_page_is_filtered_and_replayed(url: str) -> None:
    async def fill(mailbox: Mailbox[Any, Any]) -> None:
        await mailbox.send_many(range(dead.PAGE + 3))
        async with anyio.create_task_group() as group:
            while messages := await mailbox.receive(max_messages=1_000):
                for message in messages:
                    group.start_soon(message.dead_letter, "odd" if message.body else "even")

    with_mailbox(url, fill)
    assert call(["dead", "replay", url, "--match", "odd", "--yes"]) == 0
    assert counts(url) == (dead.PAGE + 2, 1, 0)


# --------------------------------------------------------------------------------------------------------- wrong uses


@pytest.mark.parametrize("verb", ["replay", "purge"])
@pytest.mark.parametrize("which", [[], ["some-id", "--all"], ["--all", "--match", "x"], ["some-id", "--since", "1h"]])
def test_what_is_meant_is_to_be_said_in_one_way(
    url: str, ids: list[str], capsys: Any, verb: str, which: list[str]
) -> None:
    assert call(["dead", verb, url, *which]) == 2
    assert f"dead {verb}: say which" in only_line(capsys.readouterr().err)
    assert counts(url) == (1, 6, 0)


@pytest.mark.parametrize("words", [["replay", "--yes"], ["purge", "--yes"]])
@pytest.mark.parametrize(
    "which", [["--match", ""], ["--error-type", ""], ["--since", ""], ["--older-than", ""], ["--match", " "], ["", ""]]
)
def test_an_empty_filter_is_no_way_to_say_all(
    url: str, ids: list[str], capsys: Any, words: list[str], which: list[str]
) -> None:
    assert call(["dead", words[0], url, *which, *words[1:]]) == 2
    told = only_line(capsys.readouterr().err)
    assert "'' is no time ago" in told if which[0] in {"--since", "--older-than"} else "is empty" in told
    assert counts(url) == (1, 6, 0)


@pytest.mark.parametrize("option", ["--since", "--older-than"])
@pytest.mark.parametrize("since", ["yesterday", "3w", "-5m", "nan", ""])
def test_a_time_that_is_none(url: str, ids: list[str], capsys: Any, option: str, since: str) -> None:
    assert call(["dead", "list", url, option, since]) == 2
    told = only_line(capsys.readouterr().err)
    if since:
        assert f"'{option}': {since!r} is no time ago; write for example 30m, 24h, 7d, or a date; see" in told


VERBS = (["list"], ["show", "an-id"], ["replay", "--all", "--yes"], ["purge", "--all", "--yes"])


@pytest.mark.parametrize("words", VERBS, ids=lambda words: words[0])
def test_a_file_that_is_not_there_is_not_made(tmp_path: Path, words: list[str], capsys: Any) -> None:
    verb, *more = words
    assert call(["dead", verb, f"sqlite:///{tmp_path / 'typo.db'}", *more]) == 1
    assert f"there is no mailbox sqlite:///{tmp_path / 'typo.db'}?name=default;" in only_line(capsys.readouterr().err)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("words", VERBS, ids=lambda words: words[0])
def test_a_name_that_is_not_in_the_file_is_not_made(
    url: str, ids: list[str], tmp_path: Path, words: list[str], capsys: Any
) -> None:
    verb, *more = words
    (tmp_path / "empty.db").touch()
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir() if file.is_file()}
    for typo, says in (
        (url.replace("emails", "mails"), "none of this name was ever opened: check it"),
        (url.replace("jobs.db", "empty.db"), "none of this name was ever opened: check it"),
        (url.partition("?")[0], "none of this name was ever opened: a URL without ?name= means this one"),
    ):
        assert call(["dead", verb, typo, *more]) == 1
        line = only_line(capsys.readouterr().err)
        assert line.startswith("mainspring: there is no mailbox sqlite:///")
        assert line.endswith(says)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir() if file.is_file()} == before


def test_dead_letters_are_grouped_by_their_errors(url: str, ids: list[str], capsys: Any) -> None:
    """Errors that differ in numbers only are one."""
    assert call(["dead", "list", url, "--by-error", "--json"]) == 0
    groups = json.loads(capsys.readouterr().out)["errors"]
    assert [(group["error_type"], group["dead"]) for group in groups] == [("LookupError", 3), ("TimeoutError", 3)]
    assert {group["latest"] for group in groups} <= set(ids)
    assert call(["dead", "list", url, "--by-error", "--error", "LookupError"]) == 0
    said = capsys.readouterr()
    assert said.out.split()[0] == "3"
    assert len(said.out.splitlines()) == 1
    assert "1 error(s) of 3 dead letter(s)" in said.err


def test_a_mailbox_that_is_there_and_empty(url: str, ids: list[str], capsys: Any) -> None:
    assert call(["dead", "purge", url, *ids]) == 0
    with_mailbox(url, lambda mailbox: mailbox.purge())
    capsys.readouterr()
    assert call(["dead", "list", url]) == 0
    assert only_line(capsys.readouterr().err) == "mainspring: 0 dead letter(s) in emails"


def test_a_mailbox_is_found_while_somebody_has_it_open(url: str) -> None:
    async def look(mailbox: Mailbox[Any, Any]) -> list[bool]:
        await mailbox.send("x")
        return [await one.exists() for one in (mailbox, open_mailbox(url), open_mailbox(f"{url}s"))]

    assert with_mailbox(url, look) == [True, True, False]


@pytest.mark.parametrize(
    ("text", "says"), [("no database at all" * 99, "is no SQLite database"), (None, "is no regular file")]
)
def test_a_file_that_is_another_programs(tmp_path: Path, text: str | None, says: str, capsys: Any) -> None:
    file = tmp_path / "other"
    file.mkdir() if text is None else file.write_text(text)
    assert call(["dead", "list", f"sqlite:///{file}"]) == 2
    assert says in only_line(capsys.readouterr().err)
    assert list(tmp_path.iterdir()) == [file]


def test_a_memory_mailbox_is_of_another_process(capsys: Any) -> None:
    assert call(["dead", "list", InMemoryMailbox("jobs").address]) == 2
    assert "lives and ends with one process" in only_line(capsys.readouterr().err)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["dead"], "see `mainspring dead --help`"),
        (["dead", "lost"], "see `mainspring dead --help`"),
        (["dead", "list"], "name a mailbox"),
        (["dead", "show", "sqlite:///jobs.db"], "give the id of one dead letter"),
        (["dead", "list", "nonsense"], "name a mailbox"),
    ],
)
def test_a_wrong_use_is_one_line_that_says_what_to_do(words: list[str], says: str, capsys: Any) -> None:
    assert call(words) == 2
    assert says in only_line(capsys.readouterr().err)


@pytest.mark.parametrize("verb", ["list", "show", "replay", "purge"])
def test_the_help_of_each_verb_has_an_example(verb: str, capsys: Any) -> None:
    assert call(["dead", verb, "--help"]) == 0
    assert "Example: " in capsys.readouterr().out
