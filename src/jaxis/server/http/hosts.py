"""Host names by which requests may call the server.

A web page can make its own host name point to this machine (DNS rebinding); the browser then lets the page's scripts
read the answers of a server here. Such a request still carries the page's name as its host.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

from jaxis.server.http.api_keys import OPEN_PATHS
from jaxis.server.http.errors import ApiError
from jaxis.server.listener import is_loopback

TARGET_HOST = "jaxis.target_host"
"""Key in a request's scope of the host in its address, if the address was not only a path."""

# RFC 9110, section 7.2: a name or address, and a port, without a user.
_HOST = re.compile(r"(?P<host>\[[0-9a-f:.]+\]|[0-9a-z._~!$&'()*+,;=%-]*)(?::[0-9]*)?", re.IGNORECASE)


class HostMiddleware:
    """Refuses requests without one clear host, as RFC 9112 (section 3.2) demands.

    A proxy and this server could otherwise see different hosts in the same request.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (fault := _host_fault(scope)) is not None:
            await ApiError(400, fault, headers={"Connection": "close"}).response()(scope, receive, send)
        else:
            await self._app(scope, receive, send)


class AllowedHostMiddleware:
    """Refuses requests to other hosts than loopback addresses and `hosts`, with or without a port.

    Health checks may name no host, as load balancers do: a browser always names one.
    """

    def __init__(self, app: ASGIApp, hosts: Sequence[str]) -> None:
        self._app = app
        self._hosts = frozenset(_without_port(host) or host.lower() for host in hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            host = _without_port(next(iter(_hosts(scope)), ""))
            is_health_check = not host and scope["path"] in OPEN_PATHS
            if host not in self._hosts and not is_loopback(host) and not is_health_check:
                error = ApiError(
                    403,
                    f"the server was not called by a name that it has, but as {host[:200]!r}: call it as localhost, or "
                    "start it with --allowed-hosts or an API key",
                )
                await error.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _hosts(scope: Scope) -> list[str]:
    hosts = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
    return hosts + ([scope[TARGET_HOST]] if TARGET_HOST in scope else [])


def _host_fault(scope: Scope) -> str | None:
    """Returns the error in the hosts that a request names, or None."""
    if sum(name == b"host" for name, _ in scope["headers"]) > 1:
        return "the request has more than one Host header: send one"
    hosts = _hosts(scope)
    if len({host.lower() for host in hosts}) > 1:
        return "the host in the request's address is not that of its Host header: send a path as the address"
    for host in hosts:
        if _HOST.fullmatch(host) is None:
            return f"the Host header {host[:200]!r} is not a host and a port: correct it"
    return None


def _without_port(host: str) -> str:
    match = _HOST.fullmatch(host.lower())
    return "" if match is None else match["host"].strip("[]").removesuffix(".")
