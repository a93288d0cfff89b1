"""The request log: a file with one JSON object for each request, for operators who must know the requests.

It is off by default. "ids-and-usage" holds the API key and the token counts; "full" adds the request and the answers,
without keys and images.
"""

from __future__ import annotations

import asyncio
import json
import logging
import logging.handlers
import os
import re
import sys
import time
from collections.abc import Set
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import UTC, datetime
from io import TextIOWrapper
from pathlib import Path
from typing import Any, Literal

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxis.errors import ConfigError
from jaxis.host.logs import current_request_id
from jaxis.outputs import RequestOutput
from jaxis.server.http.api_keys import current_api_key

RequestLogLevel = Literal["ids-and-usage", "full"]
MAX_FILE_BYTES = 100 * 2**20
NUM_OLD_FILES = 5
_WARNING_SECONDS = 60.0
REMOVED = "[removed]"
_SECRET_NAMES = re.compile(
    r"(api|access|auth|secret|private)[-_]?(key|token)|authorization([-_]?token)?|password|secret", re.IGNORECASE
)
# Keys made by `jaxis new-key`, and keys of services with well-known formats.
_SECRET_TEXT = re.compile(r"\b(jaxis-|sk-|hf_|ghp_|AKIA|xox[abp]-)[A-Za-z0-9_-]{16,}|\bBearer\s+[A-Za-z0-9._~+/=-]{8,}")
_DATA_URL = re.compile(
    r"data:([\w.+-]+/[\w.+-]+)?(?: *; *[\w=.+-]+)* *,"
    r"[A-Za-z0-9+/=_%-]*(?:\s+[A-Za-z0-9+/=_%-]{57,})*(?:\s+[\w+/]+={1,2})?",
    re.IGNORECASE,
)
# An image, a sound or a file in base64: longer than words and code without spaces, or many lines.
_BASE64 = re.compile(
    r"(?<![A-Za-z0-9+/_-])(?:[A-Za-z0-9+/_-]{512,}|(?:[A-Za-z0-9+/]{57,}\r?\n){7,}[A-Za-z0-9+/]*)={0,2}"
)
_logger = logging.getLogger(__name__)


@dataclass
class RequestRecord:
    """Record of one request, as far as it has been served.

    Attributes:
      prompt_tokens, cached_tokens, completion_tokens: Tokens of all its prompts and completions.
      finish_reasons: Finish reasons of the completions, in the order in which they ended.
      answers: The model's unparsed text, by the engine's request id and index of the completion.
    """

    keeps_answers: bool = False
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    finish_reasons: list[str] = field(default_factory=list)
    answers: dict[tuple[str, int], list[str]] = field(default_factory=dict)

    def add(self, output: RequestOutput, num_prompt: int, num_cached: int, num_generated: int) -> None:
        """Adds a step's output, and its numbers of new tokens."""
        self.prompt_tokens += num_prompt
        self.cached_tokens += num_cached
        self.completion_tokens += num_generated
        for completion in output.outputs:
            if completion.text and self.keeps_answers:
                self.answers.setdefault((output.request_id, completion.index), []).append(completion.text)
            if completion.finish_reason is not None:
                self.finish_reasons.append(completion.finish_reason)


current_record: ContextVar[RequestRecord | None] = ContextVar("current_record", default=None)
"""Record of the request that is being served; None if no log is kept."""


