"""Sends requests to an OpenAI-compatible server and times what comes back.

A benchmark's client must be cheap, since every event of every stream passes through it. It reads streams as the socket
delivers them, notes the time before parsing, and encodes request bodies in advance.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from jaxis.bench.serving.dataset import ServingRequest
from jaxis.engine.drafting.draft_counts import DraftCounts
from jaxis.errors import RequestError

CONNECT_SECONDS = 30.0
READ_SECONDS = 600.0  # without receiving a byte
_MAX_ERROR_CHARACTERS = 300
_CHAT_TEXTS = ("content", "reasoning_content", "reasoning", "tool_calls")


@dataclass
class RequestResult:
    """The result of one request; times are `time.perf_counter` seconds.

    Attributes:
      scheduled_time: When it was due; latencies count from here, so that a client or a limit that delays requests
        cannot hide the time that a user would have waited.
      sent_time: When it was sent.
      token_times: Arrival time of each event with tokens; an event may carry several.
      end_time: When the last byte arrived.
      num_prompt_tokens, num_output_tokens: As counted by the server; None if it did not report them.
      text: The answer.
      error: Why it failed; None if it did not.
    """

    scheduled_time: float
    sent_time: float = 0.0
    token_times: list[float] = field(default_factory=list)
    end_time: float = 0.0
    num_prompt_tokens: int | None = None
    num_output_tokens: int | None = None
    text: str = ""
    error: str | None = None


class ServingClient:
    """A connection pool to one server; use it as an async context manager.

    Args:
      base_url: Such as "http://127.0.0.1:8000"; with or without "/v1".
      endpoint: "/v1/completions" or "/v1/chat/completions".
      api_key: Sent in the `Authorization` header.
    """

    def __init__(self, base_url: str, endpoint: str, api_key: str | None = None) -> None:
        self._root = base_url.rstrip("/").removesuffix("/v1")
        self.url = self._root + endpoint
        self.chat = endpoint.endswith("/chat/completions")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    async def __aenter__(self) -> ServingClient:
        self._session = aiohttp.ClientSession(
            headers=self._headers,
            # uvicorn closes a connection after 5 idle seconds: a request sent on it at that moment would fail.
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=3.0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS, sock_read=READ_SECONDS),
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def first_model(self) -> str:
        """The name of the first model that the server lists.

        Raises:
          RequestError: The server cannot be reached, or lists none.
        """
        try:
            async with self._session.get(f"{self._root}/v1/models") as response:
                if response.status != 200:
                    raise RequestError(f"{response.url}: {await _error_text(response)}: give --model")
                return (await response.json())["data"][0]["id"]
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise RequestError(f"{self._root} cannot be reached: {_reason(error)}") from None
        except (ValueError, LookupError, TypeError):
            raise RequestError(f"{self._root}/v1/models lists no model: give --model") from None

    async def draft_counts(self) -> DraftCounts | None:
        """What became of the server's drafts since its start, by its metrics; None if it has none."""
        try:
            async with self._session.get(f"{self._root}/metrics") as response:
                return _draft_counts(await response.text()) if response.status == 200 else None
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
            return None

    def encode(self, request: ServingRequest, parameters: Mapping[str, Any]) -> bytes:
        """A request's body."""
        body = {
            "messages" if self.chat else "prompt": request.prompt,
            "max_tokens": request.output_len,
            "stream": True,
            "stream_options": {"include_usage": True},
            **parameters,
        }
        return json.dumps(body).encode()

    async def send(self, body: bytes, scheduled_time: float) -> RequestResult:
        """Sends a request and reads its answer to the end; raises only on cancellation."""
        result = RequestResult(scheduled_time, sent_time=time.perf_counter())
        try:
            async with self._session.post(
                self.url, data=body, headers={"Content-Type": "application/json"}
            ) as response:
                if response.status == 200:
                    await _read_stream(response, result)
                else:
                    result.error = await _error_text(response)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            result.error = _reason(error)
        except (ValueError, AttributeError, TypeError):
            result.error = "the stream holds something else than OpenAI's events"
        result.end_time = time.perf_counter()
        return result


def _draft_counts(metrics: str) -> DraftCounts | None:
    """The counts in a server's metrics, of all its engines; None if they are not there.

    Raises:
      ValueError: The text has another format than Prometheus's.
    """
    counts, by_position = Counter[str](), Counter[int]()
    for family in text_string_to_metric_families(metrics):
        _, is_of_drafts, name = family.name.partition(":spec_decode_num_")
        for sample in family.samples if is_of_drafts else ():
            if not sample.name.endswith("_created"):
                counts[name] += int(sample.value)
                if "position" in sample.labels:
                    by_position[int(sample.labels["position"])] += int(sample.value)
    if "drafts" not in counts:
        return None
    positions = [by_position[position] for position in range(max(by_position, default=-1) + 1)]
    return DraftCounts(counts["drafts"], counts["draft_tokens"], counts["accepted_tokens"], positions)


def _reason(error: Exception) -> str:
    if isinstance(error, aiohttp.ClientConnectorError) and error.errno:
        return os.strerror(error.errno).lower()
    return str(error) or type(error).__name__


async def _read_stream(response: aiohttp.ClientResponse, result: RequestResult) -> None:
    rest = b""
    texts: list[str] = []
    done = False
    async for chunk in response.content.iter_any():
        now = time.perf_counter()
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                done = True
            else:
                _take(json.loads(data), now, result, texts)
    result.text = "".join(texts)
    if result.error is None and not done:
        result.error = "the stream ended early"


def _take(event: Mapping[str, Any], now: float, result: RequestResult, texts: list[str]) -> None:
    """Records an event.

    An event with tokens has text. Tokens without text (half a character, a special token) count with those after them;
    if an answer has no text at all, they count when the server sends the finish reason.
    """
    if error := event.get("error"):
        result.error = str(error.get("message", error) if isinstance(error, dict) else error)[:_MAX_ERROR_CHARACTERS]
        return
    if usage := event.get("usage"):
        result.num_prompt_tokens = usage.get("prompt_tokens")
        result.num_output_tokens = usage.get("completion_tokens")
    for choice in event.get("choices") or ():
        found = [*_texts(choice)]
        texts += found
        if found or (choice.get("finish_reason") and not result.token_times):
            result.token_times.append(now)


def _texts(choice: dict[str, Any]) -> Iterator[str]:
    if "delta" not in choice:
        if text := choice.get("text"):
            yield text
        return
    delta = choice["delta"] or {}
    for name in _CHAT_TEXTS:
        if text := delta.get(name):
            yield text if isinstance(text, str) else json.dumps(text)


async def _error_text(response: aiohttp.ClientResponse) -> str:
    text = await response.text(errors="replace")
    with contextlib.suppress(ValueError, LookupError, TypeError):
        text = json.loads(text)["error"]["message"]
    return f"status {response.status}: {' '.join(str(text).split())[:_MAX_ERROR_CHARACTERS]}"
