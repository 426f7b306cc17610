"""``mainspring dead``: the dead letters of a mailbox, listed, shown, sent again and purged."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import typer

from mainspring.cli.store import mailbox_alone, mailbox_and_ids, with_mailbox
from mainspring.cli.user_errors import FAILED, UserError, printable, say
from mainspring.mailbox.mailbox import Mailbox
from mainspring.redaction import without_secrets
from mainspring.tasks.calls import CallCodec
from mainspring.validation import counted

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Sequence

    from mainspring.mailbox.message import DeadLetter

PAGE = 1_000
WIDTH = 160
"""Characters of a line of the list."""
_DONE = {"replay": "replayed", "purge": "purged"}
_NUMBERS = re.compile(r"[0-9]+")
"""Errors that differ in numbers only are one error."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Which dead letters are meant: those named, all, or those that fit every filter."""

    everything: bool
    task: str | None
    error_type: str | None
    since: datetime | None
    older_than: datetime | None
    match: str | None
    ids: Sequence[str] = ()

    @property
    def filtered(self) -> bool:
        """True if there is a filter."""
        filters = (self.task, self.error_type, self.since, self.older_than, self.match)
        return any(given is not None for given in filters)

    def check(self, verb: str) -> None:
        """Raise :class:`UserError` unless it says, in one way, what is meant."""
        if (bool(self.ids), self.everything, self.filtered).count(True) != 1:
            raise UserError(
                f"dead {verb}: say which: ids, or --all, or filters (--task, --error, --since, --older-than, --match), and only"
                " one of these"
            )
        said = (*self.ids, self.task, self.error_type, self.match)
        if any(text is not None and not text.strip() for text in said):  # as of a shell variable that is not set
            raise UserError(f"dead {verb}: an id or a filter is empty; say which dead letters are meant, or --all")

    def filter(self) -> Callable[[DeadLetter], bool]:
        """Return a function that says whether a dead letter fits the filters, but for its task: see :func:`_every`."""
        after, until = self.since, self.older_than
        if after is not None and until is not None and until < after:
            raise UserError(
                f"no time is since {_date(after)} and before {_date(until)}: --since must be the longer ago"
            )
        kind, text = self.error_type, None if self.match is None else self.match.casefold()

        def fits(letter: DeadLetter) -> bool:
            return (
                (kind is None or letter.error_type == kind)
                and (after is None or letter.dead_lettered_at >= after)
                and (until is None or letter.dead_lettered_at <= until)
                and (text is None or any(text in searched.casefold() for searched in _searched(letter)))
            )

        return fits


def list_dead(words: Sequence[str], choice: Choice, limit: int, as_json: bool) -> int:
    """Print the oldest dead letters that fit, and how many there are."""
    fits = choice.filter()

    async def look(mailbox: Mailbox[Any, Any]) -> tuple[list[DeadLetter], int, int]:
        total = (await mailbox.counts()).dead
        if not choice.filtered:
            return await mailbox.dead_letters(limit=limit), total, total
        shown: list[DeadLetter] = []
        matched = 0
        async for letter in _every(mailbox, choice.task):
            if fits(letter):
                matched += 1
                if len(shown) < limit:
                    shown.append(letter)
        return shown, matched, total

    mailbox = _face_of(mailbox_alone(words, "dead list"))
    letters, matched, total = with_mailbox(mailbox, look)
    if as_json:
        found = [_as_json(letter, long=False) for letter in letters]
        typer.echo(json.dumps({"mailbox": mailbox.name, "dead": total, "matched": matched, "letters": found}, indent=2))
        return 0
    for letter in letters:
        typer.echo(_line(letter))
    what = f"{matched:,} of {total:,}" if choice.filtered else f"{total:,}"
    rest = f", {matched - len(letters):,} more are not shown (--limit)" if matched > len(letters) else ""
    say(f"{what} dead letter(s) in {mailbox.name}{rest}")
    return 0


