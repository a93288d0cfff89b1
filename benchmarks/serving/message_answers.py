"""Answers of Anthropic's Messages."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, ClassVar

from serving.answer_forms import Answer, AnswerForm, FailedError, make_answer, sse_events


class MessagesForm(AnswerForm):
    """Blocks of text and calls of tools."""

    stream_fields: ClassVar = {}

    def whole(self, answer: dict[str, Any]) -> Answer:
        blocks = answer["content"]
        choice = {
            "text": "".join(block["text"] for block in blocks if block["type"] == "text"),
            "tool_calls": [
                {"name": block["name"], "arguments": block["input"]} for block in blocks if block["type"] == "tool_use"
            ],
            "finish_reason": answer["stop_reason"],
            "logprobs": None,
        }
        usage = answer["usage"]  # what the prefix cache held depends on what ran before
        num_prompt_tokens = usage["input_tokens"] + usage["cache_read_input_tokens"]
        return make_answer({0: choice}, num_prompt_tokens, usage["output_tokens"])

    def folded(self, lines: Sequence[bytes]) -> Answer:
        events = [event for event in sse_events(lines) if event["type"] != "ping"]
        if not events or events[-1]["type"] != "message_stop":
            raise FailedError("the stream ended early")
        message: dict[str, Any] = events[0]["message"]
        for event in events:
            if event["type"] == "content_block_start":
                if event["index"] != len(message["content"]):
                    raise FailedError(f"block {event['index']} after {len(message['content'])} blocks")
                message["content"].append({**event["content_block"], "json": ""})
            elif event["type"] == "content_block_delta":
                block, delta = message["content"][event["index"]], event["delta"]
                name = {"text_delta": "text", "input_json_delta": "partial_json"}.get(delta["type"])
                if name is not None:
                    block["text" if name == "text" else "json"] += delta[name]
            elif event["type"] == "message_delta":
                message |= event["delta"]
                message["usage"] |= event["usage"]
        for block in message["content"]:
            if block["type"] == "tool_use":
                block["input"] = json.loads(block["json"] or "{}")
        return self.whole(message)
