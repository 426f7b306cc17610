"""Loops: what users run on a mailbox, and the engine beneath.

:class:`~mainspring.worker.main_loop.MainLoop` is the face; it binds a handler to a mailbox. The engine is
:class:`~mainspring.worker.worker.Worker`, whose module says which tasks there are and what holds of them. Its parts: slots
limit how many messages are in hand. A delivery is one message in a slot, and the run of its handler. Outcome decides, in plain
functions, what the end of a handler means; settlement writes that to the store. Leases renews, and cancels a handler whose
lease is lost. Store health knows if the store answers. Admission is running, paused or draining.
"""
