"""Variables and messages in the form that chat templates read."""

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
    """Returns the first of a user's template variables that is reserved; None if there is none.

    Reserved are the arguments that a request gives elsewhere, and the tokenizer's special tokens, such as `bos_token`.
    """
    reserved = _RESERVED | set(tokenizer.special_tokens if tokenizer else ())
    return min(reserved & set(variables), default=None)


def reasoning_effort_variables(effort: str, template: str) -> dict[str, Any] | None:
    """Returns template variables that set this reasoning effort; None if the template does not support it."""
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
    """Converts messages in OpenAI's format, whose content is one string or None, to the format of the template.

    `chat_template` replaces the checkpoint's, as in `Tokenizer.apply_chat_template`; `tools` are JSON schemas of the
    functions that the model may call. Raises RequestError if there is no template.
    """
    template = tokenizer.choose_chat_template(chat_template, tools)
    known = tokenizer.chat_templates.values() if chat_template is None else (template,)
    if not any("developer" in source for source in known):  # OpenAI's newer name of the role
        messages = [{**message, "role": _ROLES.get(message["role"], message["role"])} for message in messages]
    return with_template_arguments(messages, template)


_ROLES = {"developer": "system"}


def with_template_arguments(messages: Sequence[Mapping[str, Any]], chat_template: str) -> list[dict[str, Any]]:
    """Returns messages with tool-call arguments as the template reads them: an object or a JSON string.

    A string that is not a JSON object, such as that of a call that was cut off, stays as it is where the template
    writes strings so, and becomes the one value of an object otherwise. An empty one is an empty object.
    """
    if not any(message.get("tool_calls") for message in messages):
        return [dict(message) for message in messages]
    forms = _argument_forms(chat_template)
    return [
        {**message, "tool_calls": [_with_arguments(call, *forms) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else dict(message)
        for message in messages
    ]


def check_tool_arguments(messages: Sequence[Mapping[str, Any]]) -> None:
    """Raises a RequestError for tool-call arguments that are neither an object nor one as a JSON string."""
    for i, message in enumerate(messages):
        for j, call in enumerate(message.get("tool_calls") or ()):
            if _object(call["function"]["arguments"]) is None:
                raise RequestError(
                    "must be a JSON object as a string", param=f"messages[{i}].tool_calls[{j}].function.arguments"
                )


def _object(arguments: object) -> Mapping[str, Any] | None:
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError):
            return None
    return arguments if isinstance(arguments, Mapping) else None


def _with_arguments(call: Mapping[str, Any], reads_object: bool, writes_text: bool) -> dict[str, Any]:
    given = call["function"]["arguments"]
    value = _object(given)
    if value is None and writes_text:
        return dict(call)
    if value is None:
        given = value = {"arguments": given}
    elif not value:  # also an empty string
        given = value
    text = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
    return {**call, "function": {**call["function"], "arguments": value if reads_object else text}}


@functools.lru_cache(maxsize=64)
def _argument_forms(chat_template: str) -> tuple[bool, bool]:
    """Returns whether the template reads objects as arguments, and whether it writes strings unchanged.

    DeepSeek's concatenates arguments with strings, and fails on an object; others read either, or only objects.
    """

    def rendered(arguments: object) -> str | None:
        call = {"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": arguments}}
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
        try:
            return render_chat_template(chat_template, messages, add_generation_prompt=False)
        except RequestError:
            return None

    cut = '{"a": 1, "'
    reads_object = rendered({"a": 1}) is not None or rendered('{"a": 1}') is None
    return reads_object, cut in (rendered(cut) or "")
