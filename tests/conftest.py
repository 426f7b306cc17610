"""The three event loops that everything runs on."""

from __future__ import annotations

import signal

import pytest

from contract_summary import judged, pytest_terminal_summary  # noqa: F401 - a fixture and a hook
from servers import nats_url, postgres_url, redis_url  # noqa: F401 - fixtures
from stores import store, store_schema  # noqa: F401 - fixtures

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell that runs the tests in the background lets them ignore it, and Python then makes no KeyboardInterrupt of it.
    signal.signal(signal.SIGINT, signal.default_int_handler)

BACKENDS = [
    pytest.param(("asyncio", {"use_uvloop": False}), id="asyncio"),
    pytest.param(("asyncio", {"use_uvloop": True}), id="uvloop"),
    pytest.param(("trio", {}), id="trio"),
]


@pytest.fixture(params=BACKENDS)
def anyio_backend(request: pytest.FixtureRequest) -> object:
    return request.param
