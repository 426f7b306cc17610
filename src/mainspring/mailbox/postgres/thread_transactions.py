"""Transactions of plain handlers, each on a connection that only the handler's thread uses.

The block runs in that thread, and so do all statements on its connection. Calls of the mailbox run on the event loop: a
settlement is noted there, and the thread carries it out at the end of the block. The thread is never cancelled: the loop waits
for it, and renews the lease until the thread sends the settlement. Only the time limits of its connection hold.
"""

from __future__ import annotations

from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from anyio import from_thread
from psycopg.pq import TransactionStatus

from mainspring.errors import MailboxConnectionError
from mainspring.mailbox.postgres.commands import NoSuchTargetError, Settle
from mainspring.mailbox.postgres.connection import as_mailbox_error
from mainspring.mailbox.postgres.transactions import LevelCheck, failed_commit
from mainspring.mailbox.postgres.user_connections import (
    as_psycopg,
    driver_errors,
    ended_inside,
    raise_translated,
    thread_user_transaction,
    translated_errors,
)
from mainspring.redaction import one_line

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mainspring.mailbox.batched import OfDelivery
    from mainspring.mailbox.message import Message
    from mainspring.mailbox.postgres.commands import Statement, StatementBatch
    from mainspring.mailbox.postgres.pool import SharedPool
    from mainspring.mailbox.postgres.transactions import HandlerTransactions
    from mainspring.mailbox.postgres.user_connections import ThreadUserConnection


class ThreadTransaction:
    """A plain handler's transaction under way. ``sent`` and ``settled`` are as for :class:`HandlerTransaction`."""

    def __init__(self, connection: ThreadUserConnection) -> None:
        self.connection = connection
        self.sent = False
        self.settled = False
        self._noted: tuple[StatementBatch, OfDelivery] | None = None

    # ------------------------------------------------------------------------------------------- on the event loop

    async def settle(self, calls: StatementBatch, command: OfDelivery) -> None:
        """Note the settlement for the end of the block."""
        self._noted = calls, command

    def check_renewal(self) -> None:
        """Raise :class:`MailboxConnectionError` while it is not known whether the lease is still needed."""
        if self.sent and not self.settled:
            raise MailboxConnectionError("the settlement in its transaction has not been answered yet")

    async def acknowledge(self, message: Message[Any, Any]) -> None:
        """Note an acknowledgement, if nothing is noted."""
        if self._noted is None:
            await message.acknowledge()

    # ---------------------------------------------------------------------------------------------- in the thread

    def check_user(self, schema: str, store: str) -> None:
        """Raise :class:`InvalidParameterError` unless the message can be settled on the connection."""
        check = LevelCheck(schema, store)
        self._execute([check.statement])
        check.judge()

    def carry_out(self, shared: SharedPool) -> None:
        """Settle as noted. Raise the error of that, or if the transaction cannot commit any more."""
        assert self._noted is not None
        calls, command = self._noted
        self._check_status()
        self.sent = True
        self._execute(calls.build([command]))
        if command.error is not None:
            self.sent = False
            if isinstance(command, Settle) and isinstance(command.error, NoSuchTargetError):
                from_thread.run_sync(shared.forget_number, command.target)
            raise command.error
        self.settled = True
        self._check_status()

    def _check_status(self) -> None:
        if self.connection.status in (TransactionStatus.IDLE, TransactionStatus.INERROR):
            raise ended_inside()

    def _execute(self, statements: Iterator[Statement] | list[Statement]) -> None:
        try:
            for each in statements:
                each.take(self.connection.execute(each))
        except driver_errors() as error:
            if self.connection.closed:  # the block raises what that means
                raise
            raise_translated(error, "transaction")


@contextmanager
def join_in_thread(
    transactions: HandlerTransactions, shared: SharedPool, store: str, message: Message[Any, Any], given: Any
) -> Iterator[Any]:
    """Run a transaction of ``given``, the calling thread's own, that ends with the block. The message is settled with it."""
    from_thread.run_sync(transactions.check_message, message)
    with translated_errors("transaction"):
        this = ThreadTransaction(thread_user_transaction(given))
    from_thread.run_sync(transactions.add, message, given, this)
    ended = False
    try:
        with _transaction(this.connection):
            this.check_user(shared.schema, store)
            yield given
            from_thread.run(this.acknowledge, message)
            this.carry_out(shared)
            ended = True
    except BaseException as error:
        ended = False
        if not (isinstance(error, driver_errors()) and this.connection.closed):  # the handler's own affair
            raise
        raise MailboxConnectionError(f"the transaction was lost: {one_line(error)}") from error
    finally:
        if not ended and this.connection.status not in (TransactionStatus.IDLE, TransactionStatus.UNKNOWN):
            this.connection.connection.close()  # it could still commit
        from_thread.run_sync(_leave, transactions, message, this, ended)


def _leave(transactions: HandlerTransactions, message: Message[Any, Any], this: ThreadTransaction, ended: bool) -> None:
    del transactions.under_way[message.receipt_handle]
    if ended:
        return
    message.settlement = None  # a settlement was rolled back with the block
    if this.sent and this.connection.closed:
        transactions.mark_uncertain(message.receipt_handle)


@contextmanager
def _transaction(connection: ThreadUserConnection) -> Iterator[None]:
    """Run the driver's transaction, with its errors as those of a mailbox."""
    transaction = connection.transaction()
    try:
        transaction.__enter__()
    except driver_errors() as error:
        raise as_mailbox_error(as_psycopg(error)) from error
    try:
        yield
    except BaseException as error:
        with suppress(*driver_errors()):  # lost, it is rolled back, too
            if transaction.__exit__(type(error), error, error.__traceback__):
                return
        raise
    try:
        transaction.__exit__(None, None, None)
    except driver_errors() as error:
        failure = failed_commit(error, is_closed=connection.closed)
        if failure is None:
            raise
        raise failure from error
