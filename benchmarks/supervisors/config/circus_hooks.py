"""Circus' documented way to wait for another service: a hook before the start, which looks whether it is ready."""

import os
import time


def wait_until_ready(watcher, arbiter, hook_name, **kwargs):
    """Return True when the service that the environment names is ready."""
    path = watcher.env["AFTER"]
    for _ in range(100):
        if os.path.exists(path):
            return True
        time.sleep(0.1)
    return False
