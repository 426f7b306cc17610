"""Loops: what users run on a mailbox, and the engine beneath.

:class:`~mainspring.worker.main_loop.MainLoop` is the face; it binds a handler to a mailbox. The engine is
:class:`~mainspring.worker.worker.Worker`, whose module says which tasks there are and what holds of them. Its parts:
slots (how many messages are in hand), delivery (one message in a slot, and the run of its handler), outcome (what the
end of a handler means: plain decisions), settlement (writes that to the store), leases (renew, and cancel a handler
whose lease is lost), store health (does the store answer) and admission (running, paused, draining).
"""
