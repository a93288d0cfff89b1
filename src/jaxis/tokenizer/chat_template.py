"""Chat templates: a checkpoint's Jinja program that turns a conversation into the text that the model was trained on.

A template is untrusted code: it sees plain JSON values, and runs in a process with limits (`template_worker`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jaxis.errors import RequestError
from jaxis.tokenizer.template_process import render

IMAGE_PART = {"type": "image"}
"""Part of a content for which a template writes the placeholder of an image."""
VIDEO_PART = {"type": "video"}
"""Part of a content for which a template writes the placeholder of a video."""

# Appended to the message to continue, and located in the rendered text. Templates often strip messages: if the mark's
# space is gone, so is the message's own trailing white space.
_CONTINUE_MARK = "<<<continue-from-here>>> "

# Names of a message's reasoning in requests; the one that most templates read comes first.
_REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")


def render_chat_template(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    /,
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    **variables: Any,
) -> str:
    """Renders a conversation.

    Args:
      template: Jinja source.
      messages: Each has a role, and a content that is a string or a list of parts, {"type": "text", "text": ...} or
        IMAGE_PART or VIDEO_PART; keys whose value is None count as absent, except a content of None next to tool_calls.
      tools: JSON schemas of the functions the model may call.
      add_generation_prompt: True ends with the opening of the assistant's answer.
      continue_final_message: True ends inside the last message, without its closing.
      **variables: Further variables of the template.

    Raises:
      RequestError: Malformed messages, an error that the template raises, in one line, or a template that takes too
        much time or memory.
    """
    if continue_final_message and add_generation_prompt:
        raise RequestError(
            "=True opens no new message: it needs add_generation_prompt=False", param="continue_final_message"
        )
    chat = _check_messages(messages)
    if tools is not None and (isinstance(tools, str) or not all(isinstance(tool, Mapping) for tool in tools)):
        raise RequestError("must be a list of JSON objects, each the schema of a function", param="tools")
    tools = None if tools is None else _plain([*tools], "tools")
    variables = {"documents": None, **_plain(variables, "chat_template_kwargs")}
    last_text = _mark_last_text(chat) if continue_final_message else ""
    given = {"messages": chat, "tools": tools, "add_generation_prompt": add_generation_prompt}
    text = render(template, {**given, **variables})
    return _cut_at_mark(text, last_text) if continue_final_message else text


def _check_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        raise RequestError(f"must be a list of messages, not {type(messages).__name__}", param="messages")
    if not messages:
        raise RequestError("is empty; send at least one message", param="messages")
    chat = []
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        if not isinstance(message, Mapping):
            raise RequestError(
                f'must be an object with "role" and "content", not {type(message).__name__}', param=where
            )
        if not isinstance(message.get("role"), str):
            raise RequestError('needs a "role" that is a string, such as "user"', param=where)
        _check_content(message.get("content"), f"{where}.content")
        plain = _plain({key: value for key, value in message.items() if value is not None}, where)
        if plain.get("tool_calls") and "content" in message:
            plain.setdefault("content", None)  # some templates use it to tell calls from text
        reasoning = next((plain[name] for name in _REASONING_NAMES if name in plain), None)
        if reasoning is not None:
            plain = {"thinking": reasoning, **plain, "reasoning_content": reasoning}
        chat.append(plain)
    return chat


def _check_content(content: object, where: str) -> None:
    if content is None or isinstance(content, str):
        return
    if not isinstance(content, list | tuple):
        raise RequestError(f"must be a string or a list of parts, not {type(content).__name__}", param=where)
    for i, part in enumerate(content):
        if isinstance(part, Mapping) and dict(part) in (IMAGE_PART, VIDEO_PART):
            continue
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise RequestError(
                'must be {"type": "text", "text": "..."}; other parts are not supported', param=f"{where}[{i}]"
            )


def _plain(value: object, where: str) -> Any:
    """Rebuilds a value from plain JSON types, so that a template cannot reach Python objects."""
    if value is None or isinstance(value, bool):
        return value
    for plain in (str, int, float):
        if isinstance(value, plain):
            return value if type(value) is plain else plain(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, f"{where}[{i}]") for i, item in enumerate(value)]
    raise RequestError(f"is a {type(value).__name__}; send JSON values only", param=where)


def _mark_last_text(chat: list[dict[str, Any]]) -> str:
    """Writes the mark after the last message's text, and returns that text."""
    content = chat[-1].get("content")
    if isinstance(content, str):
        chat[-1]["content"] = content + _CONTINUE_MARK
        return content
    if not content:
        raise RequestError(
            "ends in a message without content, which cannot be continued: give it content", param="messages"
        )
    text = content[-1].get("text")
    if text is None:
        raise RequestError("ends in an image or a video, which cannot be continued: end it with text", param="messages")
    content[-1]["text"] = text + _CONTINUE_MARK
    return text


def _cut_at_mark(text: str, last_text: str) -> str:
    end = text.rfind(_CONTINUE_MARK.rstrip())
    if end < 0 or last_text.strip() not in text:
        raise RequestError("the chat template leaves out the last message, which therefore cannot be continued")
    return text[:end] if text.startswith(_CONTINUE_MARK, end) else text[:end].rstrip()
