"""How a server's certificate is judged, and which one it is shown: the options that say so, made a context."""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING, Annotated

from pydantic_core import core_schema

from mainspring.errors import ConfigError
from mainspring.mailbox.settings import Accepts, OptionalText, ServerOptions

if TYPE_CHECKING:
    from mainspring.mailbox.settings import MailboxURL


class TLSOptions(ServerOptions):
    """The options of a mailbox on a server whose driver is told of TLS by a context."""

    ca_file: OptionalText = None
    cert_file: OptionalText = None
    key_file: OptionalText = None
    ssl_context: Annotated[
        ssl.SSLContext | None,
        Accepts(
            core_schema.nullable_schema(core_schema.is_instance_schema(ssl.SSLContext)),
            "an ssl.SSLContext (in a URL name the files: ca_file, cert_file, key_file)",
        ),
    ] = None

    @property
    def says_tls(self) -> bool:
        """True if one of the options of TLS is given."""
        return bool(self.ca_file or self.cert_file or self.key_file or self.ssl_context)

    def tls(self, url: MailboxURL, scheme: str) -> ssl.SSLContext | None:
        """Return the given context, else a new one with ``cert_file``, which trusts ``ca_file`` (else what the machine trusts).

        None where ``url`` does not have ``scheme``, that of TLS. Raises :class:`ConfigError` where the files cannot be read, or
        the options contradict each other or the scheme.
        """
        if url.scheme != scheme:
            if self.says_tls:
                raise ConfigError(
                    f"{url.shown!r} has options of TLS, and is not encrypted; the scheme for TLS is {scheme}://"
                )
            return None
        if self.ssl_context is not None:
            if self.ca_file or self.cert_file or self.key_file:
                raise ConfigError(
                    f"{url.shown!r}: with ssl_context there is no ca_file, cert_file or key_file: load them into it"
                )
            return self.ssl_context
        if self.key_file and not self.cert_file:
            raise ConfigError(f"{url.shown!r}: key_file belongs to a cert_file; name that too")
        try:
            context = ssl.create_default_context(cafile=self.ca_file)
            if self.cert_file is not None:
                context.load_cert_chain(self.cert_file, self.key_file)
        except OSError as error:
            raise ConfigError(f"{url.shown!r}: the certificates cannot be read: {error}") from error
        return context
