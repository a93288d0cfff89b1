"""API keys of a server: given as text, or in a file of names, digests and limits.

The file has only the SHA-256 of each key, so a reader of the file cannot call the server. A plain digest is enough,
since keys are random (`jaxis new-key` makes them).
"""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import logging
import re
import secrets
from collections.abc import Sequence, Set
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from jaxis.errors import ConfigError
from jaxis.server.http.errors import ApiError

OPTION_KEY_NAME = "default"
"""Name of the keys that are given as options, which have no name of their own."""
MAX_FILE_BYTES = 1 << 20
OPEN_PATHS = frozenset({"/health", "/ready", "/ping"})
"""Paths of the health checks, which need no key."""
_NAME = re.compile(r"[A-Za-z0-9._@-]{1,64}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_LIMITS = ("requests_per_minute", "tokens_per_minute")
_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ApiKey:
    """A key, and the rights and limits of its holder.

    Attributes:
      name: Name in logs and metrics.
      sha256: Digest of the key's text, in hexadecimal.
      requests_per_minute: Most requests that generate; None for no limit.
      tokens_per_minute: Most tokens of prompts and answers together; None for no limit.
      priority: Best priority of its requests; lower values are served first. None leaves the choice to the requests.
      admin: True if the holder may change the server's state.
    """

    name: str
    sha256: str
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    priority: int | None = None
    admin: bool = False


current_api_key: ContextVar[ApiKey | None] = ContextVar("current_api_key", default=None)
"""Key of the request that is being served; None if it needs none."""


class ApiKeys:
    """All keys of a server: texts, and those of a file for `read_api_keys`. True if the server demands a key.

    Raises ConfigError if the file cannot be used.
    """

    def __init__(self, given: Sequence[str] = (), path: Path | None = None) -> None:
        self._given = [ApiKey(OPTION_KEY_NAME, digest_of(key)) for key in given]
        self._path = path
        self._keys = self._read()

    def __bool__(self) -> bool:
        # A file without keys refuses every client.
        return bool(self._given) or self._path is not None

    def find(self, text: str) -> ApiKey | None:
        """Returns the key with this text, or None. All keys are compared, each in constant time."""
        digest = digest_of(text)
        found = [key for key in self._keys if hmac.compare_digest(digest, key.sha256)]
        return found[0] if found else None

    def shown(self, client: str | None) -> str | None:
        """Returns the name of a client for operators: "key NAME" for a key's digest, an address unchanged."""
        return next((f"key {key.name}" for key in self._keys if key.sha256 == client), client)

    def reload(self) -> None:
        """Reads the file again. If the file cannot be used, logs an error and keeps the old keys."""
        if self._path is None:
            return
        try:
            self._keys = self._read()
        except ConfigError as error:
            _logger.error("the API keys stay as they were: %s", error)
        else:
            _logger.info("%d API keys read from %s", len(self._keys) - len(self._given), self._path)

    def _read(self) -> list[ApiKey]:
        return [*self._given, *(read_api_keys(self._path) if self._path is not None else ())]


def digest_of(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


def new_api_key(
    name: str,
    *,
    requests_per_minute: int | None = None,
    tokens_per_minute: int | None = None,
    priority: int | None = None,
    admin: bool = False,
) -> tuple[str, ApiKey]:
    """Makes a key: returns its text, of 256 random bits, and its entry for the file.

    Raises ConfigError if the name cannot be used.
    """
    _check_name(name, "the key's name")
    text = "jaxis-" + secrets.token_urlsafe(32)
    return text, ApiKey(name, digest_of(text), requests_per_minute, tokens_per_minute, priority, admin)


def to_yaml(key: ApiKey) -> str:
    """Returns a key as an entry of the file."""
    fields = {name: value for name, value in dataclasses.asdict(key).items() if value is not None}
    if not key.admin:
        del fields["admin"]
    return yaml.safe_dump([fields], sort_keys=False)


def read_api_keys(path: Path) -> list[ApiKey]:
    """Reads a YAML file of keys: a list of objects with the fields of `ApiKey`.

    Raises ConfigError if the file cannot be read, or an entry is not a key.
    """
    where = f"the API key file {path}"
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{where} cannot be read: {error.strerror}") from None
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(f"{where} has more than {MAX_FILE_BYTES >> 20} MiB")
    try:
        entries = yaml.safe_load(data)
    except (yaml.YAMLError, UnicodeDecodeError, ValueError, RecursionError):
        entries = None
    if not isinstance(entries, list):
        raise ConfigError(f"{where} is not a YAML list of keys: make one with `jaxis new-key NAME >> {path}`")
    keys = [_parse(entry, f"{where}: key {number}") for number, entry in enumerate(entries, 1)]
    for field in ("name", "sha256"):
        values = [getattr(key, field) for key in keys]
        if twice := next((value for value in values if values.count(value) > 1), None):
            raise ConfigError(f"{where} has two keys with the {field} {twice}: leave one out")
    return keys


def _parse(entry: Any, where: str) -> ApiKey:
    known = [field.name for field in dataclasses.fields(ApiKey)]
    if not isinstance(entry, dict) or not all(isinstance(field, str) for field in entry):
        # Not quoted: it may be a key.
        raise ConfigError(f"{where} is not an object with name and sha256: make it with `jaxis new-key NAME`")
    if unknown := sorted(entry.keys() - set(known)):
        raise ConfigError(f"{where} has the unknown field {unknown[0]!r}; known: {', '.join(known)}")
    _check_name(entry.get("name"), f"{where}: name")
    digest = entry.get("sha256")
    if not isinstance(digest, str) or not _DIGEST.fullmatch(digest) or digest == digest_of(""):
        raise ConfigError(f"{where}: sha256 must be the SHA-256 of the key, 64 hexadecimal digits in quotes")
    for field in _LIMITS:
        value = entry.get(field)
        if value is not None and (type(value) is not int or value < 1):
            raise ConfigError(f"{where}: {field}={value!r} must be an integer of at least 1")
    priority = entry.get("priority")
    if priority is not None and (type(priority) is not int or not -(2**31) <= priority < 2**31):
        raise ConfigError(f"{where}: priority={priority!r} must be an integer")
    if type(entry.get("admin", False)) is not bool:
        raise ConfigError(f"{where}: admin={entry['admin']!r} must be true or false")
    return ApiKey(**entry)


def _check_name(name: object, what: str) -> None:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError(f"{what} must be 1 to 64 letters, digits or . _ @ -, such as alice")


class ApiKeyMiddleware:
    """Lets through requests with a valid key, sent as `Authorization: Bearer KEY` or `x-api-key: KEY`.

    `open_paths` are exact paths that need no key.
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
