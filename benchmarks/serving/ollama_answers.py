"""Answers of Ollama's chat and generate."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, ClassVar

from serving.answer_forms import Answer, AnswerForm, FailedError, make_answer


class OllamaForm(AnswerForm):
    """Both endpoints: a line has a message, or a string as `response`."""

    stream_fields: ClassVar = {}

    def whole(self, answer: dict[str, Any]) -> Answer:
        return self._fold([answer])

    def folded(self, lines: Sequence[bytes]) -> Answer:
        return self._fold([json.loads(line) for line in lines])

    def _fold(self, lines: list[dict[str, Any]]) -> Answer:
        for line in lines:
            if "error" in line:
                raise FailedError(f"an error in the stream: {line['error']}")
        last = lines[-1] if lines else {}
        if not last.get("done"):
            raise FailedError("the stream ended early")
        calls = [call["function"] for line in lines for call in line.get("message", {}).get("tool_calls") or ()]
        choice = {
            "text": "".join(line["message"]["content"] if "message" in line else line["response"] for line in lines),
            "tool_calls": [{"name": call["name"], "arguments": call["arguments"]} for call in calls],
            "finish_reason": last["done_reason"],
            "logprobs": None,
        }
        return make_answer({0: choice}, last["prompt_eval_count"], last["eval_count"])