class RequestLogFile(logging.handlers.RotatingFileHandler):
    """A file of JSON lines that only its owner can read; existing content stays.

    It is renamed at 100 MiB, and five renamed files are kept. Raises ConfigError if the file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._last_warning: float | None = None
        try:
            super().__init__(path, maxBytes=MAX_FILE_BYTES, backupCount=NUM_OLD_FILES, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--request-log {path} cannot be written: {error.strerror}") from None

    def write(self, fields: dict[str, Any]) -> None:
        """Writes one line. An error is reported in the server's log."""
        self.handle(logging.makeLogRecord({"msg": json.dumps(fields)}))

    def reopen(self) -> None:
        """Opens a new file if another program has renamed this one."""
        self.acquire()
        try:
            if self.stream is not None:
                self.stream.close()
                self.stream = self._open()
        except OSError as error:
            self._warn(error)
        finally:
            self.release()

    def _open(self) -> TextIOWrapper:
        stream = open(self.baseFilename, "a", encoding="utf-8", opener=_open_privately)  # noqa: SIM115 (kept open)
        os.fchmod(stream.fileno(), 0o600)  # an older file may be open to others
        return stream

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: ARG002 (logging's signature)
        """Reports the exception that is being handled, as `logging` requires."""
        self._warn(sys.exception())

    def _warn(self, error: BaseException | None) -> None:
        now = time.monotonic()
        if self._last_warning is None or now - self._last_warning > _WARNING_SECONDS:
            self._last_warning = now
            _logger.warning("the request log %s cannot be written: %s", self.baseFilename, error)


def _open_privately(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


class RequestRecordMiddleware:
    """Writes a line for every request after its answer, except those of `quiet_paths`.

    The level "full" adds the request's body and the model's answers.
    """

    def __init__(self, app: ASGIApp, log: RequestLogFile, level: RequestLogLevel, quiet_paths: Set[str]) -> None:
        self._app = app
        self._log = log
        self._is_full = level == "full"
        self._quiet_paths = quiet_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in self._quiet_paths:
            await self._app(scope, receive, send)
            return
        record, body, status = RequestRecord(keeps_answers=self._is_full), bytearray(), 500
        current_record.set(record)
        arrival, start = datetime.now(UTC), time.monotonic()

        async def receive_and_keep() -> Message:
            message = await receive()
            body.extend(message.get("body", b""))
            return message

        async def send_noting_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive_and_keep if self._is_full else receive, send_noting_status)
        finally:
            fields = self._fields(scope, record, status)
            fields = {"time": arrival.isoformat(timespec="milliseconds"), **fields}
            fields["seconds"] = round(time.monotonic() - start, 4)
            # In a thread, since a slow disk would stop every stream; awaited, so that lines cannot pile up in memory.
            await asyncio.to_thread(self._write, fields, bytes(body), record)

    def _fields(self, scope: Scope, record: RequestRecord, status: int) -> dict[str, Any]:
        key = current_api_key.get()
        return {
            "request_id": current_request_id.get(),
            "key": None if key is None else key.name,
            "method": scope["method"],
            "path": scope["path"],
            "status": status,
            "prompt_tokens": record.prompt_tokens,
            "cached_tokens": record.cached_tokens,
            "completion_tokens": record.completion_tokens,
            "finish_reasons": record.finish_reasons,
        }

    def _write(self, fields: dict[str, Any], body: bytes, record: RequestRecord) -> None:
        if self._is_full:
            fields["request"] = _readable(body)
            fields["answers"] = [redacted("".join(parts)) for parts in record.answers.values()]
        self._log.write(fields)


def _readable(body: bytes) -> Any:
    """Returns a body without keys and images; None if it is empty, a note if it is not JSON."""
    if not body:
        return None
    try:
        return redacted(json.loads(body))
    except (ValueError, RecursionError):
        return f"[{len(body)} bytes that are not JSON]"


def redacted(value: Any) -> Any:
    """Returns a JSON value without keys, images and other data in base64."""
    if isinstance(value, str):
        return _redacted_text(value)
    if isinstance(value, list):
        return [redacted(item) for item in value]
    if isinstance(value, dict):
        return {
            name: REMOVED if isinstance(item, str) and _SECRET_NAMES.fullmatch(name) else redacted(item)
            for name, item in value.items()
        }
    return value


def _redacted_text(text: str) -> str:
    if len(text) < 16:
        return text
    text = _DATA_URL.sub(lambda match: f"[data of type {match[1] or 'text/plain'}, {len(match[0])} characters]", text)
    text = _BASE64.sub(lambda match: f"[base64 of {len(match[0])} characters]", text)
    return _SECRET_TEXT.sub(REMOVED, text)
