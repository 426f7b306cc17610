"""Three watchers, each for what the one before cannot see.

The watchdog runs in the event loop and cancels handlers without a sign of life. The block watch is a thread: it sees
an event loop that does not turn, and ends a process that must leave. The guardian is a process: it sees an
interpreter that is blocked, GIL and all, and kills it. The guardian's program imports the standard library only, so
that it starts at once and cannot fail with us.
"""

from mainspring.watchdog.watchdog import HeartbeatSubject as HeartbeatSubject  # its import path in earlier releases
