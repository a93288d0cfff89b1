"""The turns of a /v1/messages request as messages of a chat request.

What the model gets to see is a function of what the turns say, not of their shape: a string and a list of one block
are the same, and marks for caches change nothing. So each request of a conversation repeats the tokens of the one
before, which the prefix cache then holds.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxis.parsing.call_ids import GENERATED_PREFIX, is_generated
from jaxis.server.endpoints.block_text import joined, text_of
from jaxis.server.http.errors import ParameterError
from jaxis.server.protocol.chat import ChatMessage
from jaxis.server.protocol.message_blocks import (
    InlineTool,
    RedactedThinkingBlock,
    TextBlock,
    ThinkingBlock,
    ToolAdditionBlock,
    ToolReference,
    ToolReferenceBlock,
    ToolRemovalBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from jaxis.server.protocol.message_tools import ToolDefinition
from jaxis.server.protocol.messages import MessageParam
from jaxis.server.protocol.tools import ChatToolCall, FunctionCall, FunctionDefinition, Tool

# Claude Code's, at the very head of the prompt: it differs from one conversation to the next.
_BILLING_LINE = re.compile(r"\Ax-anthropic-billing-header:[^\n]*\n?")
# Changes with every request.
_TOKENS_LEFT = re.compile(r"\s*<total_tokens>\d+ tokens left</total_tokens>\s*\Z")
_ID_PREFIX = "toolu_"
_OWN_ID = re.compile(r"toolu_[0-9a-f]{8}_([A-Za-z0-9_-]+)")


def system_text(system: str | Sequence[TextBlock] | None) -> str:
    """What comes before the turns, without the lines that change with each conversation or request."""
    blocks = [system] if isinstance(system, str) else [block.text for block in system or ()]
    return joined(_TOKENS_LEFT.sub("", _BILLING_LINE.sub("", block)) for block in blocks)


def function_of(tool: ToolDefinition) -> FunctionDefinition:
    """A tool's definition as a chat template gets to see it."""
    given = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    return FunctionDefinition(**{name: value for name, value in given.items() if value is not None})


def chat_messages(turns: Sequence[MessageParam], tools: Mapping[str, ToolDefinition]) -> list[ChatMessage]:
    """The turns as messages of a chat request.

    Consecutive turns of an assistant are one. The results of tools come before what else the user says in that turn.

    Args:
      turns: The request's.
      tools: All that are defined anywhere in the request, by name.

    Raises:
      ParameterError: A result has no call, or a call comes last.
    """
    messages: list[ChatMessage] = []
    names_of_calls: dict[str, str] = {}
    said: list[Any] = []  # blocks of the assistant, until somebody else speaks
    last_user = max((i for i, turn in enumerate(turns) if turn.role == "user"), default=-1)
    for i, turn in enumerate(turns):
        if turn.role == "assistant":
            said += turn.blocks
            names_of_calls |= {block.id: block.name for block in turn.blocks if isinstance(block, ToolUseBlock)}
            continue
        if said:
            messages.append(_assistant_turn(said))
            said = []
        if turn.role == "user":
            messages += _user_turn(turn.blocks, tools, names_of_calls, f"messages[{i}]")
        elif turn.clear_at != "next_user_message" or i > last_user:
            messages.append(ChatMessage(role="system", content=_system_turn(turn.blocks, tools)))
    if any(isinstance(block, ToolUseBlock) for block in said):
        raise ParameterError("messages", "messages ends with a tool_use block: send its tool_result after it")
    return [*messages, _assistant_turn(said)] if said else messages


def tool_use_id(call_id: str) -> str:
    """A call's id in Anthropic's form, unique, from which `own_call_id` gets back the id of a model's own making."""
    if is_generated(call_id):
        return _ID_PREFIX + call_id.removeprefix(GENERATED_PREFIX)
    encoded = base64.urlsafe_b64encode(call_id.encode("utf-8")).decode("ascii").rstrip("=")
    return f"{_ID_PREFIX}{secrets.token_hex(4)}_{encoded}"


