"""The guardian: a tiny process that ends the one it guards when that can no longer end itself.

It runs by path, on the standard library alone (``python -I -S guardian_main.py …``). So it stays small, starts in milliseconds,
and shares no lock, no interpreter and no fate with its ward. Both look at one page of shared memory:

- ``BEAT``: the instant (CLOCK_MONOTONIC, seconds) of the event loop's last beat; 0 while no loop is to be judged.
- ``KILL_AT``: the instant from which the ward must be gone; 0 for none.

A loop has not beaten for ``block_threshold`` seconds, and for ``MARGIN``, within which the ward's own watching thread acts if
it can. Then its threads are dumped by a signal that faulthandler answers in C, and it is killed.
"""

from __future__ import annotations

import mmap
import os
import select
import signal
import sys
import time  # noqa: TID251 - this file cannot import the package's clock

BOARD_SIZE = 16
BEAT, KILL_AT = 0, 1

MARGIN = 0.3
"""Seconds by which the guardian lets the ward's own thread go first: that one can name the line, with its source."""
DUMP_TIME = 0.2
"""Seconds that a dump may take to reach standard error."""
BUSY_TIME = 5.0
"""Seconds for which the first process of a container is kept busy, at most, until its processor seconds are used up."""
FRESH = 0.5
"""Seconds that a ward which was stopped gets to leave by itself once it runs again."""
LONGEST_LOOK = 1.0
"""Seconds between two looks, and between two beats, at most."""


def look_interval(threshold: float) -> float:
    """Return the seconds between two looks, and between two beats: a tenth of the threshold, at most ``LONGEST_LOOK``."""
    return min(threshold / 10, LONGEST_LOOK)


class Silence:
    """Counts for how long a beat has been missing, without the time in which the loop could not run.

    Pure: it is told the time. A look that comes late says that the machine, or the process, stood still; the loop then has
    the whole threshold again.
    """

    def __init__(self, threshold: float, now: float) -> None:
        self._tolerance = max(threshold / 4, min(0.2, threshold / 2))
        self._armed = self._due = now
        self.late = False
        """True if the last look came late."""

    def plan(self, due: float) -> None:
        """Note that the next look is meant to happen at ``due``."""
        self._due = due

    def rearm(self, now: float) -> None:
        """Count from ``now`` on, as the loop could not run until then."""
        self._armed = now

    def look(self, now: float, beat: float) -> float:
        """Return the seconds of silence at ``now``; ``beat`` is the last beat's instant, or 0 if no loop is to be judged."""
        self.late = now - self._due > self._tolerance
        if self.late or beat == 0:
            self.rearm(now)
        return max(0.0, now - max(beat, self._armed))


def state_of(stat: str) -> str:
    """Return the state letter out of the text of ``/proc/PID/stat``, whatever the program's name has in it."""
    return stat.rpartition(")")[2].split()[0]


