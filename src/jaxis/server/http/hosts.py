"""Which names a request may call the server by.

A web page can make its own name point to this machine (DNS rebinding); the browser then lets its scripts read the
answers of a server here. Such a request still carries the page's name as its host.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from jaxis.server.http.errors import ApiError


def is_loopback(host: str) -> bool:
    """Whether an address is reachable from this machine only."""
    return host == "localhost" or (_is_address(host) and ipaddress.ip_address(host).is_loopback)


class AllowedHostMiddleware:
    """Refuses requests to other hosts.

    Args:
      hosts: The names and addresses; loopback addresses are always allowed.
    """

    def __init__(self, app: ASGIApp, hosts: Sequence[str]) -> None:
        self._app = app
        self._hosts = frozenset(host.lower() for host in hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            host = _without_port(Headers(scope=scope).get("host", "").lower())
            if host not in self._hosts and not is_loopback(host):
                error = ApiError(
                    403,
                    f"the server was not called by a name that it has, but as {host[:200]!r}: call it as localhost, or "
                    "start it with --allowed-hosts or an API key",
                )
                await error.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
