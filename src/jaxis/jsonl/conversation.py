"""Conversations and their messages, in the format of JSONL files."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from jaxis.errors import RequestError
from jaxis.host.base64_text import decode_base64
from jaxis.tokenizer.chat_template import IMAGE_PART

_TEXT_KEYS = {"type", "content", "text"}
_IMAGE_KEYS = {"type", "content", "image_url", "binary"}
_FILE_SCHEME = "file://"


class Role(StrEnum):
    """The sender of a message."""

    SYSTEM = "system"
    DEVELOPER = "developer"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


class Type(StrEnum):
    """The type of a content item."""

    TEXT = "text"
    IMAGE_PATH = "image_path"
    IMAGE_URL = "image_url"
    IMAGE_BINARY = "image_binary"


@dataclass(frozen=True)
class ContentItem:
    """A part of a message's content.

    Attributes:
      content: Text, path of an image, or URL of an image, which must be a data: URL.
      binary: Content of the image's file; takes precedence over `content`.
    """

    type: Type
    content: str | None = None
    binary: bytes | None = None

    @classmethod
    def from_dict(cls, value: object, where: str) -> ContentItem:
        """Reads one of Oumi's items, such as {"type": "text", "content": ...}, or OpenAI's text and image_url.

        Raises:
          RequestError: The value is something else.
        """
        if not isinstance(value, Mapping) or not isinstance(value.get("type"), str):
            raise RequestError(f'{where} must be {{"type": "text", "content": "..."}}')
        if value["type"] not in set(Type):
            raise RequestError(f"{where} is of type {value['type']!r}; known: {', '.join(Type)}")
        # A text item of Oumi's may be written with an empty binary.
        value = {key: item for key, item in value.items() if key != "binary" or item}
        if value["type"] != Type.TEXT:
            return cls._image(value, where)
        _refuse_unknown(value, _TEXT_KEYS, where)
        texts = [value[key] for key in ("content", "text") if value.get(key) is not None]
        if len(texts) != 1 or not isinstance(texts[0], str):
            raise RequestError(f'{where} needs its text as a string, under "content" or "text"')
        return cls(Type.TEXT, texts[0])

    @classmethod
    def _image(cls, value: Mapping[str, Any], where: str) -> ContentItem:
        _refuse_unknown(value, _IMAGE_KEYS, where)
        kind, content, binary = Type(value["type"]), value.get("content"), value.get("binary")
        if isinstance(binary, str):
            try:
                binary = decode_base64(binary)
            except ValueError:
                raise RequestError(f"{where}.binary is not valid base64") from None
        if content is None and kind is Type.IMAGE_URL and isinstance(value.get("image_url"), Mapping):
            content = value["image_url"].get("url")
        if not isinstance(content, str | None) or not isinstance(binary, bytes | None):
            raise RequestError(f"{where} needs a string as its content, and base64 as its binary")
        if not (binary if kind is Type.IMAGE_BINARY else content):
            raise RequestError(
                f"{where} has no {'binary' if kind is Type.IMAGE_BINARY else 'content'}: {kind} needs it"
            )
        return cls(kind, content, binary)

    @property
    def is_image(self) -> bool:
        return self.type is not Type.TEXT

    def to_dict(self) -> dict[str, Any]:
        fields: dict[str, Any] = {"type": str(self.type)}
        if self.content is not None:
            fields["content"] = self.content
        if self.binary is not None:
            fields["binary"] = base64.b64encode(self.binary).decode("ascii")
        return fields

    def for_template(self) -> dict[str, Any]:
        """Returns the item as a part of a message's content."""
        if not self.is_image:
            return {"type": "text", "text": self.content}
        if self.type is Type.IMAGE_PATH and self.binary is None:
            return {**IMAGE_PART, "image": Path((self.content or "").removeprefix(_FILE_SCHEME))}
        return {**IMAGE_PART, "image": self.content if self.binary is None else self.binary}


