"""The event loops that everything runs on, as anyio's backend and its options."""

from __future__ import annotations

from typing import Any

LOOPS: dict[str, tuple[str, dict[str, Any]]] = {
    "asyncio": ("asyncio", {"use_uvloop": False}),
    "uvloop": ("asyncio", {"use_uvloop": True}),
    "trio": ("trio", {}),
}
