"""Arrangement of a conversation for chat templates that accept roles only in certain places.

Agents send system messages in the middle of a conversation, several user messages in a row, and text of the user
right after the results of tools. Many templates refuse that, and some leave such messages out. To find what a template
accepts, it is rendered once with small conversations. The arrangement of a message depends only on the messages
before it: the tokens of a conversation's beginning stay the same as it grows, and the prefix cache keeps them.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from jaxis.errors import RequestError
from jaxis.tokenizer.chat_messages import with_template_arguments
from jaxis.tokenizer.chat_template import IMAGE_PART, VIDEO_PART, render_chat_template

SYSTEM_ROLES = frozenset({"system", "developer"})
# Ids of nine letters and digits are the only ones that some templates take.
_PROBED_RESULT = {"role": "tool", "tool_call_id": "abcde1234", "name": "look"}
_PROBED_CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "abcde1234", "type": "function", "function": {"name": "look", "arguments": {"at": "it"}}}],
}
_ASKS_FOR_IMAGES = "Show me the image."
_REMINDER = "<system-reminder>"
_REMINDER_END = "</system-reminder>"


@dataclass(frozen=True)
class MessageOrder:
    """Messages that a template takes and writes at their place.

    Attributes:
      system: A system message at the beginning.
      late_system: System messages after others.
      adjacent_users: Two user messages in a row.
      user_after_tool: A user message after the result of a tool.
    """

    system: bool
    late_system: bool
    adjacent_users: bool
    user_after_tool: bool

    @classmethod
    def of(cls, chat_template: str, special_tokens: Mapping[str, str]) -> MessageOrder:
        """Finds the order that a template takes; `special_tokens` are variables such as `bos_token`."""
        return _probe(chat_template, tuple(sorted(special_tokens.items())))


def arrange_messages(messages: Sequence[Mapping[str, Any]], order: MessageOrder) -> list[dict[str, Any]]:
    """Arranges the conversation in an order that the template takes, without losing content.

    The system messages that it begins with become one. If the template does not take a later system message, it becomes
    a user message inside `<system-reminder>` tags. A message that the template does not take after the one before it is
    added to that one. The content of system messages is a string; that of a user's or a tool's may be a list of parts.
    """
    num_head = next((i for i, message in enumerate(messages) if message["role"] not in SYSTEM_ROLES), len(messages))
    arranged: list[dict[str, Any]] = []
    if num_head:
        text = "\n\n".join(message["content"] for message in messages[:num_head] if message["content"])
        arranged.append({**messages[0], "role": messages[0]["role"] if order.system else "user", "content": text})
    for message in messages[num_head:]:
        if message["role"] in SYSTEM_ROLES and not order.late_system:
            message = {"role": "user", "content": _reminder(message["content"])}
        if arranged and not _may_follow(arranged[-1]["role"], message["role"], order):
            arranged[-1]["content"] = _joined(arranged[-1]["content"], message["content"])
        else:
            arranged.append(dict(message))
    return arranged


def move_tool_images(
    messages: Sequence[Mapping[str, Any]], chat_template: str, special_tokens: Mapping[str, str], order: MessageOrder
) -> list[Mapping[str, Any]]:
    """Moves the images of tools' results to places where the template writes images.

    Most templates write only texts in results. The images, parts of type "image" with any other keys, then become a
    user's message after consecutive results. If a template takes no user message after a result, the assistant asks for
    it.
    """
    if not any(message["role"] == "tool" and _images_of(message) for message in messages):
        return [*messages]
    if _writes_tool_images(chat_template, tuple(sorted(special_tokens.items()))):
        return [*messages]
    moved: list[Mapping[str, Any]] = []
    images: list[Any] = []
    for message, after in itertools.zip_longest(messages, messages[1:]):
        if message["role"] != "tool":
            moved.append(message)
            continue
        if found := _images_of(message):
            images += found
            texts = (part["text"] for part in message["content"] if part not in found)
            message = {**message, "content": "\n".join(texts)}
        moved.append(message)
        if images and (after is None or after["role"] != "tool"):
            if not order.user_after_tool:
                moved.append({"role": "assistant", "content": _ASKS_FOR_IMAGES})
            moved.append({"role": "user", "content": images})
            images = []
    return moved


def _images_of(message: Mapping[str, Any]) -> list[Any]:
    content = message.get("content")
    kinds = (IMAGE_PART["type"], VIDEO_PART["type"])
    return [part for part in content if part["type"] in kinds] if isinstance(content, list) else []


@lru_cache(maxsize=64)
def _writes_tool_images(chat_template: str, special_tokens: tuple[tuple[str, str], ...]) -> bool:
    """Returns whether a template writes the same for an image in a tool's result as in a user's message."""

    def text(words: str) -> dict[str, Any]:
        return {"type": "text", "text": words}

    variables: dict[str, Any] = dict(special_tokens)
    messages = [
        {"role": "user", "content": [text("Before one."), IMAGE_PART, text("After one.")]},
        _PROBED_CALL,
        {**_PROBED_RESULT, "content": [text("Before two."), IMAGE_PART, text("After two.")]},
    ]
    try:
        chat = with_template_arguments(messages, chat_template)
        rendered = render_chat_template(chat_template, chat, **variables)
    except RequestError:
        return False
    written = [re.search(rf"Before {each}\.(.*?)After {each}\.", rendered, re.DOTALL) for each in ("one", "two")]
    of_user, of_tool = (found and found[1].strip() for found in written)
    return bool(of_user) and of_tool == of_user


def _joined(first: Any, second: Any) -> Any:
    if isinstance(first, str | None) and isinstance(second, str | None):
        return "\n\n".join(text for text in (first, second) if text)
    parts = ([{"type": "text", "text": each}] if isinstance(each, str) else each for each in (first, second) if each)
    return [part for each in parts for part in each]


def _may_follow(role: str, next_role: str, order: MessageOrder) -> bool:
    if next_role != "user":
        return True
    return (role != "user" or order.adjacent_users) and (role != "tool" or order.user_after_tool)


def _reminder(text: str) -> str:
    is_one = text.strip().startswith(_REMINDER) and text.strip().endswith(_REMINDER_END)
    return text if is_one else f"{_REMINDER}\n{text}\n{_REMINDER_END}"


@lru_cache(maxsize=64)
def _probe(chat_template: str, special_tokens: tuple[tuple[str, str], ...]) -> MessageOrder:
    variables: dict[str, Any] = dict(special_tokens)

    def takes(*messages: dict[str, Any]) -> bool:
        """Returns whether the template writes all of these, in their order."""
        try:
            # Templates differ in whether they read a call's arguments as an object or as text.
            chat = with_template_arguments(messages, chat_template)
            text = render_chat_template(chat_template, chat, **variables)
        except RequestError:
            return False
        end = 0
        for content in (message["content"] for message in messages if message["content"]):
            if (start := text.find(content, end)) < 0:
                return False
            end = start + len(content)
        return True

    system = {"role": "system", "content": "Rule one."}
    user = {"role": "user", "content": "Request one."}
    late = {"role": "system", "content": "Rule two."}
    another = {"role": "user", "content": "Request two."}
    call = _PROBED_CALL
    answer = {"role": "assistant", "content": "Answer one."}
    result = {**_PROBED_RESULT, "content": "Result one."}
    if not takes(user):  # nothing can be learned from it
        return MessageOrder(system=True, late_system=True, adjacent_users=True, user_after_tool=True)
    return MessageOrder(
        system=takes(system, user),
        late_system=takes(system, user, late, another) and takes(system, user, late, answer, another),
        adjacent_users=takes(user, another),
        # A template without tools refuses more than this order; its own words say what.
        user_after_tool=takes(user, call, result, another) or not takes(user, call, result),
    )