@dataclass(frozen=True)
class Message:
    """One turn of a conversation.

    Attributes:
      role: One of `Role`.
      content: Text, or a list of items; None only with tool calls.
      id: Id of the message, passed through.
      name: Name of the speaker or the tool, for templates that show it.
      tool_calls: An assistant's calls, in OpenAI's format.
      tool_call_id: Id of the call that a tool's message answers.
      reasoning_content: The assistant's reasoning before its answer.
    """

    role: str
    content: str | list[ContentItem] | None = None
    id: str | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "role", Role(self.role))
        except ValueError:
            raise RequestError(f"role={self.role!r} must be one of {', '.join(Role)}") from None

    @classmethod
    def from_dict(cls, value: object, where: str = "the message") -> Message:
        """Reads a message.

        Raises:
          RequestError: A key is unknown or missing, or has the wrong type.
        """
        if not isinstance(value, Mapping):
            raise RequestError(f'{where} must be an object with "role" and "content", not {type(value).__name__}')
        _refuse_unknown(value, set(cls.__dataclass_fields__), where)
        fields = {key: item for key, item in value.items() if item is not None}
        if not isinstance(fields.get("role"), str):
            raise RequestError(f'{where} needs a "role": {", ".join(Role)}')
        for key in ("id", "name", "tool_call_id", "reasoning_content"):
            if not isinstance(fields.get(key, ""), str):
                raise RequestError(f"{where}.{key} must be a string, not {type(fields[key]).__name__}")
        calls = fields.get("tool_calls")
        if calls is not None and not (isinstance(calls, list) and all(_is_tool_call(call) for call in calls)):
            raise RequestError(
                f'{where}.tool_calls must be a list of {{"id", "type", "function": {{"name", "arguments"}}}}'
            )
        content = fields.get("content")
        if content is None and not calls:
            raise RequestError(f'{where} needs a "content": a string, or a list of items')
        if isinstance(content, list):
            fields["content"] = [ContentItem.from_dict(item, f"{where}.content[{i}]") for i, item in enumerate(content)]
        elif content is not None and not isinstance(content, str):
            raise RequestError(f"{where}.content must be a string or a list of items, not {type(content).__name__}")
        try:
            return cls(**fields)
        except RequestError as error:
            raise RequestError(f"{where}: {error}") from None

    def to_dict(self) -> dict[str, Any]:
        """Returns the message as JSON, without fields that are None."""
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__ if getattr(self, name) is not None}
        if isinstance(self.content, list):
            fields["content"] = [item.to_dict() for item in self.content]
        return fields | {"role": str(self.role)}

    @property
    def has_images(self) -> bool:
        return isinstance(self.content, list) and any(item.is_image for item in self.content)

    def for_template(self) -> dict[str, Any]:
        """Returns the message for chat templates. Its content is one string, or parts if some of them are images."""
        fields = {"content": None} | {key: value for key, value in self.to_dict().items() if key != "id"}
        if isinstance(self.content, list):
            texts = "\n".join(item.content or "" for item in self.content)
            fields["content"] = [item.for_template() for item in self.content] if self.has_images else texts
        return fields


@dataclass(frozen=True)
class Conversation:
    """Messages with their metadata and tools.

    Attributes:
      messages: Messages in order.
      conversation_id: Id, unique in a batch; None gets an id derived from the row.
      metadata: Data that is passed through; an answer adds `finish_reason` and `usage`, a failure `error`.
      tools: JSON schemas of functions that the model may call.
    """

    messages: list[Message]
    conversation_id: str | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    tools: list[dict[str, Any]] | None = None

    @classmethod
    def from_dict(cls, value: object) -> Conversation:
        """Reads a conversation.

        Raises:
          RequestError: A key is unknown or missing, or has the wrong type.
        """
        if not isinstance(value, Mapping):
            raise RequestError(f'a conversation must be an object with "messages", not {type(value).__name__}')
        _refuse_unknown(value, set(cls.__dataclass_fields__), "the conversation")
        messages, tools, metadata = value.get("messages"), value.get("tools"), value.get("metadata")
        if not isinstance(messages, Sequence) or isinstance(messages, str):
            raise RequestError('the conversation needs "messages": a list of {"role", "content"}')
        if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, Mapping) for tool in tools)):
            raise RequestError("tools must be a list of JSON objects, each the schema of a function")
        if metadata is not None and not isinstance(metadata, Mapping):
            raise RequestError(f"metadata must be an object, not {type(metadata).__name__}")
        conversation_id = value.get("conversation_id")
        if conversation_id is not None and not isinstance(conversation_id, str):
            raise RequestError(f"conversation_id={conversation_id!r} must be a string")
        return cls(
            [Message.from_dict(message, f"messages[{i}]") for i, message in enumerate(messages)],
            conversation_id,
            dict(metadata or {}),
            tools,
        )

    def to_dict(self) -> dict[str, Any]:
        """Returns the conversation as JSON, without empty fields except for the messages."""
        fields: dict[str, Any] = {} if self.conversation_id is None else {"conversation_id": self.conversation_id}
        fields["messages"] = [message.to_dict() for message in self.messages]
        if self.metadata:
            fields["metadata"] = self.metadata
        if self.tools is not None:
            fields["tools"] = self.tools
        return fields

    def extended(self, message: Message | None, **metadata: Any) -> Conversation:
        """Returns the conversation with one more message (unless None) and more metadata."""
        messages = [*self.messages, message] if message is not None else self.messages
        return replace(self, messages=messages, metadata={**self.metadata, **metadata})


def _refuse_unknown(value: Mapping[str, Any], known: set[str], where: str) -> None:
    if unknown := sorted(map(str, set(value) - known)):
        raise RequestError(
            f"{where} has the unknown key {unknown[0]!r}; known: {', '.join(sorted(known))}"
            + ("; put data that is only carried along into metadata" if "metadata" in known else "")
        )


def _is_tool_call(call: object) -> bool:
    function = call.get("function") if isinstance(call, Mapping) else None
    return (
        isinstance(function, Mapping)
        and isinstance(function.get("name"), str)
        and isinstance(function.get("arguments"), str | Mapping)
    )
