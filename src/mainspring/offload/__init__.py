"""Blocking and computing work in threads, processes and interpreters, bounded, and never left dangling."""