def group_dead(words: Sequence[str], choice: Choice, limit: int, as_json: bool) -> int:
    """Print how many dead letters died of which error, with the latest id of each."""
    fits = choice.filter()

    async def look(mailbox: Mailbox[Any, Any]) -> dict[tuple[str, str], list[DeadLetter]]:
        groups: dict[tuple[str, str], list[DeadLetter]] = {}
        async for letter in _every(mailbox, choice.task):
            if fits(letter):
                groups.setdefault((letter.error_type, _NUMBERS.sub("N", letter.error)), []).append(letter)
        return groups

    mailbox = _face_of(mailbox_alone(words, "dead list"))
    groups = sorted(with_mailbox(mailbox, look).values(), key=len, reverse=True)
    if as_json:
        found = [
            {"error_type": of[-1].error_type, "error": of[-1].error, "dead": len(of), "latest": of[-1].message_id}
            for of in groups[:limit]
        ]
        typer.echo(json.dumps({"mailbox": mailbox.name, "errors": found}, indent=2))
        return 0
    for of in groups[:limit]:
        error = printable(f"{of[-1].error_type}: {of[-1].error}")
        text = f"{len(of):>8,}  {of[-1].message_id}  {error}"
        typer.echo(text if len(text) <= WIDTH else f"{text[: WIDTH - 1]}…")
    say(f"{len(groups):,} error(s) of {sum(map(len, groups)):,} dead letter(s) in {mailbox.name}")
    return 0


def show_dead(words: Sequence[str], as_json: bool) -> int:
    """Print everything about one dead letter."""
    mailbox, ids = mailbox_and_ids(words)
    if len(ids) != 1:
        raise UserError(f"dead show: give the id of one dead letter, not {counted(len(ids), 'id')}")
    mailbox, message_id = _face_of(mailbox), ids[0]
    letter = with_mailbox(mailbox, lambda opened: opened.dead_letter(message_id))
    if letter is None:
        raise UserError(f"there is no dead letter {message_id} in {mailbox.name}; see `mainspring dead list`", FAILED)
    if as_json:
        typer.echo(json.dumps(_as_json(letter), indent=2))
        return 0
    facts: list[tuple[str, object]] = [
        ("id", letter.message_id),
        ("mailbox", letter.mailbox),
        ("died", _date(letter.dead_lettered_at)),
        ("error", f"{letter.error_type}: {letter.error}"),
        ("attempts", f"{letter.attempt} ({letter.delivery_count} deliveries)"),
        ("sent", _date(letter.enqueued_at)),
        ("received", "never" if letter.first_received_at is None else f"{_date(letter.first_received_at)} first"),
        ("reply to", without_secrets(letter.reply_to or "none asked for")),
        *((f"header {key}", value) for key, value in letter.headers.items()),
        ("body", _body_text(letter)),
    ]
    for name, value in facts:
        typer.echo(printable(f"{name:<9} {value}"))
    if letter.history:
        typer.echo("history")
    for failure in letter.history:
        at = "at an unknown time" if failure.at is None else _date(failure.at)
        typer.echo(f"  attempt {failure.attempt}, {at}: {printable(f'{failure.error_type}: {failure.error}')}")
    if letter.traceback:
        typer.echo(f"traceback\n{printable(letter.traceback.rstrip(), keep=chr(10))}")
    return 0


def replay_dead(words: Sequence[str], choice: Choice, yes: bool, as_json: bool) -> int:
    """Send dead letters to their mailbox again, having asked first where they are not named."""
    return _do(words, choice, "replay", "Send {} to their mailbox again?", yes, as_json)


def purge_dead(words: Sequence[str], choice: Choice, yes: bool, as_json: bool) -> int:
    """Forget dead letters for good, having asked first where they are not named."""
    return _do(words, choice, "purge", "Forget {} for good?", yes, as_json)


def _do(words: Sequence[str], choice: Choice, verb: str, question: str, yes: bool, as_json: bool) -> int:
    mailbox, ids = mailbox_and_ids(words)
    choice = replace(choice, ids=ids)
    choice.check(verb)
    mailbox = _face_of(mailbox)
    if not yes and not ids:
        _confirm(mailbox, choice, verb, question)
    count = with_mailbox(mailbox, lambda opened: _act(opened, choice, verb))
    return _report(mailbox, choice, _DONE[verb], count, as_json)


def _face_of(mailbox: Mailbox[Any, Any]) -> Mailbox[Any, Any]:
    """Return a face of its own, which shows bodies as JSON data: that of a program is bound to the program's types."""
    return Mailbox(mailbox.backend)


async def _act(mailbox: Mailbox[Any, Any], choice: Choice, verb: str) -> int:
    do = mailbox.replay_dead_letters if verb == "replay" else mailbox.purge_dead_letters
    if choice.everything:
        return await do()
    ids = list(choice.ids) if choice.ids else await _chosen(mailbox, choice)
    done = 0
    for start in range(0, len(ids), PAGE):
        done += await do(ids[start : start + PAGE])
    return done


