"""The event log of a run, and timelines drawn from it for the terminal and as SVG."""

from __future__ import annotations

from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from mainspring.testing.simulation.run import SimulationReport


class LogEntry(NamedTuple):
    """One event. ``lane`` is its subject: ``w0.2`` is the third process of worker 0; others are store, client, world."""

    at: float
    lane: str
    what: str
    message: str = ""
    detail: str = ""

    def __str__(self) -> str:
        message = f" {self.message}" if self.message else ""
        detail = f": {self.detail}" if self.detail else ""
        return f"{self.at:12.3f} {self.lane:<8} {self.what}{message}{detail}"


class EventLog:
    """The events of a run, in order. Messages are named m1, m2 … in the order in which the store accepted them."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._entries: list[LogEntry] = []
        self.closed_at: float | None = None

    def add(self, lane: str, what: str, message: str = "", detail: str = "") -> None:
        """Append an entry, unless the log is closed."""
        if self.closed_at is None:
            self._entries.append(LogEntry(self._clock(), lane, what, message, detail))

    def close(self) -> None:
        """Close the log at the end of the run (idempotent)."""
        if self.closed_at is None:
            self.closed_at = self._clock()

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[LogEntry]:
        return iter(self._entries)

    def last(self, most: int, message: str = "") -> tuple[str, ...]:
        """Return the last ``most`` entries as text: those about ``message``, or all."""
        return tuple(str(entry) for entry in self if entry.message == message or not message)[-most:]


ENDINGS = {"returned": "ok", "failed": "failed", "cancelled": "cancelled", "died with its worker": "died"}
MARKS = {
    "starts": "|",
    "killed": "X",
    "killed by its watchdog": "X",
    "leaves by force": "X",
    "SIGTERM": "T",
    "second SIGTERM": "T",
    "frozen": "(",
    "goes on": ")",
    "partition": "[",
    "partition over": "]",
    "wall clock jumps": "J",
    "goes down": "[",
    "is back": "]",
    "deploy": "D",
    "lost its lease": "!",
    "acked": "a",
}
"""The events that are drawn as marks, and their letters in the terminal."""
COLOURS = {"ok": "#4c9a6a", "failed": "#d08a2e", "cancelled": "#8d8d8d", "died": "#c0504d"}


@dataclass(slots=True)
class Span:
    """One handler run."""

    message: str
    began: float
    ended: float
    how: str


@dataclass(slots=True)
class TimelineLane:
    """The spans and marks of one worker (all its processes), of the store, or of the world."""

    name: str
    spans: list[Span] = field(default_factory=list)
    marks: list[LogEntry] = field(default_factory=list)


@dataclass(slots=True)
class Timeline:
    """The lanes of a log between two instants, and the entry at which an invariant broke."""

    lanes: list[TimelineLane]
    start: float
    end: float
    broken: LogEntry | None


def timeline_of(entries: Iterable[LogEntry], *, start: float | None = None, end: float | None = None) -> Timeline:
    """Build the timeline of a log, cut to ``start`` and ``end`` (virtual seconds) if given."""
    lanes: dict[str, TimelineLane] = {}
    running: dict[tuple[str, str], Span] = {}
    broken: LogEntry | None = None
    last = 0.0
    for entry in entries:
        last = max(last, entry.at)
        if entry.lane == "ledger":
            broken = broken or entry
            continue
        name = entry.lane.partition(".")[0]
        if name == "client":
            continue
        lane = lanes.setdefault(name, TimelineLane(name))
        key = (entry.lane, entry.message)
        if entry.what == "started":
            running[key] = Span(entry.message, entry.at, entry.at, "running")
            lane.spans.append(running[key])
        elif entry.what in ENDINGS and key in running:
            span = running.pop(key)
            span.ended, span.how = entry.at, ENDINGS[entry.what]
        if entry.what in MARKS:
            lane.marks.append(entry)
    for span in running.values():
        span.ended = last
    first = start if start is not None else 0.0
    final = end if end is not None else last
    for lane in lanes.values():
        lane.spans = [span for span in lane.spans if span.ended >= first and span.began <= final]
        lane.marks = [mark for mark in lane.marks if first <= mark.at <= final]
    return Timeline(sorted(lanes.values(), key=lambda lane: lane.name), first, max(final, first + 1e-3), broken)


def around(report: SimulationReport, seconds: float = 300.0) -> Timeline:
    """Return the timeline of the last ``seconds`` before the violation, or of the whole run if no invariant broke."""
    broken = report.violation
    if broken is None:
        return timeline_of(report.entries)
    return timeline_of(report.entries, start=max(0.0, broken.at - seconds), end=broken.at)


def as_text(timeline: Timeline, width: int = 100) -> str:
    """Draw a timeline for a terminal of ``width`` columns."""
    margin = max((len(lane.name) for lane in timeline.lanes), default=2) + 2
    columns = max(20, width - margin)
    scale = (columns - 1) / (timeline.end - timeline.start)

    def column(at: float) -> int:
        return min(columns - 1, max(0, int((at - timeline.start) * scale)))

    focus = timeline.broken.message if timeline.broken is not None else ""
    lines = []
    for lane in timeline.lanes:
        row = ["."] * columns if lane.name.startswith("w") and lane.name != "world" else [" "] * columns
        for span in lane.spans:
            letter = "#" if focus and span.message == focus else "="
            for place in range(column(span.began), column(span.ended) + 1):
                row[place] = letter
        for mark in sorted(lane.marks, key=lambda mark: mark.what in ("acked", "starts"), reverse=True):
            row[column(mark.at)] = MARKS[mark.what]
        lines.append(f"{lane.name:<{margin}}{''.join(row)}".rstrip())
    scale_line = f"{timeline.start:.0f} s"
    last = f"{timeline.end:.0f} s"
    lines.append(" " * margin + scale_line + last.rjust(columns - len(scale_line)))
    focused = f", # {focus}" if focus else ""
    lines.append(f"= a handler runs{focused}, a acknowledged, X killed, T SIGTERM, D deploy, ( ) frozen, [ ] cut off,")
    lines.append("J the wall clock jumps, ! lease lost, | a life begins")
    return "\n".join(lines)


def as_svg(timeline: Timeline, width: int = 1200) -> str:
    """Draw a timeline as an SVG document. Each span and mark has a tooltip."""
    left, top, height = 70, 30, 46
    scale = (width - left - 20) / (timeline.end - timeline.start)

    def x(at: float) -> float:
        return left + (min(max(at, timeline.start), timeline.end) - timeline.start) * scale

    total = top + height * len(timeline.lanes) + 30
    focus = timeline.broken.message if timeline.broken is not None else ""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{total}" font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{total}" fill="white"/>',
    ]
    for index, lane in enumerate(timeline.lanes):
        y = top + height * index
        parts.append(f'<text x="8" y="{y + 22}" font-size="13">{escape(lane.name)}</text>')
        parts.append(f'<line x1="{left}" x2="{width - 20}" y1="{y + 30}" y2="{y + 30}" stroke="#cccccc"/>')
        for span in lane.spans:
            parts.append(
                _span_svg(span, x(span.began), x(span.ended), y, focused=bool(focus) and span.message == focus)
            )
        parts += [_mark_svg(mark, x(mark.at), y) for mark in lane.marks if mark.what != "acked"]
    bottom = top + height * len(timeline.lanes)
    parts.append(f'<text x="{left}" y="{bottom + 18}">{timeline.start:.0f} s</text>')
    parts.append(f'<text x="{width - 20}" y="{bottom + 18}" text-anchor="end">{timeline.end:.0f} s</text>')
    if timeline.broken is not None and timeline.start <= timeline.broken.at <= timeline.end:
        at = x(timeline.broken.at)
        title = escape(f"{timeline.broken.what}: {timeline.broken.detail}")
        parts.append(
            f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{top - 8}" y2="{bottom}" stroke="#c00000" stroke-width="2">'
            f"<title>{title}</title></line>"
        )
        parts.append(f'<text x="{min(at, width - 24):.1f}" y="16" fill="#c00000" text-anchor="end">{title}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _span_svg(span: Span, x1: float, x2: float, y: int, *, focused: bool) -> str:
    title = escape(f"{span.message}: {span.began:.3f} to {span.ended:.3f} s, {span.how}")
    edge = ' stroke="#c00000" stroke-width="2"' if focused else ""
    fill = COLOURS.get(span.how, "#5b7fb5")
    return (
        f'<rect x="{x1:.1f}" y="{y + 12}" width="{max(1.5, x2 - x1):.1f}" height="18" fill="{fill}"{edge}>'
        f"<title>{title}</title></rect>"
    )


def _mark_svg(mark: LogEntry, x: float, y: int) -> str:
    title = escape(f"{mark.at:.3f} s {mark.lane} {mark.what} {mark.detail}".strip())
    letter = escape(MARKS[mark.what])
    return (
        f'<g><title>{title}</title><line x1="{x:.1f}" x2="{x:.1f}" y1="{y + 6}" y2="{y + 34}" stroke="#333333"/>'
        f'<text x="{x + 2:.1f}" y="{y + 43}">{letter}</text></g>'
    )
