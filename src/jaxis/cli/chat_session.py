"""A chat with a model: asks, streams the answer, and keeps the conversation consistent if it is interrupted."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxis.cli.chat_history import ChatHistory
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


class ChatSession:
    """State of a chat between turns.

    Attributes:
      conversation: Messages so far.
      params: Sampling parameters of the answers.
      show_stats: True to print token counts and speed after each answer, on stderr.
      images: Paths of images that the next question begins with.

    Args:
      llm: A model with a chat template.
      params: Sampling parameters of the answers.
      system: System message, or None.
      template_kwargs: More variables for the chat template.
      show_stats: Initial value of the attribute.
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
        """Puts an image before the next question. Raises RequestError if the model takes no images, or the file is
        none.
        """
        self._llm.images.check_takes("image", "/image")
        open_image(path, str(path))
        self.images.append(path)

    def ask(self, question: str | list[dict[str, Any]]) -> None:
        """Asks, and prints the answer on stdout as it is generated.

        The part of an answer before a Ctrl-C stays in the conversation; a question without any answer does not.

        Args:
          question: A string, or the content of a message that was taken back.

        Raises:
          RequestError: The conversation does not fit the context, the chat template refuses it, or an image cannot be
            read.
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
