"""API keys. With keys set, every route needs one, except for the chat page's files and the health checks."""

from __future__ import annotations

from collections.abc import Set

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from jaxis.server.http.api_keys import ApiKey, ApiKeys, current_api_key
from jaxis.server.http.errors import ApiError

OPEN_PATHS = frozenset({"/health", "/ready", "/ping"})


class ApiKeyMiddleware:
    """Lets through requests with one of the keys, as `Authorization: Bearer KEY` or `x-api-key: KEY`.

    Every key is compared, each in a time that does not depend on where it differs.

    Args:
      keys: Those that are taken.
      open_paths: Exact paths that need no key.
    """

    def __init__(self, app: ASGIApp, keys: ApiKeys, open_paths: Set[str] = OPEN_PATHS) -> None:
        self._app = app
        self._keys = keys
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or (scope["type"] == "http" and scope["path"] in self._open_paths):
            await self._app(scope, receive, send)
        elif (key := self._find(Headers(scope=scope))) is not None:
            current_api_key.set(key)
            await self._app(scope, receive, send)
        else:
            error = ApiError(
                401,
                "the API key is missing or wrong: send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
            await error.response()(scope, receive, send)

    def _find(self, headers: Headers) -> ApiKey | None:
        scheme, _, key = headers.get("authorization", "").partition(" ")
        bearer = self._keys.find(key.strip())
        direct = self._keys.find(headers.get("x-api-key", ""))
        return (bearer if scheme.lower() == "bearer" else None) or direct
