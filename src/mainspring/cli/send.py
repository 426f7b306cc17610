"""``mainspring send``: JSON bodies into a mailbox, all or none."""

from __future__ import annotations

import json
import math
import sys
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, TYPE_CHECKING, Any

import anyio
import typer

from mainspring.cli.user_errors import FAILED, UserError, say
from mainspring.errors import ConfigError, MainspringError
from mainspring.mailbox.limits import is_text
from mainspring.mailbox.open import open_mailbox

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from mainspring.mailbox.mailbox import Mailbox

CHUNK = 1_000
_WHOLE_DOCUMENT = 16 * 2**20  # up to here, a file that is no JSON lines is tried as one JSON document


def send_bodies(
    url: str,
    arguments: Sequence[str],
    file: str | None,
    *,
    headers: Iterable[str] = (),
    dedup_key: str | None = None,
    as_json: bool = False,
    **keywords: Any,
) -> int:
    """Parse everything, then send, and print the ids. Raise :class:`UserError` for what is wrong with the input.

    :param headers: ``KEY=VALUE`` each.
    :param keywords: those of :meth:`Mailbox.send_many`, for each message.
    """
    if arguments and file is not None:
        raise UserError("give bodies as arguments or by --file, not both")
    keywords["headers"] = parse_headers(headers)
    mailbox = _open(url)
    with ExitStack() as stack:
        if arguments:
            bodies: Iterable[Any] = parse_arguments(arguments)
            count = len(arguments)
        else:
            lines = stack.enter_context(_input(file))
            bodies, count = read_bodies(lines, "standard input" if file in {None, "-"} else str(file))
        if dedup_key is not None and count != 1:
            raise UserError(f"--dedup-key names one message, but there are {count} bodies; send them one by one")
        ids, error = anyio.run(_send, mailbox, bodies, dedup_key, keywords)
    _print(mailbox.name, ids, as_json)
    if error is not None:
        say(f"{error}; {len(ids):,} of {count:,} messages were sent, the rest was not")
        return FAILED
    if not count:
        say("there was nothing to send")
    return 0


def _print(name: str, ids: list[str], as_json: bool) -> None:
    try:
        if as_json:
            typer.echo(json.dumps({"mailbox": name, "sent": len(ids), "ids": ids}))
        else:
            typer.echo("".join(f"{message_id}\n" for message_id in ids), nl=False)
    except BrokenPipeError:
        raise
    except OSError as error:
        sys.stdout = None  # else the end of the program tries once more, and complains
        raise UserError(
            f"{len(ids):,} message(s) were sent, but not all ids could be printed: {error.strerror}", FAILED
        ) from None


def parse_headers(pairs: Iterable[str]) -> dict[str, str]:
    """Return ``KEY=VALUE`` strings as a dictionary."""
    headers = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not (key and equals):
            raise UserError(f"--header {pair!r} must be KEY=VALUE")
        headers[key] = value
    return headers


def parse_arguments(arguments: Sequence[str]) -> list[Any]:
    """Return each argument as JSON. Raise :class:`UserError` with the name of an argument that is no JSON."""
    bodies = []
    for number, text in enumerate(arguments, 1):
        try:
            bodies.append(parse_json(text))
        except ValueError as error:
            raise UserError(
                f"body {number} is no JSON ({error}); nothing was sent. A string needs its own quotes: '\"text\"'"
            ) from None
    return bodies


def read_bodies(lines: IO[bytes], name: str) -> tuple[Iterator[Any], int]:
    """Check a seekable file of JSON lines, or of one document. Return its bodies, parsed as they are read, and their number.

    Two passes keep the memory small and send nothing of a file that has a bad line.
    """
    count = 0
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            parse_json(line)
        except ValueError as error:
            document = _whole_document(lines)
            if document is not None:
                return iter(document), 1
            raise UserError(
                f"line {number} of {name} is no JSON ({error}); nothing was sent. Each body stands on one line, as `jq -c .`"
                " writes it, or the file is one document"
            ) from None
        count += 1
    lines.seek(0)
    # What is appended to the file meanwhile was not checked.
    return islice((json.loads(line) for line in lines if line.strip()), count), count


def _whole_document(lines: IO[bytes]) -> list[Any] | None:
    """Return the file as one JSON document over several lines, in a list, or None if it is none."""
    lines.seek(0)
    text = lines.read(_WHOLE_DOCUMENT + 1)
    try:
        return [parse_json(text)] if len(text) <= _WHOLE_DOCUMENT else None
    except ValueError:
        return None


def parse_json(text: str | bytes) -> Any:
    """Return ``text`` as JSON. Raise :class:`ValueError` if it is none, or if a mailbox could not keep it."""
    if isinstance(text, str) and not is_text(text):
        raise ValueError("it is not UTF-8")
    try:
        value = json.loads(text, parse_constant=_no_constant, parse_float=_finite)
        json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("it is nested too deeply; send flatter JSON") from None
    return value


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"{text[:20]} is too large for a number; send it as a string")
    return number


def _input(file: str | None) -> IO[bytes]:
    if file is not None and file != "-":
        try:
            if Path(file).is_fifo():
                say(f"reading the pipe {file} until its writers have closed it")
            opened = Path(file).open("rb")  # noqa: SIM115 - the caller closes it
            if Path(file).is_file():
                return opened
            with opened:
                return _spooled(opened)
        except OSError as error:
            raise UserError(f"cannot read --file {file}: {error.strerror}; nothing was sent") from None
    if sys.stdin is None:  # it was closed
        raise UserError("there is no standard input to read: give bodies as arguments or by --file")
    if file is None and sys.stdin.isatty():
        raise UserError("there is nothing to send: give bodies as arguments, by --file, or on standard input")
    try:
        return _spooled(sys.stdin.buffer)
    except OSError as error:
        raise UserError(f"standard input cannot be read: {error.strerror}; nothing was sent") from None


def _spooled(stream: IO[bytes]) -> IO[bytes]:
    """Return all of a stream as a file that can be read twice."""
    spool = TemporaryFile()  # noqa: SIM115 - the caller closes it
    try:
        while block := stream.read(1 << 20):
            spool.write(block)
    except BaseException:
        spool.close()
        raise
    spool.seek(0)
    return spool


def _open(url: str) -> Mailbox[Any, Any]:
    if url.startswith("memory:"):
        raise UserError(
            "a memory:// mailbox lives and ends with one process: no worker would receive it; send to one that processes"
            " share, as in sqlite:///jobs.db?name=jobs"
        )
    if "://" not in url:
        raise UserError(f"send: {url!r:.100} is no URL of a mailbox; write it as sqlite:///jobs.db?name=jobs")
    return open_mailbox(url)


async def _send(
    mailbox: Mailbox[Any, Any], bodies: Iterable[Any], dedup_key: str | None, keywords: dict[str, Any]
) -> tuple[list[str], MainspringError | None]:
    """Send in chunks. Return the ids of what was sent, and the error that stopped it, if one did."""
    ids: list[str] = []
    made, stopped = False, None
    try:
        made = not await mailbox.exists()
        async with mailbox:
            remaining = iter(bodies)
            if dedup_key is not None:
                ids.append(await mailbox.send(next(remaining), dedup_key=dedup_key, **keywords))
            while chunk := list(islice(remaining, CHUNK)):
                ids += await mailbox.send_many(chunk, **keywords)
    except ConfigError:
        raise
    except MainspringError as error:
        if not ids:
            raise
        stopped = error
    if made:  # no error, as the first sender may come before the first worker
        say(f"there was no mailbox {mailbox.address}, and it was made; check the name, unless its workers are to come")
    return ids, stopped
