"""A chat with a model: asks, streams the answer, and keeps the conversation consistent if it is interrupted."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxis.cli.console import AnswerStats, note, write_answer
from jaxis.cli.options import with_drawn_seed
from jaxis.errors import RequestError
from jaxis.prompts import TokenizedPrompt
from jaxis.tokenizer.chat_template import IMAGE_PART
from jaxis.vision.decode import open_image
from jaxis.vision.prompt_images import take_images

if TYPE_CHECKING:
    from jaxis.llm import LLM
    from jaxis.sampling_params import SamplingParams


# A conversation: its messages, undoing a turn, and keeping it in a file.


Message = dict[str, Any]
_ROLES = ("system", "user", "assistant")


@dataclass
class ChatHistory:
    """The messages of a chat in order.

    Attributes:
      system: The system message, or None.
      turns: User and assistant messages.
    """

    system: str | None = None
    turns: list[Message] = field(default_factory=list)

    @property
    def messages(self) -> list[Message]:
        """The messages as a chat template takes them."""
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
        """Writes the messages as JSON.

        Raises:
          RequestError: If the file cannot be written, or is there and holds something else.
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
        """Reads what `save` wrote.

        Raises:
          RequestError: If the file cannot be read, or holds something else.
        """
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
    """A content of a message as the user sees it: images by their paths."""
    if isinstance(content, str):
        return content
    return " ".join(part["text"] if part["type"] == "text" else f"[{part['image']}]" for part in content)


class ChatSession:
    """State of a chat between turns.

    Attributes:
      conversation: The messages so far.
      params: How answers are sampled.
      show_stats: Whether token counts and speed follow each answer, on stderr.
      images: Paths of images that the next question begins with.

    Args:
      llm: A model with a chat template.
      params: How answers are sampled.
      system: System message, or None.
      template_kwargs: More variables for the chat template.
    """

    def __init__(
        self,
        llm: LLM,
        params: SamplingParams,
        *,
        system: str | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        show_stats: bool = False,
    ) -> None:
        self.conversation = ChatHistory(system)
        self.params = params
        self.show_stats = show_stats
        self.images: list[Path] = []
        self._llm = llm
        self._template_kwargs = dict(template_kwargs or {})

    def add_image(self, path: Path) -> None:
        """Has the next question begin with an image.

        Raises:
          RequestError: The model takes no images, or the file is none.
        """
        self._llm.images.check_takes("image", "/image")
        open_image(path, str(path))
        self.images.append(path)

    def ask(self, question: str | list[dict[str, Any]]) -> None:
        """Asks, and prints the answer on stdout as it is generated.

        What was answered before a Ctrl-C stays in the conversation; a question without any answer does not.

        Args:
          question: A string, or the content of a message that was taken back.

        Raises:
          RequestError: If the conversation does not fit the context, the chat template refuses it, or an image cannot
            be read.
          KeyboardInterrupt: On Ctrl-C, once the request is aborted and the conversation is in order.
        """
        if isinstance(question, str) and self.images:
            parts_of_images = [{**IMAGE_PART, "image": str(path.absolute())} for path in self.images]
            question = [*parts_of_images, {"type": "text", "text": question}]
        self.images = []
        self.conversation.add("user", question)
        parts: list[str] = []
        try:
            self._answer(parts)
        except KeyboardInterrupt:
            write_answer("\n")
            raise
        finally:
            if answer := "".join(parts):
                self.conversation.add("assistant", answer)
            else:
                self.conversation.take_back()

    def _answer(self, parts: list[str]) -> None:
        assert self._llm.tokenizer is not None, "a model with a chat template"
        messages, images = take_images(self.conversation.messages)
        token_ids = self._llm.tokenizer.encode_chat(messages, **self._template_kwargs)
        prompt = self._llm.images.put(TokenizedPrompt(None, token_ids), images)
        token_ids, context = prompt.token_ids, self._llm.max_model_len
        if len(token_ids) >= context:
            raise RequestError(
                f"the conversation has {len(token_ids)} tokens and does not fit the context of {context}: "
                "/undo takes back the last turn, /clear starts over"
            )
        params = with_drawn_seed(self.params)
        stats, finish_reason = AnswerStats(params.seed), None
        stats.num_prompt_tokens = len(token_ids)
        with closing(self._llm.stream(prompt, params)) as stream:
            for delta in stream:
                parts.append(delta.text)
                stats.add(len(delta.token_ids))
                finish_reason = delta.finish_reason
                write_answer(delta.text)
        write_answer("\n")
        if finish_reason == "length":
            full = len(token_ids) + stats.num_tokens >= context
            why = (
                f"the context of {context} tokens is full, /clear starts over"
                if full
                else (f"max_tokens={self.params.max_tokens} reached, /set max_tokens changes it")
            )
            note(f"(cut off: {why})")
        if self.show_stats:
            note(f"({stats})")
