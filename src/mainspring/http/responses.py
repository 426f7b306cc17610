"""What all answers of our apps have in common: JSON, single lines, and the headers of every answer."""

from __future__ import annotations

import json
from email.utils import format_datetime
from typing import TYPE_CHECKING, Any

from starlette.responses import JSONResponse, PlainTextResponse

from mainspring.core import clock

if TYPE_CHECKING:
    from starlette.responses import Response
    from starlette.types import ASGIApp, Message, Receive, Scope, Send


class PlainJson(JSONResponse):
    """JSON in which an error may say what UTF-8 cannot hold, as of a file's name: that is escaped."""

    def render(self, content: Any) -> bytes:
        """Return the content as bytes."""
        text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        return text.encode("utf-8", "backslashreplace")


def line_response(text: str, status: int, **headers: str) -> Response:
    """Return one line of text as a response."""
    return PlainTextResponse(text + "\n", status, headers=headers)


class CommonHeaders:
    """Adds what every answer carries. The date is here because the servers' own cost a timer that ticks for ever."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                date = format_datetime(clock.utc_now(), usegmt=True).encode("ascii")
                headers = message.setdefault("headers", [])
                headers.extend(
                    [(b"date", date), (b"cache-control", b"no-store"), (b"x-content-type-options", b"nosniff")]
                )
            await send(message)

        await self._app(scope, receive, send_with_headers if scope["type"] == "http" else send)