async def _chosen(mailbox: Mailbox[Any, Any], choice: Choice) -> list[str]:
    fits = choice.filter()
    return [letter.message_id async for letter in _every(mailbox, choice.task) if fits(letter)]


async def _every(mailbox: Mailbox[Any, Any], task: str | None) -> AsyncIterator[DeadLetter]:
    """Yield all dead letters, or those of a task: of the task that the store knows, else of that which the call names."""
    is_listed = mailbox.capabilities.listing
    task_of = CallCodec({}).task_of
    after = None
    while page := await mailbox.dead_letters(limit=PAGE, after=after, task=task if is_listed else None):
        for letter in page:
            if task is None or is_listed or task_of(letter.raw) == task:
                yield letter
        if len(page) < PAGE:
            return
        after = page[-1].message_id


def _report(mailbox: Mailbox[Any, Any], choice: Choice, done: str, count: int, as_json: bool) -> int:
    missing = len(set(choice.ids)) - count if choice.ids else 0
    if as_json:
        typer.echo(json.dumps({"mailbox": mailbox.name, done: count, "missing": missing}))
    else:
        typer.echo(f"{count:,} dead letter(s) {done}")
    if missing:
        say(f"{missing:,} of the ids are no dead letters of {mailbox.name} (any more)")
        return FAILED
    return 0


def _confirm(mailbox: Mailbox[Any, Any], choice: Choice, verb: str, question: str) -> None:
    async def count(opened: Mailbox[Any, Any]) -> int:
        return (await opened.counts()).dead if choice.everything else len(await _chosen(opened, choice))

    if sys.stdin is None or not sys.stdin.isatty():
        raise UserError(f"dead {verb}: without a terminal it cannot ask; pass --yes, or name the ids")
    found = f"{with_mailbox(mailbox, count):,} dead letter(s) of {mailbox.name}"
    if not typer.confirm(question.format(found), err=True):
        raise UserError(f"nothing was {_DONE[verb]}; answer y to {verb} them", FAILED)


# ------------------------------------------------------------------------------------------------------------ the output


def _as_json(letter: DeadLetter, *, long: bool = True) -> dict[str, Any]:
    """Return a dead letter for JSON. Unless ``long``, its history and its traceback are left out."""
    raw = letter.raw.decode(errors="replace") if isinstance(letter.raw, bytes) else str(letter.raw)
    found = {
        "message_id": letter.message_id,
        "mailbox": letter.mailbox,
        "body": letter.body,
        **({"raw": raw} if letter.body is None and raw != "null" else {}),
        "error": letter.error,
        "error_type": letter.error_type,
        "attempt": letter.attempt,
        "delivery_count": letter.delivery_count,
        "enqueued_at": letter.enqueued_at.isoformat(),
        "first_received_at": letter.first_received_at and letter.first_received_at.isoformat(),
        "dead_lettered_at": letter.dead_lettered_at.isoformat(),
        "reply_to": letter.reply_to and without_secrets(letter.reply_to),
        "headers": dict(letter.headers),
    }
    if long:
        history = [{**asdict(failure), "at": failure.at and failure.at.isoformat()} for failure in letter.history]
        found |= {"history": history, "traceback": letter.traceback}
    return found


def _line(letter: DeadLetter) -> str:
    error = printable(f"{letter.error_type}: {letter.error}")
    text = f"{letter.message_id}  {_date(letter.dead_lettered_at)}  attempt {letter.attempt}  {error}"
    return text if len(text) <= WIDTH else f"{text[: WIDTH - 1]}…"


def _searched(letter: DeadLetter) -> Iterator[str]:
    """Yield the texts of a dead letter that ``--match`` looks into. A header is written as it is sent, ``KEY=VALUE``."""
    yield letter.error
    yield _body_text(letter)
    for key, value in letter.headers.items():
        yield f"{key}={value}"


def _body_text(letter: DeadLetter) -> str:
    """Return the body as one line of JSON, or what the store held if that is none."""
    if letter.body is None and isinstance(letter.raw, bytes):
        return letter.raw.decode(errors="backslashreplace")
    return json.dumps(letter.body, ensure_ascii=False)


def _date(instant: datetime) -> str:
    return instant.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%SZ")
