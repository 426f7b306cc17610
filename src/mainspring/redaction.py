"""Show URLs without logins and passwords."""

from __future__ import annotations

import re

_SERVER = r"rediss?(?:\+[a-z]{1,20})?|postgres(?:ql)?|nats|tls"
# Patterns as text, which `re` compiles at their first use and keeps: a start without an error compiles none.
_LOGIN = (
    r"(?i)\b(https?://)[^\s/?#]{0,1000}@"
    r"|\b(?!https?:|memory:|sqlite:)([a-z][a-z0-9+.-]{0,30}:?//)(?!/)\S{0,1000}@"
    rf"|\b((?:{_SERVER})(?::[/\\]{{0,5}}|/{{2,5}}))\S{{0,1000}}@"
)
_NAME = r"(?:pass|password|passwd|passphrase|pwd|token|secret)"
_OPTION = rf"(?i)({_NAME}\s{{0,3}}=\s{{0,3}})(?:'[^']*'|\"[^\"]*\"|[^&#\s]*[^&#\s'\",:;.)])"
_QUERY = rf"(?i)({_NAME}=)[^&]*"
_HEAD = rf"(?i)\s*(?:[a-z][a-z0-9+.-]*(?:%20)?:?//+|(?:{_SERVER}):[/\\]*)"
_LINE_END = r"([^\s.,:;?!])\s*\n\s*"
_NO_PORT = r"(//[^/?#\[\]@]*?:)(?!\d*(?:[,/?#]|$)).+"


def without_secrets(text: str) -> str:
    """Return ``text`` without the logins (user, password, token) of the URLs in it; passwords elsewhere in it become ``***``.

    A server's URL loses all that stands before its last ``@``, as a password may hold any character by mistake. A web page's
    URL loses what stands before its host. The name of a ``memory://`` mailbox or of a file is left alone. Passwords among the
    options are replaced (``?password=``, ``sslpassword=``, ``token=`` and the like), and so are those of libpq's ``key=value``
    strings.
    """
    if not any(sign in text for sign in ("//", "@", "=")):
        return text
    return re.sub(_OPTION, r"\1***", re.sub(_LOGIN, r"\1\2\3", text))


def shown(url: str) -> str:
    """Return a URL as errors show it, however malformed it is.

    White space may stand in a password, and slashes or the host may be missing. What should be a port may be a password, whose
    end cannot be known.
    """
    if url.lower().startswith(("memory:", "sqlite:")):
        return url
    bare = "%20".join(url.split())
    _, at, rest = bare.rpartition("@")
    if at:
        head = re.match(_HEAD, bare)
        bare = f"{head[0] if head else ''}{rest}"
    return without_secrets(re.sub(_QUERY, r"\1***", re.sub(_NO_PORT, r"\1***", bare)))


def one_line(text: object) -> str:
    """Return ``text`` without line breaks and control characters: what an error says must not forge a second log line.

    A semicolon stands where a line ended without a mark.
    """
    line = " ".join(re.sub(_LINE_END, r"\1; ", str(text).strip()).split())
    return "".join(char if char.isprintable() else " " for char in line)
