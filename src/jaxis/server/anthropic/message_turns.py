"""The turns of a /v1/messages request as the messages of a conversation.

The model sees a function of the turns' contents, not of their form: a string equals a list of one block, and marks for
caches change nothing. Each request of a conversation therefore repeats the tokens of the one before, which are in the
prefix cache.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxis.errors import RequestError
from jaxis.parsing.call_ids import GENERATED_PREFIX, is_generated
from jaxis.server.anthropic.message_blocks import (
    Base64Source,
    ImageBlock,
    InlineTool,
    RedactedThinkingBlock,
    TextBlock,
    ThinkingBlock,
    ToolAdditionBlock,
    ToolDefinition,
    ToolReference,
    ToolReferenceBlock,
    ToolRemovalBlock,
    ToolResultBlock,
    ToolUseBlock,
    UrlSource,
    joined,
    text_of,
)
from jaxis.server.anthropic.message_schema import MessageParam
from jaxis.server.generation.images import base64_part, image_part
from jaxis.server.generation.served_model import ServedModel

# Claude Code's header at the head of the prompt, which differs between conversations.
_BILLING_LINE = re.compile(r"\Ax-anthropic-billing-header:[^\n]*\n?")
# Claude Code's note on the remaining tokens, which differs between requests.
_TOKENS_LEFT = re.compile(r"\s*<total_tokens>\d+ tokens left</total_tokens>\s*\Z")
_ID_PREFIX = "toolu_"
_OWN_ID = re.compile(r"toolu_[0-9a-f]{8}_([A-Za-z0-9_-]+)")


def system_text(system: str | Sequence[TextBlock] | None) -> str:
    """Returns the text before the turns, without lines that change with each conversation or request."""
    blocks = [system] if isinstance(system, str) else [block.text for block in system or ()]
    return joined(_TOKENS_LEFT.sub("", _BILLING_LINE.sub("", block)) for block in blocks)


def template_tool(tool: ToolDefinition) -> dict[str, Any]:
    given = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    return {"type": "function", "function": {name: value for name, value in given.items() if value is not None}}


def template_messages(
    turns: Sequence[MessageParam], tools: Mapping[str, ToolDefinition], model: ServedModel
) -> list[dict[str, Any]]:
    """Returns the turns as messages of a `ChatPrompt`.

    Consecutive turns of an assistant are joined. Tool results come before the rest of the user's turn. `tools` has all
    tools defined anywhere in the request, by name. Raises RequestError if a result has no call, a call comes last, or
    an image cannot be taken.
    """
    messages: list[dict[str, Any]] = []
    names_of_calls: dict[str, str] = {}
    said: list[Any] = []  # the assistant's blocks since the last turn of another role
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
            messages += _user_turn(turn.blocks, tools, names_of_calls, model, f"messages[{i}]")
        elif turn.clear_at != "next_user_message" or i > last_user:
            messages.append({"role": "system", "content": _system_turn(turn.blocks, tools)})
    if any(isinstance(block, ToolUseBlock) for block in said):
        raise RequestError("ends with a tool_use block: send its tool_result after it", param="messages")
    return [*messages, _assistant_turn(said)] if said else messages


def tool_use_id(call_id: str) -> str:
    """Returns a unique call id in Anthropic's form, from which `own_call_id` recovers an id that the model made."""
    if is_generated(call_id):
        return _ID_PREFIX + call_id.removeprefix(GENERATED_PREFIX)
    encoded = base64.urlsafe_b64encode(call_id.encode("utf-8")).decode("ascii").rstrip("=")
    return f"{_ID_PREFIX}{secrets.token_hex(4)}_{encoded}"


def own_call_id(tool_use_id: str) -> str:
    match = _OWN_ID.fullmatch(tool_use_id)
    if match is None:
        call_id = GENERATED_PREFIX + tool_use_id.removeprefix(_ID_PREFIX)
        return call_id if is_generated(call_id) else tool_use_id
    try:
        return base64.urlsafe_b64decode(match[1] + "=" * (-len(match[1]) % 4)).decode("utf-8")
    except (binascii.Error, UnicodeDecodeError):
        return tool_use_id


def _assistant_turn(blocks: Iterable[Any]) -> dict[str, Any]:
    texts, thoughts, calls = [], [], []
    for block in blocks:
        match block:
            case TextBlock(text=text):
                texts.append(text)
            case ThinkingBlock(thinking=thinking):
                thoughts.append(thinking)
            case ToolUseBlock(id=call_id, name=name, input=arguments):
                function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
                calls.append({"id": own_call_id(call_id), "type": "function", "function": function})
            case RedactedThinkingBlock():
                pass
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts) or (None if calls else "")}
    if reasoning := joined(thoughts):
        message["reasoning_content"] = reasoning
    return message | ({"tool_calls": calls} if calls else {})


def _user_turn(
    blocks: Sequence[Any],
    tools: Mapping[str, ToolDefinition],
    names_of_calls: Mapping[str, str],
    model: ServedModel,
    place: str,
) -> list[dict[str, Any]]:
    messages = []
    for j, block in enumerate(blocks):
        if isinstance(block, ToolResultBlock):
            if block.tool_use_id not in names_of_calls:
                raise RequestError(
                    f"is {block.tool_use_id[:80]!r}, and no tool_use block before it has that id: send the assistant's "
                    "turn with the call before its result",
                    param=f"{place}.content[{j}].tool_use_id",
                )
            messages.append(
                {
                    "role": "tool",
                    "content": _result(block, tools, model, f"{place}.content[{j}]"),
                    "name": names_of_calls[block.tool_use_id],
                    "tool_call_id": own_call_id(block.tool_use_id),
                }
            )
    rest = [
        _seen(block, tools, model, f"{place}.content[{j}]")
        for j, block in enumerate(blocks)
        if not isinstance(block, ToolResultBlock)
    ]
    if rest or not messages:
        messages.append({"role": "user", "content": _content(rest)})
    return messages


def _result(
    block: ToolResultBlock, tools: Mapping[str, ToolDefinition], model: ServedModel, place: str
) -> str | list[dict[str, Any]]:
    content = block.content or ""
    if isinstance(content, list):
        content = _content([_seen(part, tools, model, f"{place}.content[{k}]") for k, part in enumerate(content)])
    return content or ("Error" if block.is_error else "")


def _seen(block: Any, tools: Mapping[str, ToolDefinition], model: ServedModel, place: str) -> str | dict[str, Any]:
    """Returns a block as text, or as an image part of a `ChatPrompt`'s content."""
    match block:
        case ToolReferenceBlock(tool_name=name):
            return _shown(name, tools)
        case ImageBlock(source=Base64Source(data=data)):
            return base64_part(data, model, f"{place}.source.data")
        case ImageBlock(source=UrlSource(url=url)):
            return image_part(url, model, f"{place}.source.url")
    return text_of(block)


def _content(seen: Sequence[str | dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Returns a content of a `ChatPrompt`: one string, or parts if it has images."""
    parts: list[dict[str, Any]] = []
    texts: list[str] = []
    for each in (*seen, None):
        if isinstance(each, str):
            texts.append(each)
            continue
        if each is None and not parts:
            return joined(texts)
        if text := joined(texts):
            parts.append({"type": "text", "text": text})
        parts += [] if each is None else [each]
        texts = []
    return parts


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
    """Returns the text that a reference to a tool shows the model."""
    tool = tools.get(name)
    return name if tool is None or not tool.is_function else _definition(tool)


def _definition(tool: ToolDefinition) -> str:
    return json.dumps(template_tool(tool), ensure_ascii=False)
