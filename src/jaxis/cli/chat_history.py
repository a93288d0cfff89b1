"""The messages of a chat, and the file that keeps them."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxis.errors import RequestError

if TYPE_CHECKING:
    pass


Message = dict[str, Any]
_ROLES = ("system", "user", "assistant")


@dataclass
class ChatHistory:
    """The messages of a chat: the system message, or None, and the turns of user and assistant."""

    system: str | None = None
    turns: list[Message] = field(default_factory=list)

    @property
    def messages(self) -> list[Message]:
        first = [] if self.system is None else [{"role": "system", "content": self.system}]
        return first + self.turns

    def add(self, role: str, content: str | list[dict[str, Any]]) -> None:
        self.turns.append({"role": role, "content": content})

    def take_back(self) -> str | list[dict[str, Any]] | None:
        """Removes the last user message and what followed it; returns its content, or None if there is none."""
        for i in reversed(range(len(self.turns))):
            if self.turns[i]["role"] == "user":
                content = self.turns[i]["content"]
                del self.turns[i:]
                return content
        return None

    def save(self, path: Path) -> None:
        """Writes the messages as JSON. Raises RequestError if the file cannot be written, or exists and holds something
        else.
        """
        if path.exists():
            try:
                ChatHistory.load(path)
            except RequestError:
                raise RequestError(f"{path} exists and holds no conversation: choose another name") from None
        try:
            path.write_text(json.dumps({"messages": self.messages}, ensure_ascii=False, indent=2) + "\n", "utf-8")
        except OSError as error:
            raise RequestError(f"{path} cannot be written: {error.strerror}") from None

    @classmethod
    def load(cls, path: Path) -> ChatHistory:
        """Reads a file that `save` wrote. Raises RequestError if it cannot be read, or holds something else."""
        try:
            content = json.loads(path.read_text("utf-8"))
        except OSError as error:
            raise RequestError(f"{path} cannot be read: {error.strerror}") from None
        except ValueError:
            raise RequestError(f"{path} is not JSON: give a file that /save wrote") from None
        messages = content.get("messages") if isinstance(content, dict) else None
        if not isinstance(messages, list) or not all(_is_message(message) for message in messages):
            raise RequestError(f"{path} holds no conversation: give a file that /save wrote")
        system = messages[0]["content"] if messages and messages[0]["role"] == "system" else None
        turns = messages if system is None else messages[1:]
        if any(message["role"] == "system" for message in turns):
            raise RequestError(f"{path} has a system message that is not the first: a chat has one, at its start")
        return cls(system, turns)


def _is_message(message: object) -> bool:
    return (
        isinstance(message, dict)
        and set(message) == {"role", "content"}
        and message["role"] in _ROLES
        and (isinstance(message["content"], str) or (message["role"] == "user" and _has_parts(message["content"])))
    )


def _has_parts(content: object) -> bool:
    return isinstance(content, list) and all(
        isinstance(part, dict)
        and set(part) in ({"type", "text"}, {"type", "image"})
        and all(isinstance(value, str) for value in part.values())
        for part in content
    )


def content_text(content: str | list[dict[str, Any]]) -> str:
    """Shows a message's content as the user sees it: images by their paths."""
    if isinstance(content, str):
        return content
    return " ".join(part["text"] if part["type"] == "text" else f"[{part['image']}]" for part in content)
