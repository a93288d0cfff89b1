"""Renders a chat request as a prompt, through the chat template."""

from __future__ import annotations

from typing import Any

from jaxis.prompts import TokenizedPrompt, tokenize_chat
from jaxis.server.http.errors import ParameterError
from jaxis.server.protocol.chat import ChatCompletionRequest, ChatMessage
from jaxis.server.protocol.tokenize import TokenizeRequest
from jaxis.server.protocol.tools import DeferredTool
from jaxis.tokenizer import Tokenizer
from jaxis.tokenizer.chat_messages import messages_for_template, reasoning_effort_variables, reserved_variable
from jaxis.tokenizer.message_order import MessageOrder, arrange_messages

_THINKING_SWITCHES = ("enable_thinking", "thinking")  # most templates' name, and DeepSeek's


def template_arguments(request: ChatCompletionRequest | TokenizeRequest, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Arguments of `Tokenizer.apply_chat_template`.

    Raises:
      ParameterError: chat_template_kwargs sets a reserved name, or the template does not read reasoning_effort.
    """
    kwargs = request.chat_template_kwargs or {}
    if (reserved := reserved_variable(kwargs, tokenizer)) is not None:
        raise ParameterError("chat_template_kwargs", f"chat_template_kwargs must not set {reserved!r}: leave it out")
    generation_prompt = request.add_generation_prompt
    arguments = {
        **kwargs,
        "add_generation_prompt": not request.continue_final_message if generation_prompt is None else generation_prompt,
        "continue_final_message": bool(request.continue_final_message),
    }
    if isinstance(request, ChatCompletionRequest) and request.reasoning_effort is not None:
        arguments |= _reasoning_effort(request.reasoning_effort, tokenizer)
    if not (isinstance(request, ChatCompletionRequest) and request.tool_choice == "none"):
        tools = [tool for tool in request.tools or () if not isinstance(tool, DeferredTool)]
        shown = [tool.model_dump(exclude_unset=True) for tool in tools]
        arguments |= {"tools": shown} if shown else {}
    return arguments


def tokenize_request(
    request: ChatCompletionRequest, tokenizer: Tokenizer | None, arguments: dict[str, Any]
) -> TokenizedPrompt:
    """The request's prompt; `arguments` are `template_arguments`'.

    Raises:
      RequestError: The template refuses the conversation, or a call's arguments are not JSON.
    """
    prompt = tokenize_chat(request_messages(request, tokenizer, arguments), tokenizer, **arguments)
    return TokenizedPrompt(prompt.text, prompt.token_ids, request.cache_salt)


def request_messages(
    request: ChatCompletionRequest | TokenizeRequest, tokenizer: Tokenizer | None, arguments: dict[str, Any]
) -> list[dict[str, Any]]:
    """The conversation as the chat template reads it, in an order that it takes.

    Raises:
      RequestError: A call's arguments are not JSON.
    """
    messages = [_message_fields(message) for message in request.messages or ()]
    if tokenizer is None:
        return messages
    tools = arguments.get("tools")
    order = MessageOrder.of(tokenizer.choose_chat_template(None, tools), tokenizer.special_tokens)
    return arrange_messages(messages_for_template(messages, tokenizer, tools=tools), order)


def _message_fields(message: ChatMessage) -> dict[str, Any]:
    """The content as one string, its parts joined."""
    fields: dict[str, Any] = {"role": message.role, "content": message_text(message)}
    for name in ("name", "tool_call_id"):
        if (value := getattr(message, name)) is not None:
            fields[name] = value
    if (reasoning := message.reasoning_content or message.reasoning) is not None:
        fields["reasoning_content"] = reasoning
    if message.tool_calls:
        fields["tool_calls"] = [call.model_dump(exclude={"index"}, exclude_none=True) for call in message.tool_calls]
        fields["content"] = fields["content"] or None
    return fields


def message_text(message: ChatMessage) -> str:
    """A message's parts as one string, which every template accepts; few accept parts."""
    if isinstance(message.content, list):
        return "\n".join(part.text for part in message.content)
    return message.content or ""


def template_sources(tokenizer: Tokenizer | None) -> str:
    """The sources of the model's chat templates."""
    return "".join(tokenizer.chat_templates.values()) if tokenizer else ""


def thinking_variables(is_on: bool, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Those variables that the model's chat templates read and that turn reasoning on or off."""
    sources = template_sources(tokenizer)
    return {name: is_on for name in _THINKING_SWITCHES if name in sources}


def reads_reasoning_effort(effort: str, tokenizer: Tokenizer | None) -> bool:
    """Whether the model's chat template does something with this reasoning effort."""
    return _effort_variables(effort, tokenizer) is not None


def _reasoning_effort(effort: str, tokenizer: Tokenizer | None) -> dict[str, Any]:
    if (variables := _effort_variables(effort, tokenizer)) is None:
        raise ParameterError(
            "reasoning_effort",
            f"reasoning_effort={effort!r} cannot be honoured: the model's chat template does not read it",
        )
    return variables


def _effort_variables(effort: str, tokenizer: Tokenizer | None) -> dict[str, Any] | None:
    templates = template_sources(tokenizer)
    return reasoning_effort_variables(effort, templates)