def own_call_id(tool_use_id: str) -> str:
    """The id of a call as the chat template gets to see it."""
    match = _OWN_ID.fullmatch(tool_use_id)
    if match is None:
        call_id = GENERATED_PREFIX + tool_use_id.removeprefix(_ID_PREFIX)
        return call_id if is_generated(call_id) else tool_use_id
    try:
        return base64.urlsafe_b64decode(match[1] + "=" * (-len(match[1]) % 4)).decode("utf-8")
    except (binascii.Error, UnicodeDecodeError):
        return tool_use_id


def _assistant_turn(blocks: Iterable[Any]) -> ChatMessage:
    texts, thoughts, calls = [], [], []
    for block in blocks:
        match block:
            case TextBlock(text=text):
                texts.append(text)
            case ThinkingBlock(thinking=thinking):
                thoughts.append(thinking)
            case ToolUseBlock(id=call_id, name=name, input=arguments):
                function = FunctionCall(name=name, arguments=json.dumps(arguments, ensure_ascii=False))
                calls.append(ChatToolCall(id=own_call_id(call_id), function=function))
            case RedactedThinkingBlock():
                pass
    return ChatMessage(
        role="assistant",
        content="".join(texts),
        reasoning_content=joined(thoughts) or None,
        tool_calls=calls or None,
    )


def _user_turn(
    blocks: Sequence[Any], tools: Mapping[str, ToolDefinition], names_of_calls: Mapping[str, str], where: str
) -> list[ChatMessage]:
    messages = []
    for j, block in enumerate(blocks):
        if isinstance(block, ToolResultBlock):
            if block.tool_use_id not in names_of_calls:
                raise ParameterError(
                    "messages",
                    f"{where}.content[{j}].tool_use_id is {block.tool_use_id[:80]!r}, and no tool_use block before it "
                    "has that id: send the assistant's turn with the call before its result",
                )
            call_id, name = own_call_id(block.tool_use_id), names_of_calls[block.tool_use_id]
            messages.append(ChatMessage(role="tool", content=_result(block, tools), tool_call_id=call_id, name=name))
    rest = [block for block in blocks if not isinstance(block, ToolResultBlock)]
    if rest or not messages:
        messages.append(ChatMessage(role="user", content=joined(text_of(block) for block in rest)))
    return messages


def _result(block: ToolResultBlock, tools: Mapping[str, ToolDefinition]) -> str:
    if isinstance(block.content, list):
        text = joined(
            _shown(part.tool_name, tools) if isinstance(part, ToolReferenceBlock) else text_of(part)
            for part in block.content
        )
    else:
        text = block.content or ""
    return text or ("Error" if block.is_error else "")


def _system_turn(blocks: Iterable[Any], tools: Mapping[str, ToolDefinition]) -> str:
    texts = []
    for block in blocks:
        match block:
            case TextBlock(text=text):
                texts.append(text)
            case ToolAdditionBlock(tool=InlineTool(definition=tool)):
                texts.append(f"A tool is available from now on: {_definition(tool)}")
            case ToolAdditionBlock(tool=ToolReference(name=name)):
                texts.append(f"A tool is available from now on: {_shown(name, tools)}")
            case ToolRemovalBlock(tool=ToolReference(name=name)):
                texts.append(f"The tool {name} is not available any more.")
    return joined(texts)


def _shown(name: str, tools: Mapping[str, ToolDefinition]) -> str:
    """What a reference to a tool shows the model."""
    tool = tools.get(name)
    return name if tool is None or not tool.is_function else _definition(tool)


def _definition(tool: ToolDefinition) -> str:
    shown = Tool(type="function", function=function_of(tool)).model_dump(exclude_unset=True)
    return json.dumps(shown, ensure_ascii=False)
