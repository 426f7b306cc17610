"""Blocking and computing work in threads, processes and interpreters.

A pool has as many slots as workers. A call holds its slot until its work has really ended, so that work which was
given up and still runs is not forgotten. Cancelled, a call in a process kills it; one in a thread is abandoned, and
counts as late until it ends.
"""
