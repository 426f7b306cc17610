"""Ways between threads and event loops: tickets, loop threads, entries."""