class Ward:
    """The guarded process. Signals go through a pidfd where the kernel has them, so that they cannot hit a successor."""

    def __init__(self, pid: int, pipe: int) -> None:
        self.pid = pid
        self._poll = select.poll()
        self._poll.register(pipe, select.POLLIN)
        self._pipe = pipe
        self._pidfd = -1
        try:
            self._pidfd = os.pidfd_open(pid)
            self._poll.register(self._pidfd, select.POLLIN)
        except (OSError, AttributeError):
            pass  # then its end shows by the pipe and by the parent's pid

    @property
    def gone(self) -> bool:
        """True if it has ended: a fork of it can hold the pipe open, so the pipe alone does not say."""
        return os.getppid() != self.pid

    @property
    def standing(self) -> bool:
        """True if it is stopped (SIGSTOP, a debugger), so that it cannot beat."""
        try:
            with open(f"/proc/{self.pid}/stat", encoding="utf-8", errors="replace") as stat:
                return state_of(stat.read()) in "Tt"
        except (OSError, IndexError):
            return False

    def wait(self, seconds: float) -> bool:
        """Wait so long, or until it pokes or ends; whether it ended."""
        for descriptor, events in self._poll.poll(max(0, round(seconds * 1000 + 0.5))):
            if descriptor == self._pidfd or not events & select.POLLIN or not os.read(self._pipe, 4096):
                return True
        return self.gone

    def send(self, signum: int) -> None:
        """Send it a signal, unless it has ended."""
        try:
            if self._pidfd >= 0:
                signal.pidfd_send_signal(self._pidfd, signum)
            elif not self.gone:
                os.kill(self.pid, signum)
        except OSError:
            pass

    def kill(self, busy_signal: int) -> bool:
        """End it; return whether it has ended.

        The kernel ignores a SIGKILL that the first process of a container gets from inside, but not the limit of processor
        seconds. A process that waits uses none, so the ``busy_signal`` keeps it busy until it has used one second in all.
        """
        self.send(signal.SIGKILL)
        if self.wait(0.5):
            return True
        import resource

        try:
            resource.prlimit(self.pid, resource.RLIMIT_CPU, (1, 1))
        except (OSError, ValueError):
            return False
        until = time.monotonic() + BUSY_TIME
        while busy_signal and time.monotonic() < until:
            self.send(busy_signal)
            if self.wait(0.0):
                return True
        return self.wait(0.5)


class Guardian:
    """Looks at the board until its ward has ended, or has to be ended."""

    def __init__(
        self, board: memoryview[float], ward: Ward, threshold: float, dump_signal: int, busy_signal: int
    ) -> None:
        self._board = board
        self._ward = ward
        self._limit = threshold + MARGIN
        self._interval = look_interval(threshold)
        self._dump_signal = dump_signal
        self._busy_signal = busy_signal
        now = time.monotonic()
        self._silence = Silence(threshold, now)
        self._spare_until = now

    def run(self) -> None:
        """Return once the ward has ended."""
        wait = 0.0
        while True:
            self._silence.plan(time.monotonic() + wait)
            if self._ward.wait(wait):
                return
            wait = self._look(time.monotonic())
            if wait < 0:
                return

    def _look(self, now: float) -> float:
        """Judge; seconds until the next look, below 0 where the ward has been ended."""
        beat, kill_at = self._board[BEAT], self._board[KILL_AT]
        silence = self._silence.look(now, beat)
        if self._silence.late:
            self._spare_until = now + FRESH
        blocked = silence >= self._limit
        if not blocked and not (kill_at and now >= kill_at):
            if silence > 2 * self._interval and self._ward.standing:
                self._silence.rearm(now)
            return min(self._interval, self._limit - silence, max(kill_at - now, 0.0) if kill_at else self._interval)
        if self._ward.standing:
            self._silence.rearm(now)
            self._spare_until = now + self._interval + FRESH
            return self._interval
        if not blocked and now < self._spare_until:
            return self._spare_until - now
        if self._dump_signal:
            self._ward.send(self._dump_signal)
            self._dump_signal = 0  # once is enough, should the ward prove hard to kill
            if self._ward.wait(DUMP_TIME):
                return -1.0
        return -1.0 if self._ward.kill(self._busy_signal) else self._interval


def main(arguments: list[str]) -> None:
    """Run with ``BOARD_FD PIPE_FD PARENT_PID THRESHOLD DUMP_SIGNAL BUSY_SIGNAL``, all given by the parent."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # a signal to the whole process group is meant for the ward
    try:
        with open("/proc/self/comm", "w", encoding="ascii") as name:
            name.write("ms-guardian")
    except OSError:
        pass
    board, pipe, parent, threshold, *signals = arguments
    words = memoryview(mmap.mmap(int(board), BOARD_SIZE)).cast("d")
    Guardian(words, Ward(int(parent), int(pipe)), float(threshold), *map(int, signals)).run()


if __name__ == "__main__":
    main(sys.argv[1:])
    os._exit(0)
