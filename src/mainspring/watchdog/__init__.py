"""The watchdog judges handlers, the block watch the event loop, and the guardian the whole process."""
