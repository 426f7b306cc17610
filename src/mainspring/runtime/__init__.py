"""Structured concurrency: daemon scopes, signals, heartbeats, deadlines, intervals."""
