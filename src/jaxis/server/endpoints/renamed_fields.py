"""Errors about the core's fields, in the words of a protocol that calls them something else."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from jaxis.errors import RequestError
from jaxis.server.http.errors import ModelNotFoundError, ParameterError


@contextmanager
def renamed_fields(names: Mapping[str, str]) -> Iterator[None]:
    """Translates errors that are raised in the block.

    Args:
      names: The core's name of a field -> the protocol's; the first with which a message begins is replaced.
    """
    try:
        yield
    except ModelNotFoundError:
        raise
    except RequestError as error:
        message = str(error)
        for name, own_name in names.items():
            if message.startswith(name):
                param = own_name.partition(".")[0]
                raise ParameterError(param, own_name + message.removeprefix(name)) from None
        raise
