"""Tasks: many functions on one mailbox.

A :class:`~mainspring.tasks.tasks.Tasks` has a mailbox and a register of functions by name. Each function is a
:class:`~mainspring.tasks.task.Task`, which sends calls of itself. A call is a message: the name of the task and its arguments
as JSON (``calls``). ``Tasks.loop()`` is a :class:`~mainspring.worker.main_loop.MainLoop` which chooses the function by the name
in the message (``runs``). Everything below it is the engine that runs any other loop.

Arguments are checked against the function's annotations when a call is sent, and again when it is received: in between a deploy
may have changed the function. A call that names an unknown task, or whose arguments no longer fit, is a charged failure with
backoff, as is any message whose body does not fit: another worker may understand it. It is never acknowledged.

What outlives a message is kept in records of the mailbox: the result of a call and its progress (``mailbox.jobs``), the call
that stands for a key (``unique``), the state of a chain (``chain_state``). Such a record is written in one step with what
depends on it: the acknowledgement, or the sends that follow, and only on the version that was read. So of workers that race, or
that come after a crash, one acts, and the others see that it has.
"""
