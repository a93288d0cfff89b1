"""A chat with a model: asks, streams the answer, and keeps the conversation consistent if it is interrupted."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from typing import TYPE_CHECKING, Any

from jaxis.cli.chat_history import ChatHistory
from jaxis.cli.console import AnswerStats, note, write_answer
from jaxis.cli.options import with_drawn_seed
from jaxis.errors import RequestError

if TYPE_CHECKING:
    from jaxis.llm import LLM
    from jaxis.sampling_params import SamplingParams


class ChatSession:
    """State of a chat between turns.

    Attributes:
      conversation: The messages so far.
      params: How answers are sampled.
      show_stats: Whether token counts and speed follow each answer, on stderr.

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
        self._llm = llm
        self._template_kwargs = dict(template_kwargs or {})

    def ask(self, text: str) -> None:
        """Asks, and prints the answer on stdout as it is generated.

        What was answered before a Ctrl-C stays in the conversation; a question without any answer does not.

        Raises:
          RequestError: If the conversation does not fit the context or the chat template refuses it.
          KeyboardInterrupt: On Ctrl-C, once the request is aborted and the conversation is in order.
        """
        self.conversation.add("user", text)
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
        token_ids = self._llm.tokenizer.encode_chat(self.conversation.messages, **self._template_kwargs)
        context = self._llm.max_model_len
        if len(token_ids) >= context:
            raise RequestError(
                f"the conversation has {len(token_ids)} tokens and does not fit the context of {context}: "
                "/undo takes back the last turn, /clear starts over"
            )
        params = with_drawn_seed(self.params)
        stats, finish_reason = AnswerStats(params.seed), None
        stats.num_prompt_tokens = len(token_ids)
        with closing(self._llm.stream(token_ids, params)) as stream:
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
