"""Ways between threads and event loops.

An :class:`~mainspring.threads.entry.Entry` hands a request into an event loop from any thread, signal handler or
event loop; it is the only way in. A :class:`~mainspring.threads.ticket.Ticket` brings a result back: it is completed
once, and fails by itself when its writer is gone. A :class:`~mainspring.threads.loop_thread.LoopThread` runs an event
loop in a thread of its own, for programs that are not async.
"""
