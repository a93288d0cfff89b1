"""Headers of files that are parsed once while a model is opened: a vocabulary takes a tenth of a second."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

_headers: ContextVar[dict[tuple[Path, int, int], Any] | None] = ContextVar("headers", default=None)


@contextmanager
def headers_read_once() -> Iterator[None]:
    """Context in which a file's header is parsed once and shared."""
    token = _headers.set({})
    try:
        yield
    finally:
        _headers.reset(token)


def kept_headers() -> dict[tuple[Path, int, int], Any] | None:
    """Returns the headers by path, size and time of change; None outside of `headers_read_once`."""
    return _headers.get()
