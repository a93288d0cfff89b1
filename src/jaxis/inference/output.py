"""Conversations with answers: what the answer's text holds, and the lines that are written."""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, overload

from jaxis.inference.conversation import Conversation, Message, Role
from jaxis.outputs import RequestOutput
from jaxis.parsing.model_parsers import ModelParsers
from jaxis.parsing.output_parser import OutputParser, parse_output
from jaxis.parsing.parser_events import ToolCall, derived_call_id, is_generated
from jaxis.parsing.tool_parsers.tools import function_tools

# A finished output file as a sequence of conversations.


class ConversationFile(Sequence[Conversation]):
    """The conversations of a JSONL file, each read when it is asked for.

    Attributes:
      path: The file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offsets = array("q")
        offset = 0
        with path.open("rb") as file:
            for line in file:
                self._offsets.append(offset)
                offset += len(line)

    def __len__(self) -> int:
        return len(self._offsets)

    @overload
    def __getitem__(self, index: int) -> Conversation: ...
    @overload
    def __getitem__(self, index: slice) -> list[Conversation]: ...
    def __getitem__(self, index: int | slice) -> Conversation | list[Conversation]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        with self.path.open("rb") as file:
            file.seek(self._offsets[index])
            return Conversation.from_dict(json.loads(file.readline()))


# Parses an answer's text into a message with its tool calls and reasoning.


def parse_answer(
    parsers: ModelParsers, output: RequestOutput, tools: Sequence[Mapping[str, Any]] | None, row_id: str
) -> tuple[Message, str | None]:
    """The message of an output with one completion, and its finish reason.

    Args:
      parsers: The model's.
      output: The whole output.
      tools: The functions that were offered; without any, calls stay in the text.
      row_id: The row's id, from which calls get ids that are the same in every run.
    """
    [completion] = output.outputs
    parser = OutputParser(
        parsers.tool if tools else None,
        parsers.reasoning,
        tools=function_tools(tools or ()),
        prompt=output.prompt or "",
    )
    parsed = parse_output(parser, completion.text)
    calls = [call_fields(call, f"{row_id}:{number}") for number, call in enumerate(parsed.tool_calls)]
    message = Message(
        Role.ASSISTANT,
        parsed.content or (None if calls else ""),
        tool_calls=calls or None,
        reasoning_content=parsed.reasoning or None,
    )
    return message, "tool_calls" if calls and completion.finish_reason == "stop" else completion.finish_reason


def call_fields(call: ToolCall, seed: str) -> dict[str, Any]:
    """A call in OpenAI's format; an id that the model did not write is the same each time for the same seed."""
    return {
        "id": derived_call_id(seed) if is_generated(call.id) else call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }
