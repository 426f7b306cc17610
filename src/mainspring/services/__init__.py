"""Supervised services: programs that are started in order, watched, restarted when they fail, and stopped without a trace.

The moving parts, lowest first:

- ``spec``: what a user says of a service, as values. ``config`` reads them from a YAML file.
- ``restarts``: what follows when a supervised loop or process has ended: decisions only. ``life`` keeps the state, the restarts
  and the times of one supervised thing. Loops of a group and processes share both.
- ``spawning``: the border to the operating system. A :class:`Spawner` starts processes and tells how they end. The real one
  (``spawner``) has a small program (``spawner_main``) do it, so that a simulated one can stand in its place. ``accounts``
  knows the users.
- ``process``: one process, from the request to start it until nothing is left of it.
- ``replica``: one process of a service at a time, from its first start to its last end.
- ``order``: which service starts after which, stops before which, and is restarted with which: decisions only.
- ``managed_service``, ``tree``: all services with their replicas. Each replica is a task that waits for its turn. The
  tree has them restarted together, as the strategy says, and brought down in order.
- ``listening``: the sockets that the supervisor holds for services across their restarts.
- ``orchestrator``: the face: signals, the state of the whole, what one's failure means for all, and the end. ``operations`` is
  what an operator does to services that run. ``status``, ``report`` and ``recent_output`` are what it tells; ``http`` serves
  them. ``notify`` tells the service manager of the process, and ``alerts`` whom an operator wants to be told.

States. A replica is Initializing (its hooks run, its process is being started), Starting (the process runs and is not
ready), Running, Degraded (it works and fails its probe), Restarting (its process has ended, or is being ended, for another
one to take its place), Stopping (told to stop, or given up; its process drains) and Stopped. The tables are in
``core.state_machine``.

Invariants:

- A replica has at most one process. Another one is started only when nothing is left of the one before: neither the process,
  nor its group, nor what has left its group.
- A request to stop wins over everything: a pending restart, a probe, a hook.
- Running means ready: by a probe, a line of output or a notification. A process that was only started is Starting.
- Every wait has an end: hooks, probes, starts, drains and kills each have a timeout.
- When the supervisor is killed, the spawner ends all that was started. When the spawner is killed, the supervisor does.

On cancellation everything that was started is killed, and waited for until ``force_kill_timeout`` has passed.
"""
