"""Conversion of an answer's text to a message with tool calls and reasoning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jaxis.jsonl.conversation import Message, Role
from jaxis.outputs import RequestOutput
from jaxis.parsing.call_ids import call_fields
from jaxis.parsing.model_parsers import ModelParsers
from jaxis.parsing.output_parser import OutputParser, parse_output
from jaxis.parsing.tool_parsers.tools import function_tools


def parse_answer(
    parsers: ModelParsers, output: RequestOutput, tools: Sequence[Mapping[str, Any]] | None, row_id: str
) -> tuple[Message, str | None]:
    """Returns the message of an output with one completion, and its finish reason.

    Without `tools` that were offered, calls stay in the text. Calls get ids from `row_id` that are the same in every
    run.
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
