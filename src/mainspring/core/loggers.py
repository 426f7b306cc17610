"""Loggers whose handlers cannot end what logs: a handler, a filter or a formatter of a user may raise."""

from __future__ import annotations

import logging
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from mainspring.redaction import without_secrets

if TYPE_CHECKING:
    from collections.abc import MutableMapping


class Logger(logging.LoggerAdapter[logging.Logger]):
    """A logger of this package. What its handlers raise is said on standard error, once a kind of error, and not raised.

    The one exception is a ``KeyboardInterrupt``.
    """

    def __init__(self, name: str) -> None:
        super().__init__(logging.getLogger(name), None)
        self._told: set[type[BaseException]] = set()

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        """Leave the record's own ``extra`` alone."""
        return msg, kwargs

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        """Log one record."""
        kwargs["stacklevel"] = kwargs.get("stacklevel", 1) + 1
        try:
            self.logger.log(level, msg, *args, **kwargs)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            if type(error) not in self._told:
                self._told.add(type(error))
                with suppress(Exception):
                    said = str(msg) % args if args else str(msg)
                    text = f"a handler of the logger {self.logger.name!r} raised {error!r}; it was told: {said}"
                    sys.stderr.write(f"mainspring: {without_secrets(text)}\n")
