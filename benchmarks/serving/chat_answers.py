"""Answers of OpenAI's chat completions and completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from serving.answer_forms import Answer, AnswerForm, FailedError, make_answer, sse_events


class CompletionsForm(AnswerForm):
    """Both endpoints: a choice has a message or a string."""

    stream_fields: ClassVar = {"stream_options": {"include_usage": True}}

    def whole(self, answer: dict[str, Any]) -> Answer:
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
        return make_answer(choices, answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"])

    def folded(self, lines: Sequence[bytes]) -> Answer:
        events = sse_events(lines)
        if not any(line.strip() == b"data: [DONE]" for line in lines[-2:]):
            raise FailedError("the stream ended early")
        choices: dict[int, dict[str, Any]] = {}
        usage = None
        for event in events:
            usage = event.get("usage") or usage
            for new in event["choices"]:
                empty = {"text": "", "tool_calls": [], "finish_reason": None, "logprobs": None}
                _add(choices.setdefault(new["index"], empty), new)
        if usage is None:
            raise FailedError("the stream has no usage")
        return make_answer(choices, usage["prompt_tokens"], usage["completion_tokens"])


def _add(choice: dict[str, Any], new: dict[str, Any]) -> None:
    choice["text"] += (new["delta"].get("content") if "delta" in new else new["text"]) or ""
    for call in new.get("delta", {}).get("tool_calls") or ():
        if call["index"] == len(choice["tool_calls"]):
            choice["tool_calls"].append({"name": call["function"]["name"], "arguments": ""})
        choice["tool_calls"][call["index"]]["arguments"] += call["function"].get("arguments") or ""
    choice["finish_reason"] = new["finish_reason"] or choice["finish_reason"]
    choice["logprobs"] = _joined(choice["logprobs"], new.get("logprobs"))


def _joined(logprobs: dict[str, list] | None, new: dict[str, list | None] | None) -> dict[str, list] | None:
    if new is None:
        return logprobs
    found = {name: values for name, values in new.items() if values is not None}
    return {name: (logprobs or {}).get(name, []) + values for name, values in found.items()}
