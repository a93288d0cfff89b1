from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic_core import from_json

from jaxis.outputs import CompletionOutput, RequestOutput
from jaxis.parsing.parser_events import (
    ContentDelta,
    Event,
    ReasoningDelta,
    ToolCallArgumentsDelta,
    ToolCallEnd,
    ToolCallStart,
)
from jaxis.server.anthropic.message_errors import MessageEvents, message_event
from jaxis.server.anthropic.message_schema import (
    AnswerMessage,
    MessagesRequest,
    MessageUsage,
    OutputTokensDetails,
    StopReason,
)
from jaxis.server.anthropic.message_turns import tool_use_id
from jaxis.server.generation.answer_reader import AnswerReader
from jaxis.server.generation.job import GenerationJob

# Data of an event; its `type` is also the event's name.
MessageEvent = dict[str, Any]


class MessageAnswer(MessageEvents):
    """Writer of the answer of /v1/messages: the events of its stream, and the whole answer that they add up to."""

    def __init__(self, request: MessagesRequest, job: GenerationJob) -> None:
        self._job = job
        # With max_tokens=0 the engine still generates one token, which is left out.
        self._is_empty = request.max_tokens == 0
        self._stop_sequences = request.stop_sequences or ()
        self._reader = AnswerReader(job)
        self._has_begun = False
        self._blocks = MessageBlocks()
        self._last = CompletionOutput(0)

    def whole(self, outputs: Sequence[RequestOutput]) -> AnswerMessage:
        [output] = outputs
        return fold([*self._take(output), *self._end()])

    def add(self, prompt: int, output: RequestOutput) -> str:  # noqa: ARG002 (there is one prompt)
        return "".join(map(message_event, self._take(output)))

    def end(self) -> str:
        return "".join(map(message_event, self._end()))

    def _take(self, output: RequestOutput) -> list[MessageEvent]:
        told: list[MessageEvent] = []
        parts = self._reader.read(output)
        if not self._has_begun:
            self._has_begun = True
            message = AnswerMessage(id=self._job.request_id, model=self._job.model.name, usage=self._usage(0, 0))
            told.append({"type": "message_start", "message": message.model_dump()})
        for self._last, events in parts:
            told += [] if self._is_empty else self._blocks.add(events)
        return told

    def _end(self) -> list[MessageEvent]:
        stop_reason, stop_sequence = self._stop()
        counts = (0, 0) if self._is_empty else (self._reader.counts.num_tokens, self._reader.num_reasoning_tokens)
        ended = {
            "type": "message_delta",
            "delta": {"stop_reason": stop_reason, "stop_sequence": stop_sequence},
            "usage": self._usage(*counts).model_dump(),
        }
        return [*([] if self._is_empty else self._blocks.finish()), ended, {"type": "message_stop"}]

    def _stop(self) -> tuple[StopReason, str | None]:
        """Returns the reason of the answer's end, and the stop sequence that ended it."""
        if self._last.finish_reason == "length" or self._is_empty:
            return "max_tokens", None
        text = self._last.stop_reason
        if isinstance(text, str) and text in self._stop_sequences:
            return "stop_sequence", text
        return ("tool_use" if self._blocks.num_calls and not self._blocks.is_cut else "end_turn"), None

    def _usage(self, num_tokens: int, num_thinking_tokens: int) -> MessageUsage:
        counts = self._reader.counts
        return MessageUsage(
            input_tokens=counts.num_prompt_tokens - counts.num_cached_tokens,
            output_tokens=num_tokens,
            cache_read_input_tokens=counts.num_cached_tokens,
            output_tokens_details=OutputTokensDetails(thinking_tokens=num_thinking_tokens),
        )


@dataclass
class _Call:
    """A call that has not ended yet."""

    id: str
    name: str
    arguments: str = ""


