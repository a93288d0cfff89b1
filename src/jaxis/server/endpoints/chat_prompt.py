"""From a chat request to what its chat template takes."""

from __future__ import annotations

from typing import Any

from jaxis.parsing.tool_choice import template_messages
from jaxis.prompts import TokenizedPrompt, tokenize_chat
from jaxis.server.http.errors import ParameterError
from jaxis.server.protocol.chat import ChatCompletionRequest, ChatMessage
from jaxis.server.protocol.tokenize import TokenizeRequest
from jaxis.tokenizer import Tokenizer

# What the request says elsewhere, or must not say: a template is code.
_RESERVED_TEMPLATE_KWARGS = frozenset(
    {"messages", "tools", "tokenizer", "chat_template", "add_generation_prompt", "continue_final_message", "tokenize"}
)


def template_arguments(request: ChatCompletionRequest | TokenizeRequest, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Arguments of `Tokenizer.apply_chat_template`.

    Raises:
      ParameterError: chat_template_kwargs holds a name that is not the template's, or it does not read
        reasoning_effort.
    """
    kwargs = request.chat_template_kwargs or {}
    reserved = _RESERVED_TEMPLATE_KWARGS | set(tokenizer.special_tokens if tokenizer else ())
    if refused := sorted(reserved & set(kwargs)):
        raise ParameterError("chat_template_kwargs", f"chat_template_kwargs must not set {refused[0]!r}: leave it out")
    generation_prompt = request.add_generation_prompt
    arguments = {
        **kwargs,
        "add_generation_prompt": not request.continue_final_message if generation_prompt is None else generation_prompt,
        "continue_final_message": request.continue_final_message,
    }
    if isinstance(request, ChatCompletionRequest) and request.reasoning_effort is not None:
        arguments |= _reasoning_effort(request.reasoning_effort, tokenizer)
    if request.tools and not (isinstance(request, ChatCompletionRequest) and request.tool_choice == "none"):
        arguments["tools"] = [tool.model_dump(exclude_unset=True) for tool in request.tools]
    return arguments


def tokenize_request(
    request: ChatCompletionRequest, tokenizer: Tokenizer | None, arguments: dict[str, Any]
) -> TokenizedPrompt:
    """The request's prompt; `arguments` are `template_arguments`'.

    Raises:
      RequestError: The template refuses the conversation, or a call's arguments are not JSON.
    """
    prompt = tokenize_chat(messages_for_template(request, tokenizer, arguments), tokenizer, **arguments)
    return TokenizedPrompt(prompt.text, prompt.token_ids, request.cache_salt)


def messages_for_template(
    request: ChatCompletionRequest | TokenizeRequest, tokenizer: Tokenizer | None, arguments: dict[str, Any]
) -> list[dict[str, Any]]:
    """The conversation for the template: only what was sent, parts as one text, and roles that the template knows.

    Raises:
      RequestError: A call's arguments are not JSON.
    """
    messages = [_message_for_template(message, tokenizer) for message in request.messages or ()]
    if tokenizer is None:
        return messages
    return template_messages(messages, tokenizer.choose_chat_template(None, arguments.get("tools")))


def _message_for_template(message: ChatMessage, tokenizer: Tokenizer | None) -> dict[str, Any]:
    fields: dict[str, Any] = {"role": message.role, "content": message_text(message)}
    for name in ("name", "tool_call_id"):
        if (value := getattr(message, name)) is not None:
            fields[name] = value
    if (reasoning := message.reasoning_content or message.reasoning) is not None:
        fields["reasoning_content"] = reasoning
    if message.tool_calls:
        fields["tool_calls"] = [call.model_dump(exclude={"index"}, exclude_none=True) for call in message.tool_calls]
        fields["content"] = fields["content"] or None
    templates = tokenizer.chat_templates.values() if tokenizer else ()
    if message.role == "developer" and not any("developer" in template for template in templates):
        fields["role"] = "system"  # what OpenAI's newer name stands for
    return fields


def message_text(message: ChatMessage) -> str:
    """A message's parts as one text, which every template takes; few take parts."""
    if isinstance(message.content, list):
        return "\n".join(part.text for part in message.content)
    return message.content or ""


def _reasoning_effort(effort: str, tokenizer: Tokenizer | None) -> dict[str, Any]:
    templates = "".join(tokenizer.chat_templates.values()) if tokenizer else ""
    if "reasoning_effort" in templates:
        return {"reasoning_effort": effort}
    if effort == "none" and "enable_thinking" in templates:
        return {"enable_thinking": False}
    raise ParameterError(
        "reasoning_effort",
        f"reasoning_effort={effort!r} cannot be honoured: the model's chat template does not read it",
    )
