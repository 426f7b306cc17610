"""What all other packages stand on; it knows nothing of loops and mailboxes.

The clock, random numbers, the registry of what is one per process, state machines, and the inspection of functions, tasks and
frames. Only the clock reads the time, so that a virtual clock reaches all of it.
"""