class MessageBlocks:
    """Groups a parser's events into consecutive blocks: 0, 1, 2, ...

    A call is held back until its end: text that only began like a call becomes text, and no client runs a call with a
    part of its arguments. White space next to calls and reasoning is left out.

    Attributes:
      num_calls: Number of calls so far.
      is_cut: True if the text ended inside a call.
    """

    def __init__(self) -> None:
        self.num_calls = 0
        self.is_cut = False
        self._num_blocks = 0
        self._open: Literal["text", "thinking"] | None = None
        self._after_thinking = False
        self._space = ""  # white space that may begin a text block
        self._thinking_digest = hashlib.sha256()
        self._calls: dict[int, _Call] = {}

    def add(self, events: Iterable[Event]) -> list[MessageEvent]:
        told: list[MessageEvent] = []
        for event in events:
            match event:
                case ReasoningDelta(text):
                    told += self._think(text)
                case ContentDelta(text):
                    told += self._write(text)
                case ToolCallStart(index, call_id, name):
                    self._calls[index] = _Call(call_id, name)
                case ToolCallArgumentsDelta(index, text):
                    self._calls[index].arguments += text
                case ToolCallEnd(index, status):
                    call = self._calls.pop(index)
                    self.is_cut |= status == "unfinished"
                    told += [] if status == "malformed" else self._call(call)
        return told

    def finish(self) -> list[MessageEvent]:
        """Ends the open block. An answer without blocks gets a block of text."""
        if self._num_blocks:
            return self._end()
        space = self._space
        told = self._begin("text", {"type": "text", "text": ""})
        return [*told, *([self._delta("text_delta", text=space)] if space else []), *self._end()]

    def _think(self, text: str) -> list[MessageEvent]:
        told: list[MessageEvent] = []
        if self._open != "thinking":
            told = self._begin("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            self._thinking_digest = hashlib.sha256()
        self._thinking_digest.update(text.encode("utf-8", "surrogatepass"))
        return [*told, self._delta("thinking_delta", thinking=text)]

    def _write(self, text: str) -> list[MessageEvent]:
        if self._open == "text":
            return [self._delta("text_delta", text=text)]
        self._space += text
        if not self._space.strip():
            return []
        # Templates put empty lines between reasoning and text.
        text = self._space.lstrip("\r\n") if self._after_thinking else self._space
        return [*self._begin("text", {"type": "text", "text": ""}), self._delta("text_delta", text=text)]

    def _call(self, call: _Call) -> list[MessageEvent]:
        self.num_calls += 1
        block = {"type": "tool_use", "id": tool_use_id(call.id), "name": call.name, "input": {}}
        told = self._begin(None, block)
        if call.arguments:
            told.append(self._delta("input_json_delta", partial_json=call.arguments))
        return [*told, self._stop()]

    def _begin(self, kind: Literal["text", "thinking"] | None, block: dict[str, Any]) -> list[MessageEvent]:
        told = self._end()
        self._open, self._space, self._after_thinking = kind, "", kind == "thinking"
        self._num_blocks += 1
        return [*told, {"type": "content_block_start", "index": self._num_blocks - 1, "content_block": block}]

    def _delta(self, kind: str, **fields: str) -> MessageEvent:
        return {"type": "content_block_delta", "index": self._num_blocks - 1, "delta": {"type": kind, **fields}}

    def _end(self) -> list[MessageEvent]:
        if self._open is None:
            return []
        signed = [self._delta("signature_delta", signature=self._thinking_digest.hexdigest())]
        told = [*(signed if self._open == "thinking" else []), self._stop()]
        self._open = None
        return told

    def _stop(self) -> MessageEvent:
        return {"type": "content_block_stop", "index": self._num_blocks - 1}


def fold(events: Iterable[MessageEvent]) -> AnswerMessage:
    """Adds all events of a message up to the message, as clients do."""
    message: dict[str, Any] = {}
    blocks: list[dict[str, Any]] = []
    inputs: dict[int, str] = {}
    for event in events:
        match event:
            case {"type": "message_start", "message": begun}:
                message = {**begun, "content": blocks}
            case {"type": "content_block_start", "content_block": block}:
                blocks.append(dict(block))
            case {"type": "content_block_delta", "index": index, "delta": {"partial_json": text}}:
                inputs[index] = inputs.get(index, "") + text
            case {"type": "content_block_delta", "index": index, "delta": delta}:
                for name in delta.keys() - {"type"}:
                    blocks[index][name] += delta[name]
            case {"type": "message_delta", "delta": delta, "usage": usage}:
                message |= {**delta, "usage": usage}
    for index, text in inputs.items():
        blocks[index]["input"] = from_json(text, allow_partial=True)
    return AnswerMessage(**message)
