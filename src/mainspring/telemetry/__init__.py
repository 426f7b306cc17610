"""What a group says of itself: log lines, metrics, and its status.

Log lines and counters are made by subscribers to the group's events, on the event loop of the group, so nothing is locked.
Gauges are read from its status, one frozen value, when they are asked for. No subscriber can fail the work that it reports.
"""
