"""A streamed completion, read to its end."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx


def stream(
    client: httpx.Client,
    prompt: str | list[int],
    session: str,
    max_tokens: int = 24,
    started: Callable[[], object] = lambda: None,
    **fields: Any,
) -> tuple[str, dict[str, Any] | None]:
    """Asks for a completion of the embedded model, greedily; the text and the usage that its stream brings.

    Args:
      client: Client of the server.
      prompt: Text, or token ids.
      session: The session that the request belongs to.
      max_tokens: Limit of the answer.
      started: Called after each event.
      fields: More of the request.

    Raises:
      httpx.TransportError, ValueError: The stream ends early, or with an error in it.
    """
    text, usage = "", None
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": True} | fields
    body |= {"model": "jaxis-tiny", "stream_options": {"include_usage": True}}
    headers = {"x-session-id": session}
    with client.stream("POST", "/v1/completions", json=body, headers=headers) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if line == "data: [DONE]":
                return text, usage
            if not line.startswith("data: "):
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise ValueError(event["error"]["message"])
            text += "".join(choice["text"] for choice in event["choices"])
            usage = event["usage"] or usage
            started()
    raise ValueError("the stream ended without [DONE]")
