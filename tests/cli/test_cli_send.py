"""``mainspring send``: bodies from arguments, files and standard input; all of them or none."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import anyio
import pytest
from cli_helpers import MAINSPRING, only_line, run

from mainspring import MailboxFullError, open_mailbox
from mainspring.cli.send import read_bodies, send_bodies

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.own_time(2)

URL = "sqlite:///jobs.db?name=emails"


def received(directory: Path) -> list[Any]:
    """Take everything out of the mailbox, in order, with the headers that tests look at."""

    async def take() -> list[Any]:
        async with open_mailbox(f"sqlite:///{directory / 'jobs.db'}?name=emails") as mailbox:
            found = []
            while messages := await mailbox.receive(max_messages=1_000):
                for message in messages:
                    found.append(message)
                    await message.acknowledge()
            return found

    return anyio.run(take)


def bodies(directory: Path) -> list[Any]:
    return [message.body for message in received(directory)]


def test_bodies_from_arguments_and_their_ids(tmp_path: Path) -> None:
    ended = run("send", URL, '{"to": "ann"}', '"text"', "3", cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    messages = received(tmp_path)
    assert [message.body for message in messages] == [{"to": "ann"}, "text", 3]
    assert ended.stdout.split() == [message.id for message in messages]


def test_a_name_that_nobody_has_opened_is_told_of_as_it_may_be_mistyped(tmp_path: Path) -> None:
    first, second = (run("send", URL, "1", cwd=tmp_path) for _ in range(2))
    said = only_line(first.stderr)
    assert said.startswith("mainspring: there was no mailbox sqlite:///")
    assert said.endswith("?name=emails, and it was made; check the name, unless its workers are to come")
    assert (first.returncode, second.returncode, second.stderr) == (0, 0, "")
    assert bodies(tmp_path) == [1, 1]


def test_json_output(tmp_path: Path) -> None:
    ended = run("send", URL, "1", "2", "--json", cwd=tmp_path)
    printed = json.loads(ended.stdout)
    assert printed == {"mailbox": "emails", "sent": 2, "ids": [message.id for message in received(tmp_path)]}


def test_json_lines_from_standard_input_with_blank_ones(tmp_path: Path) -> None:
    assert run("send", URL, cwd=tmp_path, stdin='{"n": 1}\n\n{"n": 2}').returncode == 0
    assert bodies(tmp_path) == [{"n": 1}, {"n": 2}]


def test_a_dash_is_standard_input(tmp_path: Path) -> None:
    assert run("send", URL, "--file", "-", cwd=tmp_path, stdin="[1]\n").returncode == 0
    assert bodies(tmp_path) == [[1]]


@pytest.mark.slow
def test_a_large_file_is_sent_in_order(tmp_path: Path) -> None:
    (tmp_path / "jobs.jsonl").write_text("".join(f'{{"n": {n}}}\n' for n in range(2_501)), encoding="utf-8")
    ended = run("send", URL, "--file", "jobs.jsonl", cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert len(set(ended.stdout.split())) == 2_501
    assert [body["n"] for body in bodies(tmp_path)] == list(range(2_501))


def test_one_document_over_several_lines_is_one_body(tmp_path: Path) -> None:
    assert run("send", URL, cwd=tmp_path, stdin='{\n  "to": "ann",\n  "n": 1\n}\n').returncode == 0
    assert bodies(tmp_path) == [{"to": "ann", "n": 1}]


def test_a_bad_line_is_named_and_nothing_is_sent(tmp_path: Path) -> None:
    lines = "".join(f'{{"n": {n}}}\n' for n in range(1_200)) + "{nope}\n"
    ended = run("send", URL, cwd=tmp_path, stdin=lines)
    assert ended.returncode == 2
    line = only_line(ended.stderr)
    assert "line 1201 of standard input is no JSON" in line
    assert "nothing was sent" in line
    assert bodies(tmp_path) == []


def test_a_bad_argument_is_named_and_nothing_is_sent(tmp_path: Path) -> None:
    ended = run("send", URL, "1", "text", cwd=tmp_path)
    assert ended.returncode == 2
    assert "body 2 is no JSON" in only_line(ended.stderr)
    assert "'\"text\"'" in ended.stderr
    assert not (tmp_path / "jobs.db").exists()


def test_priority_headers_and_reply_address(tmp_path: Path) -> None:
    run("send", URL, "1", "--header", "tenant=a=b", "--header", "x=", "--reply-to", "answers", cwd=tmp_path)
    run("send", URL, "2", "--priority", "5", cwd=tmp_path)
    first, second = received(tmp_path)
    assert (first.body, second.body) == (2, 1)
    assert dict(second.headers) == {"tenant": "a=b", "x": ""}
    assert second.reply_to == "answers"


def test_a_delay_is_not_over_yet(tmp_path: Path) -> None:
    assert run("send", URL, "1", "--delay", "3600", cwd=tmp_path).returncode == 0
    assert bodies(tmp_path) == []


@pytest.mark.parametrize("delay", ["60s", "5m", "1.5h", "1d", "7"])
def test_a_delay_is_a_duration(tmp_path: Path, delay: str) -> None:
    assert run("send", URL, "1", "--delay", delay, cwd=tmp_path).returncode == 0
    assert bodies(tmp_path) == []


def test_an_instant_in_the_future_is_a_delay_and_one_in_the_past_is_now(tmp_path: Path) -> None:
    tomorrow = (datetime.now(UTC) + timedelta(days=1)).isoformat()
    assert run("send", URL, "1", "--at", tomorrow, cwd=tmp_path).returncode == 0
    assert run("send", URL, "2", "--at", "1999-12-31T23:59:59+01:00", cwd=tmp_path).returncode == 0
    assert bodies(tmp_path) == [2]


def test_an_expiry_is_a_duration(tmp_path: Path) -> None:
    assert run("send", URL, "1", "--expires-in", "1h", cwd=tmp_path).returncode == 0
    assert bodies(tmp_path) == [1]


def test_a_dedup_key_sends_once(tmp_path: Path) -> None:
    first = run("send", URL, "1", "--dedup-key", "order-7", cwd=tmp_path)
    second = run("send", URL, "1", "--dedup-key", "order-7", cwd=tmp_path)
    assert first.stdout == second.stdout
    assert bodies(tmp_path) == [1]


def test_nothing_to_send_is_said(tmp_path: Path) -> None:
    ended = run("send", URL, cwd=tmp_path, stdin="\n")
    assert ended.returncode == 0
    assert ended.stdout == ""
    assert "there was nothing to send" in ended.stderr


@pytest.mark.parametrize(
    ("arguments", "stdin", "expected"),
    [
        ([URL, "NaN"], "", "NaN is not JSON"),
        ([URL, '"\udcff"'], "", "body 1 is no JSON (it is not UTF-8)"),
        ([URL, "1", "--file", "x.jsonl"], "", "give bodies as arguments or by --file, not both"),
        ([URL, "--file", "missing.jsonl"], "", "cannot read --file missing.jsonl: No such file"),
        ([URL, "--dedup-key", "k"], "1\n2\n", "--dedup-key names one message, but there are 2 bodies"),
        ([URL, "1", "--header", "novalue"], "", "--header 'novalue' must be KEY=VALUE"),
        ([URL, "1", "--delay", "-1"], "", "Invalid value for '--delay': '-1' is no duration; write for example 90s"),
        ([URL, "1", "--delay", "5x"], "", "Invalid value for '--delay': '5x' is no duration; write for example 90s"),
        ([URL, "1", "--delay", "nan"], "", "'nan' is no duration"),
        ([URL, "1", "--delay", "367d"], "", "delay must be 0 to"),
        (
            [URL, "1", "--at", "2026-01-10T09:00:00"],
            "",
            "'--at': '2026-01-10T09:00:00' is no date and time with a time zone",
        ),
        ([URL, "1", "--at", "tomorrow"], "", "write for example 2026-01-10T09:00:00Z"),
        ([URL, "1", "--at", "2026-01-10T09:00:00Z", "--delay", "5m"], "", "give delay or at, not both"),
        ([URL, "1", "--priority", "99999"], "", "priority must be a whole number within"),
        ([URL, "1", "--expires-in", "0"], "", "expires_in must be above 0"),
        (["memory://jobs", "1"], "", "a memory:// mailbox lives and ends with one process"),
        (["app:tasks", "1"], "", "'app:tasks' is no URL of a mailbox; write it as sqlite:///"),
        (["carrier-pigeon://jobs", "1"], "", "no mailbox backend has the scheme"),
        (["sqlite:///jobs.db?frob=1", "1"], "", "frob"),
        ([], "", "Missing argument 'URL'"),
    ],
)
def test_wrong_use_is_one_line_and_status_2(tmp_path: Path, arguments: list[str], stdin: str, expected: str) -> None:
    ended = run("send", *arguments, cwd=tmp_path, stdin=stdin)
    assert ended.returncode == 2, ended.stderr
    assert expected in only_line(ended.stderr)
    assert ended.stdout == ""


def test_a_file_that_is_no_mailbox_is_one_line_and_status_2(tmp_path: Path) -> None:
    (tmp_path / "jobs.db").write_text("this is no database, but long enough for one" * 100, encoding="utf-8")
    ended = run("send", URL, "1", cwd=tmp_path)
    assert ended.returncode == 2
    assert "jobs.db is no SQLite database" in only_line(ended.stderr)


class Filling:
    """A mailbox that takes one chunk only."""

    name = "small"

    def __init__(self) -> None:
        self.sizes: list[int] = []

    async def exists(self) -> bool:
        return True

    async def __aenter__(self) -> Filling:
        return self

    async def __aexit__(self, *exc: object) -> None: ...

    async def send_many(self, chunk: list[Any], **options: Any) -> list[str]:
        if self.sizes:
            raise MailboxFullError("mailbox 'small' is full")
        self.sizes.append(len(chunk))
        return [str(number) for number in range(len(chunk))]


def test_an_error_half_way_tells_what_was_sent(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    mailbox = Filling()
    monkeypatch.setattr("mainspring.cli.send.open_mailbox", lambda url: mailbox)
    status = send_bodies("sqlite:///x.db", ["1"] * 1_001, None, as_json=True)
    printed = capsys.readouterr()
    assert status == 1
    assert mailbox.sizes == [1_000]
    assert json.loads(printed.out)["sent"] == 1_000
    assert only_line(printed.err) == (
        "mainspring: mailbox 'small' is full; 1,000 of 1,001 messages were sent, the rest was not"
    )


def test_a_pipe_is_read_to_its_end_a_directory_is_refused_and_nothing_is_nothing(tmp_path: Path) -> None:
    pipe = tmp_path / "bodies"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_text, args=('{"a": 1}\n{"a": 2}\n',))
    writer.start()
    sent = run("send", "sqlite:///jobs.db?name=jobs", "--file", "bodies", cwd=tmp_path)
    writer.join()
    assert (sent.returncode, len(sent.stdout.split())) == (0, 2)
    assert "mainspring: reading the pipe bodies until its writers have closed it\n" in sent.stderr
    refused = run("send", "sqlite:///jobs.db?name=jobs", "--file", ".", cwd=tmp_path)
    assert refused.returncode == 2
    assert refused.stderr == "mainspring: cannot read --file .: Is a directory; nothing was sent\n"
    nothing = run("send", "sqlite:///jobs.db?name=jobs", "--file", "/dev/null", cwd=tmp_path)
    assert (nothing.returncode, nothing.stderr) == (0, "mainspring: there was nothing to send\n")


@pytest.mark.slow
def test_a_reader_that_has_gone_changes_no_status(tmp_path: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    command = [*MAINSPRING, "send", "sqlite:///jobs.db?name=jobs", "1", "2"]
    assert subprocess.run(command, cwd=tmp_path, stdout=write, stderr=write, timeout=60, check=False).returncode == 0
    os.close(write)
    listed = run("send", "sqlite:///jobs.db?name=jobs", "3", cwd=tmp_path)
    assert "it was made" not in listed.stderr  # by the first


def test_what_is_appended_to_the_file_meanwhile_was_not_checked_and_is_not_sent(tmp_path: Path) -> None:
    path = tmp_path / "jobs.jsonl"
    path.write_text("1\n\n2\n", encoding="utf-8")
    with path.open("rb") as lines:
        bodies, count = read_bodies(lines, path.name)
        with path.open("a", encoding="utf-8") as more:
            more.write('3\n{"half": ')
        assert (list(bodies), count) == ([1, 2], 2)
