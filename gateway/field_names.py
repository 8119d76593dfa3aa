"""Errors name fields as the client sent them, whatever the gateway calls them inside."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping

from shared.errors import InvalidArgument


@contextlib.contextmanager
def client_names(names: Mapping[str, str]) -> Iterator[None]:
    """Renames the field an error is about.

    Args:
        names: OpenAI's name to the one that the client's interface has for it.

    Raises:
        InvalidArgument: the error of the block, with the client's name of the field.
    """
    try:
        yield
    except InvalidArgument as error:
        inside = error.violations[0].field if error.violations else ""
        if inside not in names:
            raise
        message = re.sub(rf"^{re.escape(inside)}\b", names[inside], error.message)
        raise InvalidArgument.of(error.reason, names[inside], message) from error
