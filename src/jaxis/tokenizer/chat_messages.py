"""The input of chat templates: variables, and messages whose roles and tool calls a template can read."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxis.errors import RequestError
from jaxis.tokenizer.chat_template import render_chat_template
from jaxis.tokenizer.tokenizer import Tokenizer

# Arguments of `Tokenizer.apply_chat_template` and `tokenize_chat`, `tokenize`, an argument in transformers, and `self`,
# which is Jinja's own.
_RESERVED = frozenset(
    {
        *("messages", "tools", "tokenizer", "chat_template", "add_generation_prompt", "continue_final_message"),
        *("tokenize", "self"),
    }
)


def reserved_variable(variables: Iterable[str], tokenizer: Tokenizer | None) -> str | None:
    """The first of a user's template variables that is reserved; None if there is none.

    Reserved are the arguments that a request gives elsewhere, and the tokenizer's special tokens, such as `bos_token`.
    """
    reserved = _RESERVED | set(tokenizer.special_tokens if tokenizer else ())
    return min(reserved & set(variables), default=None)


def reasoning_effort_variables(effort: str, template: str) -> dict[str, Any] | None:
    """Template variables that set this reasoning effort; None if the template does not support it."""
    if "reasoning_effort" in template:
        return {"reasoning_effort": effort}
    if effort == "none" and "enable_thinking" in template:
        return {"enable_thinking": False}
    return None


def messages_for_template(
    messages: Sequence[Mapping[str, Any]],
    tokenizer: Tokenizer,
    *,
    chat_template: str | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> list[dict[str, Any]]:
    """Converts messages in OpenAI's format to what the template expects.

    Args:
      messages: Their content is one string, or None.
      tokenizer: Holds the checkpoint's templates.
      chat_template: Replaces the checkpoint's, as in `Tokenizer.apply_chat_template`.
      tools: See `Tokenizer.apply_chat_template`.

    Raises:
      RequestError: There is no template, or the arguments of a tool call are not a JSON object.
    """
    template = tokenizer.choose_chat_template(chat_template, tools)
    known = tokenizer.chat_templates.values() if chat_template is None else (template,)
    if not any("developer" in source for source in known):  # OpenAI's newer name of the role
        messages = [{**message, "role": _ROLES.get(message["role"], message["role"])} for message in messages]
    return with_template_arguments(messages, template)


_ROLES = {"developer": "system"}


def with_template_arguments(messages: Sequence[Mapping[str, Any]], chat_template: str) -> list[dict[str, Any]]:
    """Messages whose tool-call arguments are in the form that the template reads: an object or a JSON string.

    Args:
      messages: Arguments are an object or a JSON string. Other fields are kept.
      chat_template: The source of the template that will render them.

    Raises:
      RequestError: Arguments are not a JSON object.
    """
    if not any(message.get("tool_calls") for message in messages):
        return [dict(message) for message in messages]
    as_text = _needs_arguments_as_text(chat_template)
    return [
        {
            **message,
            "tool_calls": [
                _with_arguments(call, f"messages[{i}].tool_calls[{j}]", as_text)
                for j, call in enumerate(message["tool_calls"])
            ],
        }
        if message.get("tool_calls")
        else dict(message)
        for i, message in enumerate(messages)
    ]


def _with_arguments(call: Mapping[str, Any], where: str, as_text: bool) -> dict[str, Any]:
    arguments = call["function"]["arguments"]
    try:
        value = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, Mapping):
        raise RequestError(f"{where}.function.arguments must be a JSON object as a string")
    if as_text and not isinstance(arguments, str):
        arguments = json.dumps(value, ensure_ascii=False)
    return {**call, "function": {**call["function"], "arguments": arguments if as_text else value}}


@functools.lru_cache(maxsize=64)
def _needs_arguments_as_text(chat_template: str) -> bool:
    """Whether the template concatenates arguments with strings, as DeepSeek's does, and fails on an object."""

    def renders(arguments: object) -> bool:
        call = {"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": arguments}}
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
        try:
            render_chat_template(chat_template, messages, add_generation_prompt=False)
        except RequestError:
            return False
        return True

    return not renders({"a": 1}) and renders('{"a": 1}')
