"""``Contact``: whether the mailbox of a loop answers, by all that it is asked: receives, renewals and settlements."""

from __future__ import annotations

from mainspring.errors import MailboxConnectionError, describe


class Contact:
    """What the last answer, or the lack of one, says.

    A loop whose places are all taken does not receive: then its renewals and settlements are what tells.
    """

    __slots__ = ("trouble",)

    def __init__(self) -> None:
        self.trouble: str | None = None
        """Why the mailbox does not answer, or None."""

    def failed(self, error: Exception) -> None:
        """Asking it something has failed; errors of other kinds than a lost connection say nothing of it."""
        if isinstance(error, (MailboxConnectionError, OSError)):
            self.trouble = describe(error)

    def made(self) -> None:
        """It has answered."""
        self.trouble = None
