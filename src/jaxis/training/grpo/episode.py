from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from jaxis.outputs import CompletionOutput


@dataclass
class Episode:
    """A prompt and the tokens after it, of one turn or several, sampled by the engine or returned by tools.

    Attributes:
      prompt, completion: Prompt and answer as a string or messages.
      ids: Token ids after the prompt.
      is_sampled: For each of `ids`, True if the engine sampled it; False if a tool returned it.
      logprobs: Log-probability of each sampled token when it was sampled; 0.0 for the others.
      is_cut: True if the answer ended because the limit was reached.
      environment: Instance of the user's environment; None without one.
      num_calls: Number of tool calls.
      num_failed: Number of calls that raised an error or named an unknown tool.
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
        """Adds the tokens of an answer, which must have log-probabilities."""
        assert answer.logprobs is not None
        self.ids += answer.token_ids
        self.is_sampled += [True] * len(answer.token_ids)
        self.logprobs += [entry[token].logprob for entry, token in zip(answer.logprobs, answer.token_ids, strict=True)]
        self.is_cut = answer.finish_reason == "length"
        self.num_accepted_drafts += answer.num_accepted_drafts

    def add_given(self, ids: list[int]) -> None:
        self.ids += ids
        self.is_sampled += [False] * len(ids)
        self.logprobs += [0.0] * len(ids)
