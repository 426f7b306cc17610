"""``Contact``: whether the mailbox of a loop answers, by all that it is asked: receives, renewals and settlements."""

from __future__ import annotations

from mainspring.errors import MailboxConnectionError, describe


class Contact:
    """What the last answers, or the lack of them, say.

    While receives fail, nothing else shows that work can be claimed again. A loop whose places are all taken does not
    receive: then its renewals and settlements are what tells, and any answer ends their trouble.
    """

    __slots__ = ("_other", "_receiving", "failed_receives")

    def __init__(self) -> None:
        self.failed_receives = 0
        """How many receives have failed since one was last answered, whichever receiver made them."""
        self._receiving: str | None = None
        self._other: str | None = None

    @property
    def trouble(self) -> str | None:
        """Why the mailbox does not answer, or None."""
        return self._receiving or self._other

    def failed(self, error: Exception) -> None:
        """A renewal or a settlement has failed; errors of other kinds than a lost connection say nothing of the mailbox."""
        if isinstance(error, (MailboxConnectionError, OSError)):
            self._other = describe(error)

    def made(self) -> None:
        """It has answered."""
        self._other = None

    def receive_failed(self, error: Exception) -> bool:
        """A receive has failed; whether it is the first one since one was answered."""
        self._receiving = describe(error)
        self.failed_receives += 1
        return self.failed_receives == 1

    def received(self) -> int:
        """A receive was answered, be it with nothing; how many had failed before."""
        failures, self.failed_receives = self.failed_receives, 0
        self._receiving = self._other = None
        return failures
