"""API keys. With keys set, every route needs one, except for the chat page's files and the health checks."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence, Set
from pathlib import Path

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from jaxis.errors import ConfigError
from jaxis.server.http.errors import ApiError

OPEN_PATHS = frozenset({"/health", "/ready", "/ping"})


class ApiKeyMiddleware:
    """Lets through requests with one of the keys, as `Authorization: Bearer KEY` or `x-api-key: KEY`.

    Every key is compared, each in a time that does not depend on where it differs.

    Args:
      open_paths: Exact paths that need no key.
    """

    def __init__(self, app: ASGIApp, api_keys: Sequence[str], open_paths: Set[str] = OPEN_PATHS) -> None:
        self._app = app
        self._open_paths = open_paths
        self._digests = [_digest(key) for key in api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (
            scope["type"] == "lifespan"
            or (scope["type"] == "http" and scope["path"] in self._open_paths)
            or self._is_authorized(Headers(scope=scope))
        ):
            await self._app(scope, receive, send)
        else:
            error = ApiError(
                401,
                "the API key is missing or wrong: send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
            await error.response()(scope, receive, send)

    def _is_authorized(self, headers: Headers) -> bool:
        scheme, _, key = headers.get("authorization", "").partition(" ")
        return (self._is_key(key.strip()) and scheme.lower() == "bearer") | self._is_key(headers.get("x-api-key", ""))

    def _is_key(self, given: str) -> bool:
        digest = _digest(given)
        matches = [hmac.compare_digest(digest, key) for key in self._digests]
        return any(matches)


def read_api_keys(path: Path) -> tuple[str, ...]:
    """Reads keys from a file, one per line; ignores empty lines and those that begin with #.

    Raises:
      ConfigError: The file cannot be read, or holds no key.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the API key file {path} cannot be read: {error}") from None
    keys = tuple(line.strip() for line in lines if line.strip() and not line.strip().startswith("#"))
    if not keys:
        raise ConfigError(f"the API key file {path} contains no key: write one per line")
    return keys


def _digest(key: str) -> bytes:
    # Of equal length for all keys, so that the comparison reveals nothing about a key's length.
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
