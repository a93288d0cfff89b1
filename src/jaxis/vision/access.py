"""Images that requests refer to instead of sending them: files below one folder, and https URLs at listed hosts.

Both are off unless the operator allows them. A URL is parsed once, and the parsed parts are both checked and used: its
host must be listed, every address that the name resolves to must be public, and the connection goes to one of these
addresses. Redirects are not followed, and no proxy is used.
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

FETCH_SECONDS = 5.0  # for a whole fetch: name resolution, connection, response
FETCH_BYTES = 16 * 2**20
_MAX_URL_CHARACTERS = 2048
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")
_PRINTABLE = re.compile(r"[!-~]+")  # ASCII without spaces
_PORT = 443
_NAT64 = ipaddress.ip_network("64:ff9b::/96")

_fetching = ThreadPoolExecutor(8, "jaxis-fetch")  # starts threads on demand


@dataclass(frozen=True)
class ImageAccess:
    """Files and hosts that requests may refer to.

    Attributes:
      local_path: Folder below which files may be named; None for no files.
      domains: Names of hosts from which images may be fetched, as in URLs.

    Raises:
      ConfigError: A domain is not a valid host name, so that no URL could match it.
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
        """Returns the source for a URL, to be read when the prompt is made; nothing is read or fetched yet.

        Args:
          url: A data: URL, or a file: or https: URL that is allowed.
          place: Path of the URL in the request, for errors.

        Raises:
          RequestError: The URL is not allowed.
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
    """Reads a regular file below a folder, following links. Missing and forbidden files raise the same error."""
    refused = RequestError("is no file below the folder that is allowed", param=place)
    try:
        resolved = path.resolve(strict=True)
        if not resolved.is_relative_to(folder.resolve(strict=True)):
            raise refused
        # The flags keep it from following a link put there meanwhile, and from waiting for a pipe.
        descriptor = os.open(resolved, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except (OSError, ValueError, RuntimeError):
        raise refused from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise refused
    with os.fdopen(descriptor, "rb") as file:
        return file.read(MAX_FILE_BYTES + 1)  # the caller refuses larger files


def _fetch_in_time(host: str, target: str, place: str) -> bytes:
    deadline = time.monotonic() + FETCH_SECONDS
    # Name resolution cannot be given a time limit, so its thread is abandoned after this time.
    opened: list[socket.socket] = []
    future = _fetching.submit(_fetch, host, target, deadline, opened)
    try:
        return future.result(FETCH_SECONDS)
    except TimeoutError:
        future.cancel()
        for connection in opened:  # closing it ends the wait of the thread
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        raise RequestError(f"was not fetched within {FETCH_SECONDS:g} seconds", param=place) from None
    except _FetchError as error:
        raise RequestError(f"cannot be fetched: {error}", param=place) from None
    except (OSError, http.client.HTTPException, ValueError):
        raise RequestError("cannot be fetched: the host does not answer as it should", param=place) from None


class _FetchError(Exception):
    """Reason why an image is not fetched, in words that reveal nothing about the network."""


def _fetch(host: str, target: str, deadline: float, opened: list[socket.socket]) -> bytes:
    addresses = {str(entry[4][0]) for entry in socket.getaddrinfo(host, _PORT, type=socket.SOCK_STREAM)}
    if not all(map(is_public, addresses)):
        raise _FetchError("the host's address is not a public one")
    address = min(addresses, key=lambda each: (":" in each, each))  # prefers IPv4, which more machines have
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
    """Returns whether an IP address is public, and also any address embedded in it."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        held = ip.ipv4_mapped or (ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF) if ip in _NAT64 else None)
        if held is not None:
            return is_public(str(held))
        if ip.sixtofour is not None or ip.teredo is not None:
            return False
    return ip.is_global and not ip.is_multicast and not ip.is_reserved
