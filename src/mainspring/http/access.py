"""Which requests may act: with the admin token, or from this machine where the listener is loopback only."""

from __future__ import annotations

import hmac
import ipaddress
import os
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from mainspring.http.responses import line_response

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from starlette.requests import Request
    from starlette.responses import Response

ADMIN_TOKEN = "MAINSPRING_ADMIN_TOKEN"  # noqa: S105 - the name of a variable


class Access:
    """Judges requests. ``token``: what acts need; None reads ``MAINSPRING_ADMIN_TOKEN``. Without one, acts are refused unless
    ``loopback``: only this machine can reach the listener."""

    def __init__(self, token: str | None, *, loopback: bool) -> None:
        self._token = os.environ.get(ADMIN_TOKEN, "") if token is None else token
        self._loopback = loopback

    def guarded(self, endpoint: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        """Return the endpoint behind the judgement: a request that may not act gets a response of one line."""

        async def guard(request: Request) -> Response:
            return self.refusal(request) or await endpoint(request)

        return guard

    def refusal(self, request: Request) -> Response | None:
        """Return why this request may not act, or None if it may."""
        given = _bearer(request)
        if given is not None and self._token:
            if hmac.compare_digest(given, self._token.encode()):
                return None  # a page of another site cannot know the token, so nothing more needs to be asked
            return line_response(f"the bearer token is not that of {ADMIN_TOKEN}", 403)
        if not self._loopback:
            if not self._token:
                text = f"refused, as other hosts reach this server: set {ADMIN_TOKEN} in its environment, and send that"
                return line_response(text, 403)
            text = f"needs the header 'Authorization: Bearer <{ADMIN_TOKEN}>'"
            return line_response(text, 401, **{"www-authenticate": "Bearer"})
        if _from_a_foreign_page(request):
            text = "refused: a browser sent this for a page of another site; use the dashboard or curl"
            return line_response(text, 403)
        return None


def _bearer(request: Request) -> bytes | None:
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    return given.strip().encode("latin-1") if scheme.lower() == "bearer" else None


def _from_a_foreign_page(request: Request) -> bool:
    """True if a browser sends this on behalf of a page that is not ours.

    A listener on loopback asks for no token. Yet any web page can have the operator's browser post to 127.0.0.1 (CSRF). A site
    whose name resolves to 127.0.0.1 can even do so as "same origin" (DNS rebinding). Browsers give both away: they send Origin
    and Sec-Fetch-Site, and Host is the name in the address bar. "same-site" is refused too: another port of localhost is the
    same site but another program. Tools such as curl send none of these headers and are let through, whatever Host they were
    told.
    """
    origin = request.headers.get("origin")
    fetched_from = request.headers.get("sec-fetch-site")
    if origin is None and fetched_from is None and "referer" not in request.headers:
        return False
    host = request.headers.get("host", "")
    if fetched_from not in (None, "same-origin", "none"):
        return True
    try:
        if origin is not None and urlsplit(origin).netloc.lower() != host.lower():
            return True
        return not _names_this_machine(urlsplit(f"//{host}").hostname or "")
    except ValueError:  # urlsplit cannot read it, so it is not this machine's page
        return True


def _names_this_machine(name: str) -> bool:
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
