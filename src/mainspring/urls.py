"""URLs as they may be shown: without what lets somebody in."""

from __future__ import annotations

import re

_LOGIN = re.compile(
    r"\b(https?://)[^\s/?#]{0,1000}@|\b(?!https?:|memory:|sqlite:)([a-z][a-z0-9+.-]{0,30}:?//)(?!/)\S{0,1000}@",
    re.IGNORECASE,
)
_OPTION = re.compile(r"(password=)(?:'[^']*'|[^&#\s]*[^&#\s'\",:;.)])", re.IGNORECASE)


def without_secrets(text: str) -> str:
    """``text`` without the logins (user, password, token) of the URLs in it; passwords elsewhere in it become ``***``.

    A server's URL loses all that stands before its last ``@``, as a password may hold any character by mistake; a web page's
    only what stands before its host, and the name of a ``memory://`` mailbox or of a file is left alone. Passwords among the
    options are replaced (``?password=``, ``sslpassword=`` and the like), and so are those of libpq's ``key=value`` strings.
    """
    if "//" not in text and "password=" not in text.lower():
        return text
    return _OPTION.sub(r"\1***", _LOGIN.sub(r"\1\2", text))


def shown(url: str) -> str:
    """One URL as errors show it, also where a password in it holds white space."""
    if url.startswith(("memory:", "sqlite:")):
        return url
    return without_secrets("%20".join(url.split()))
