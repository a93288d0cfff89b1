"""Images that requests name in place of sending them: files below one folder, and https addresses at listed hosts.

Both are off unless the operator allows them. An address is taken apart once, and that reading is what is checked and
asked: its host must be listed, each address that the name resolves to must be public, and the connection is made to one
of these very addresses. Redirects are not followed, and no proxy is used.
"""

from __future__ import annotations

import contextlib
import functools
import http.client
import ipaddress
import os
import re
import socket
import ssl
import stat
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import SplitResult, unquote, urlsplit

from jaxis.errors import ConfigError, RequestError
from jaxis.host.base64_text import is_data_url
from jaxis.host.byte_size import human_bytes
from jaxis.vision.decode import MAX_FILE_BYTES, ImageSource

FETCH_SECONDS = 5.0  # for all of a fetch: the name, the connection, the answer
FETCH_BYTES = 16 * 2**20
_MAX_URL_CHARACTERS = 2048
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")
_PRINTABLE = re.compile(r"[!-~]+")  # ASCII without spaces
_PORT = 443
_NAT64 = ipaddress.ip_network("64:ff9b::/96")

_fetching = ThreadPoolExecutor(8, "jaxis-fetch")  # threads begin when they are needed


@dataclass(frozen=True)
class ImageAccess:
    """What requests may name.

    Attributes:
      local_path: The folder below which they may name files; None: none.
      domains: Hosts from which images are fetched, as they stand in URLs.

    Raises:
      ConfigError: A domain is no name of a host, so that no URL would be at it.
    """

    local_path: Path | None = None
    domains: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for domain in self.domains:
            if _HOST.fullmatch(domain) is None:
                raise ConfigError(
                    f"{domain!r} is no host that images can be fetched from: give a name such as images.example.com"
                )

    def source(self, url: str, place: str) -> ImageSource:
        """What a URL stands for, to be read when the prompt is made; nothing is read or fetched yet.

        Args:
          url: A data: URL, or a file: or https: URL that is allowed.
          place: Where the request has it.

        Raises:
          RequestError: It is not allowed.
        """
        if is_data_url(url):
            return url
        if len(url) <= _MAX_URL_CHARACTERS and _PRINTABLE.fullmatch(url) and "\\" not in url:
            try:
                parts = urlsplit(url)
                if parts.scheme == "file" and self.local_path is not None:
                    return self._file(parts, self.local_path, place)
                if parts.scheme == "https" and self.domains:
                    return self._address(parts, place)
            except ValueError:
                pass
        ways = ["must be a data: URL with the image itself"]
        ways += ["a file:// URL below the allowed folder"] if self.local_path is not None else []
        ways += ["an https:// URL of an allowed host"] if self.domains else []
        why = "" if self.domains else ": nothing is fetched from addresses"
        raise RequestError(" or ".join(ways) + why, param=place)

    def _file(self, parts: SplitResult, folder: Path, place: str) -> Callable[[], bytes]:
        if parts.netloc not in ("", "localhost") or parts.query or parts.fragment:
            raise ValueError(parts)
        return functools.partial(_read, Path(unquote(parts.path)), folder, place)

    def _address(self, parts: SplitResult, place: str) -> Callable[[], bytes]:
        host = parts.hostname or ""
        if parts.port not in (None, 443) or "@" in parts.netloc:
            raise ValueError(parts)
        if host not in (domain.lower() for domain in self.domains):
            raise RequestError(f"is at the host {host[:100]!r}, which is not allowed", param=place)
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        return functools.partial(_fetch_in_time, host, target, place)


def _read(path: Path, folder: Path, place: str) -> bytes:
    """A regular file below a folder, links followed. What is not there and what is not allowed look alike."""
    refused = RequestError("is no file below the folder that is allowed", param=place)
    try:
        resolved = path.resolve(strict=True)
        if not resolved.is_relative_to(folder.resolve(strict=True)):
            raise refused
        # Neither a link that takes its place meanwhile is followed, nor a pipe waited for.
        descriptor = os.open(resolved, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except (OSError, ValueError, RuntimeError):
        raise refused from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise refused
    with os.fdopen(descriptor, "rb") as file:
        return file.read(MAX_FILE_BYTES + 1)  # what reads it refuses more


def _fetch_in_time(host: str, target: str, place: str) -> bytes:
    deadline = time.monotonic() + FETCH_SECONDS
    # Resolving a name cannot be given a time limit: it is waited for no longer.
    opened: list[socket.socket] = []
    future = _fetching.submit(_fetch, host, target, deadline, opened)
    try:
        return future.result(FETCH_SECONDS)
    except TimeoutError:
        future.cancel()
        for connection in opened:  # which ends the thread's waiting, too
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        raise RequestError(f"was not fetched within {FETCH_SECONDS:g} seconds", param=place) from None
    except _FetchError as error:
        raise RequestError(f"cannot be fetched: {error}", param=place) from None
    except (OSError, http.client.HTTPException, ValueError):
        raise RequestError("cannot be fetched: the host does not answer as it should", param=place) from None


class _FetchError(Exception):
    """Why an image is not fetched, in words that tell nothing of the network."""


def _fetch(host: str, target: str, deadline: float, opened: list[socket.socket]) -> bytes:
    addresses = {str(entry[4][0]) for entry in socket.getaddrinfo(host, _PORT, type=socket.SOCK_STREAM)}
    if not all(map(is_public, addresses)):
        raise _FetchError("the host's address is not a public one")
    address = min(addresses, key=lambda each: (":" in each, each))  # IPv4, which more machines have
    raw = socket.create_connection((address, _PORT), _left(deadline))
    opened.append(raw)
    connection = http.client.HTTPSConnection(host)
    try:
        tls = _tls().wrap_socket(raw, server_hostname=host)
        opened[:] = [tls]
        connection.sock = tls
        connection.request("GET", target, headers={"Accept": "image/*", "Accept-Encoding": "identity"})
        tls.settimeout(_left(deadline))
        response = connection.getresponse()
        if response.status != 200:
            more = ", and redirects are not followed" if 300 <= response.status < 400 else ""
            raise _FetchError(f"the host answers with status {response.status}{more}")
        if response.headers.get_content_maintype() != "image":
            raise _FetchError("what the host sends is not declared as an image")
        return _body(response, tls, deadline)
    finally:
        connection.close()
        raw.close()


def _body(response: http.client.HTTPResponse, connection: socket.socket, deadline: float) -> bytes:
    data = bytearray()
    while True:
        connection.settimeout(_left(deadline))
        part = response.read1(2**16)
        data += part
        if len(data) > FETCH_BYTES or (response.length or 0) > FETCH_BYTES:
            raise _FetchError(f"it has more than {human_bytes(FETCH_BYTES)}")
        if not part:
            return bytes(data)


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def _tls() -> ssl.SSLContext:
    return ssl.create_default_context()


def is_public(address: str) -> bool:
    """Whether an IP address is one of the internet at large, also where it holds another address."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        held = ip.ipv4_mapped or (ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF) if ip in _NAT64 else None)
        if held is not None:
            return is_public(str(held))
        if ip.sixtofour is not None or ip.teredo is not None:
            return False
    return ip.is_global and not ip.is_multicast and not ip.is_reserved
