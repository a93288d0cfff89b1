"""Chat messages in the form that chat templates take, in an order that the template accepts."""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from jaxis.errors import RequestError
from jaxis.tokenizer.chat_template import IMAGE_PART, VIDEO_PART, render_chat_template
from jaxis.tokenizer.tokenizer import Tokenizer

# The input of chat templates: variables, and messages whose roles and tool calls a template can read.


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
      RequestError: There is no template.
    """
    template = tokenizer.choose_chat_template(chat_template, tools)
    known = tokenizer.chat_templates.values() if chat_template is None else (template,)
    if not any("developer" in source for source in known):  # OpenAI's newer name of the role
        messages = [{**message, "role": _ROLES.get(message["role"], message["role"])} for message in messages]
    return with_template_arguments(messages, template)


_ROLES = {"developer": "system"}


def with_template_arguments(messages: Sequence[Mapping[str, Any]], chat_template: str) -> list[dict[str, Any]]:
    """Messages whose tool-call arguments are in the form that the template reads: an object or a JSON string.

    A string that is not a JSON object, such as that of a call that was cut off, stays as it is where the template
    writes strings so, and becomes the one value of an object otherwise. An empty one is an empty object.

    Args:
      messages: Arguments are an object or a string. Other fields are kept.
      chat_template: The source of the template that will render them.
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
    """Raises a RequestError for tool-call arguments that are not an object, nor one as a JSON string."""
    for i, message in enumerate(messages):
        for j, call in enumerate(message.get("tool_calls") or ()):
            if _object(call["function"]["arguments"]) is None:
                raise RequestError(
                    "must be a JSON object as a string", param=f"messages[{i}].tool_calls[{j}].function.arguments"
                )


def _object(arguments: object) -> Mapping[str, Any] | None:
    """The arguments of a tool call as an object; None if they are none."""
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
    """Whether the template reads arguments that are an object, and whether it writes a string as it is.

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


# Arranges a conversation for chat templates that accept roles only in certain places.
#
# Agents send system messages in the middle of a conversation, several user messages in a row, and text of the user
# right after the results of tools. Many templates refuse that, and some leave such messages out. What a template
# accepts is found out by rendering small conversations with it, once. The arrangement of a message depends only on
# those before it, so that the tokens of a conversation's beginning stay the same as it grows, and the prefix cache
# keeps them.


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
    """Which messages a template takes and writes at their place.

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
        """What this template takes.

        Args:
          chat_template: Its source.
          special_tokens: The variables that hold the tokenizer's special tokens, such as `bos_token`.
        """
        return _probe(chat_template, tuple(sorted(special_tokens.items())))


def arrange_messages(messages: Sequence[Mapping[str, Any]], order: MessageOrder) -> list[dict[str, Any]]:
    """The conversation in an order that the template takes; nothing of it is left out.

    The system messages that it begins with become one. Where the template does not take a later one, it becomes a user
    message inside `<system-reminder>` tags. A message that the template does not take after the one before it is added
    to that one.

    Args:
      messages: The content of system messages is a string; that of a user's or a tool's may be a list of parts.
      order: What the template takes.
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
    """The conversation with the images of tools' results where the template writes images.

    Most templates write only texts there. The images then become a user's message after the results that are together;
    where a template takes none after a result, the assistant asks for it.

    Args:
      messages: Parts of contents may be images, of type "image" whatever else they have.
      chat_template: The template's source.
      special_tokens: The variables that hold the tokenizer's special tokens.
      order: What the template takes.
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
    """Whether a template writes for an image in a tool's result what it writes for one in a user's message."""

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
    """The contents of two messages as that of one."""
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
        """Whether the template writes all of these, in their order."""
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
