"""A ``LoopGroup``: loops that start together, are watched together, and stop in order.

The group is the face. One run of it is a :class:`~mainspring.group.lifetime.Lifetime`. It opens the mailboxes, and starts the
health server, the watchdog and the loops as tasks of one ``DaemonScope``. It ends in the phases of
:mod:`~mainspring.group.shutdown`: drain delay, stop intake, finish, cancel. Each phase has an end, so a shutdown has one. Each
loop is a :class:`~mainspring.group.managed_loop.ManagedLoop`: it has a state, is restarted by policy when it crashes, and is
steered by control messages. What happened goes to the dispatcher as events; the exit status is made from the report of the run.
"""
