"""Asks a server and brings its answer, whole or streamed, into one form that can be compared."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp

from serving.request_mix import RESPONSES, MixItem

REFUSALS = (429, 503)
# "choices": {index: {"text", "tool_calls", "finish_reason", "logprobs"}}, and the token counts
Answer = dict[str, Any]


class RefusedError(Exception):
    """The server said that it is too busy, or about to end.

    Attributes:
      status: Its status code.
      retry_after: When to try again, in seconds.
    """

    def __init__(self, status: int, retry_after: float) -> None:
        super().__init__(status)
        self.status = status
        self.retry_after = retry_after


class FailedError(Exception):
    """The server answered with something that is neither an answer nor a refusal."""


async def ask(session: aiohttp.ClientSession, item: MixItem, *, stream: bool) -> Answer:
    """One answer.

    Raises:
      RefusedError: 429 or 503, with a Retry-After where the queue is full.
      FailedError: Another status, an error in the stream, or a stream that ends early.
    """
    body = {**item.body, "stream": stream}
    if stream and item.path != RESPONSES:
        body["stream_options"] = {"include_usage": True}
    async with session.post(item.path, json=body) as response:
        if response.status in REFUSALS:
            if response.status == 429 and "Retry-After" not in response.headers:
                raise FailedError("429 without Retry-After")
            raise RefusedError(response.status, float(response.headers.get("Retry-After", 1)))
        if response.status != 200:
            raise FailedError(f"status {response.status}: {(await response.text())[:300]}")
        if not stream:
            return _whole(item, await response.json())
        return await _streamed(item, response)


async def _streamed(item: MixItem, response: aiohttp.ClientResponse) -> Answer:
    events = [event async for event in _events(response)]
    if item.path == RESPONSES:
        last = events[-1].get("response") if events else None
        if last is None:
            raise FailedError("the stream ended without a response")
        text = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
        answer = _whole(item, last)
        if text != answer["choices"][0]["text"]:
            raise FailedError("the deltas are not the whole text")
        return answer
    choices: dict[int, dict[str, Any]] = {}
    usage = None
    for event in events:
        usage = event.get("usage") or usage
        for new in event["choices"]:
            choice = choices.setdefault(
                new["index"], {"text": "", "tool_calls": [], "finish_reason": None, "logprobs": None}
            )
            choice["text"] += (new["delta"].get("content") if "delta" in new else new["text"]) or ""
            for call in new.get("delta", {}).get("tool_calls") or ():
                if call["index"] == len(choice["tool_calls"]):
                    choice["tool_calls"].append({"name": call["function"]["name"], "arguments": ""})
                choice["tool_calls"][call["index"]]["arguments"] += call["function"].get("arguments") or ""
            choice["finish_reason"] = new["finish_reason"] or choice["finish_reason"]
            choice["logprobs"] = _joined(choice["logprobs"], new.get("logprobs"))
    if usage is None:
        raise FailedError("the stream has no usage")
    return _answer(choices, usage["prompt_tokens"], usage["completion_tokens"])


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """The stream's events; raises FailedError unless it ends as it should."""
    last = None
    async for line in response.content:
        if not line.startswith(b"data: "):
            continue
        last = line[6:].strip()
        if last == b"[DONE]":
            return
        event = json.loads(last)
        if event.get("error"):
            raise FailedError(f"an error in the stream: {event['error']}")
        yield event
    if last is None or not json.loads(last).get("type", "").startswith("response."):
        raise FailedError("the stream ended early")


def _whole(item: MixItem, answer: dict[str, Any]) -> Answer:
    usage = answer["usage"]
    if item.path == RESPONSES:
        [output] = answer["output"]
        text, status = output["content"][0]["text"], answer["status"]
        choice = {"text": text, "tool_calls": [], "finish_reason": status, "logprobs": None}
        return _answer({0: choice}, usage["input_tokens"], usage["output_tokens"])
    choices = {
        choice["index"]: {
            "text": (choice["message"]["content"] if "message" in choice else choice["text"]) or "",
            "tool_calls": [
                {name: call["function"][name] for name in ("name", "arguments")}  # ids are new every time
                for call in choice.get("message", {}).get("tool_calls") or ()
            ],
            "finish_reason": choice["finish_reason"],
            "logprobs": _joined(None, choice.get("logprobs")),
        }
        for choice in answer["choices"]
    }
    return _answer(choices, usage["prompt_tokens"], usage["completion_tokens"])


def _answer(choices: dict[int, dict[str, Any]], num_prompt_tokens: int, num_completion_tokens: int) -> Answer:
    return {
        "choices": dict(sorted(choices.items())),
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_completion_tokens,
    }


def _joined(logprobs: dict[str, list] | None, new: dict[str, list | None] | None) -> dict[str, list] | None:
    if new is None:
        return logprobs
    found = {name: values for name, values in new.items() if values is not None}
    return {name: (logprobs or {}).get(name, []) + values for name, values in found.items()}
