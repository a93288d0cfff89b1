"""A prompt and what follows it: what the engine samples and, with an environment, what its tools return."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from jaxis.outputs import CompletionOutput


@dataclass
class Episode:
    """An answer, of one turn or of several.

    Attributes:
      prompt: A string, or messages.
      prompt_ids: Its token ids.
      ids: Those that follow it.
      is_sampled: Of each of those, whether the engine sampled it; a tool returned the others.
      logprobs: Of each, with which it was sampled; 0.0 of the others.
      completion: What follows the prompt: a string, or messages.
      is_cut: Whether it ended for want of room.
      num_accepted_drafts: How many of its tokens were guessed ahead.
      environment: The user's, whose tools it calls; None: there is none.
      num_calls: Calls of tools.
      num_failed: Calls that raised an error, or were of no tool.
    """

    prompt: str | list[dict[str, Any]]
    prompt_ids: list[int]
    ids: list[int] = field(default_factory=list)
    is_sampled: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    completion: str | list[dict[str, Any]] = ""
    is_cut: bool = False
    num_accepted_drafts: int = 0
    environment: Any = None
    num_calls: int = 0
    num_failed: int = 0

    def add_sampled(self, answer: CompletionOutput) -> None:
        """Adds the tokens of an answer whose log-probabilities were asked for."""
        assert answer.logprobs is not None
        self.ids += answer.token_ids
        self.is_sampled += [True] * len(answer.token_ids)
        self.logprobs += [entry[token].logprob for entry, token in zip(answer.logprobs, answer.token_ids, strict=True)]
        self.is_cut = answer.finish_reason == "length"
        self.num_accepted_drafts += answer.num_accepted_drafts

    def add_given(self, ids: list[int]) -> None:
        """Adds tokens that the model reads, and did not sample."""
        self.ids += ids
        self.is_sampled += [False] * len(ids)
        self.logprobs += [0.0] * len(ids)
