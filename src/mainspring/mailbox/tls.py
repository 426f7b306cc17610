"""How a server's certificate is judged, and which one it is shown: what the options of a mailbox say, made a context."""

from __future__ import annotations

import ssl

from mainspring.errors import ConfigError


def tls_context(
    shown: str, ca_file: str | None, cert_file: str | None, key_file: str | None, context: ssl.SSLContext | None
) -> ssl.SSLContext:
    """The context given, else one that trusts ``ca_file`` (else what the machine trusts) and shows ``cert_file``.

    Raises :class:`ConfigError` where the files cannot be read, or the options contradict each other; ``shown`` is the URL
    without its login.
    """
    if context is not None:
        if not isinstance(context, ssl.SSLContext):
            raise ConfigError(
                f"{shown!r}: ssl_context must be an ssl.SSLContext, not {context!r}; in a URL name the files: ca_file,"
                " cert_file, key_file"
            )
        if ca_file or cert_file or key_file:
            raise ConfigError(
                f"{shown!r}: with ssl_context there is no ca_file, cert_file or key_file: load them into it"
            )
        return context
    if key_file and not cert_file:
        raise ConfigError(f"{shown!r}: key_file belongs to a cert_file; name that too")
    try:
        context = ssl.create_default_context(cafile=ca_file)
        if cert_file is not None:
            context.load_cert_chain(cert_file, key_file)
    except OSError as error:
        raise ConfigError(f"{shown!r}: the certificates cannot be read: {error}") from error
    return context
