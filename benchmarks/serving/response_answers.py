"""Answers of OpenAI's Responses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from serving.answer_forms import Answer, AnswerForm, FailedError, make_answer, sse_events


class ResponsesForm(AnswerForm):
    """One message of text."""

    stream_fields: ClassVar = {}

    def whole(self, answer: dict[str, Any]) -> Answer:
        [output] = answer["output"]
        choice = {"text": output["content"][0]["text"], "tool_calls": [], "finish_reason": answer["status"]}
        usage = answer["usage"]
        return make_answer({0: {**choice, "logprobs": None}}, usage["input_tokens"], usage["output_tokens"])

    def folded(self, lines: Sequence[bytes]) -> Answer:
        events = sse_events(lines)
        if not events or events[-1]["type"] not in ("response.completed", "response.incomplete"):
            raise FailedError("the stream ended without a response")
        answer = self.whole(events[-1]["response"])
        text = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
        if text != answer["choices"][0]["text"]:
            raise FailedError("the deltas are not the whole text")
        return answer
