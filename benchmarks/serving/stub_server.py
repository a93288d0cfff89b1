"""A server that streams a fixed answer at known times: what a client of the API measures can be compared with it.

    python benchmarks/serving/stub_server.py --port 8100

With no delays it shows how many requests and events a second the client itself can take.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

MODEL = "stub"
PROMPT_TOKENS = 7
Fault = str | None  # "status", "error event", "cut" or none


@dataclass(frozen=True)
class StubAnswer:
    """How a request is answered.

    Attributes:
      first_seconds: Before the first event.
      gap_seconds: Before each later one.
      tokens_per_event: Tokens that each event brings; `max_tokens` of the request says how many there are.
      usage: Whether the tokens are counted at the end.
      fault: What goes wrong with the request of a number, counted from 0.
      metrics: The server's metrics after so many requests.
    """

    first_seconds: float = 0.0
    gap_seconds: float = 0.0
    tokens_per_event: int = 1
    usage: bool = True
    fault: Callable[[int], Fault] = lambda _: None
    metrics: Callable[[int], str] = lambda _: ""


class StubServer:
    """Serves HTTP/1.1 with connections that stay open.

    Attributes:
      num_requests: Completions asked for so far.
      bodies: What they asked for, with `keep_bodies`.
      num_open, most_open: Completions running, now and at most.
    """

    def __init__(self, answer: StubAnswer, *, keep_bodies: bool = True) -> None:
        self._answer = answer
        self._keep_bodies = keep_bodies
        self.num_requests = self.num_open = self.most_open = 0
        self.bodies: list[dict[str, Any]] = []

    async def serve(self, port: int = 0) -> asyncio.Server:
        """Starts to listen on the loopback address."""
        return await asyncio.start_server(self._connection, "127.0.0.1", port, backlog=4096)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                headers = dict(line.lower().split(": ", 1) for line in head.split("\r\n")[1:] if ": " in line)
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                path = head.split(" ", 2)[1]
                if path == "/v1/models":
                    _write_json(writer, 200, {"data": [{"id": MODEL}]})
                elif path == "/metrics":
                    _write_body(writer, 200, self._answer.metrics(self.num_requests), "text/plain")
                elif not await self._complete(path, json.loads(body), writer):
                    break
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _complete(self, path: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        number, answer = self.num_requests, self._answer
        self.num_requests += 1
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        if self._keep_bodies:
            self.bodies.append(body)
        try:
            fault = answer.fault(number)
            if fault == "status":
                _write_json(writer, 429, {"error": {"message": "the stub is busy"}})
                return True
            return await self._stream(path, body, fault, writer)
        finally:
            self.num_open -= 1

    async def _stream(self, path: str, body: dict[str, Any], fault: Fault, writer: asyncio.StreamWriter) -> bool:
        answer, num_tokens = self._answer, body["max_tokens"]
        chat = path.endswith("/chat/completions")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        num_events = math.ceil(num_tokens / answer.tokens_per_event)
        if chat:
            _write_event(writer, _chunk({"delta": {"role": "assistant", "content": ""}}))
        for number in range(num_events):
            seconds = answer.gap_seconds if number else answer.first_seconds
            if seconds:
                await asyncio.sleep(seconds)
            if fault is not None and number == num_events // 2:
                if fault == "cut":
                    return False
                _write_event(writer, {"error": {"message": "the stub failed"}})
                break
            text = "word " * min(answer.tokens_per_event, num_tokens - number * answer.tokens_per_event)
            reason = "length" if number == num_events - 1 else None
            content = {"delta": {"content": text}} if chat else {"text": text}
            _write_event(writer, _chunk(content | {"finish_reason": reason}))
            await writer.drain()
        if answer.usage and body.get("stream_options", {}).get("include_usage"):
            _write_event(
                writer, {**_chunk(), "usage": {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": num_tokens}}
            )
        _write_chunk(writer, b"data: [DONE]\n\n")
        _write_chunk(writer, b"")
        return True


def _chunk(*choices: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": "cmpl-0123456789abcdef0123456789abcdef",
        "object": "text_completion",
        "created": 1700000000,
        "model": MODEL,
        "choices": [{"index": 0, "logprobs": None, **choice} for choice in choices],
    }


def _write_event(writer: asyncio.StreamWriter, event: dict[str, Any]) -> None:
    _write_chunk(writer, b"data: " + json.dumps(event).encode() + b"\n\n")


def _write_chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(b"%x\r\n%b\r\n" % (len(data), data))


def _write_json(writer: asyncio.StreamWriter, status: int, value: dict[str, Any]) -> None:
    _write_body(writer, status, json.dumps(value), "application/json")


def _write_body(writer: asyncio.StreamWriter, status: int, text: str, content_type: str) -> None:
    body = text.encode()
    head = f"HTTP/1.1 {status} Stub\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)


async def main() -> None:
    """Serves until it is ended."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=8100)
    parser.add_argument("--first-seconds", type=float, default=0.0)
    parser.add_argument("--gap-seconds", type=float, default=0.0)
    parser.add_argument("--tokens-per-event", type=int, default=1)
    arguments = parser.parse_args()
    answer = StubAnswer(arguments.first_seconds, arguments.gap_seconds, arguments.tokens_per_event)
    server = await StubServer(answer, keep_bodies=False).serve(arguments.port)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
