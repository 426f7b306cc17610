"""Loops: the worker engine and what users run on it."""
