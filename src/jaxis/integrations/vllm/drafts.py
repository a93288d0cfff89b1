"""Drafts for vLLM's scheduler: guesses at next tokens, which it sends back in the next step to be compared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from jaxis.engine.drafting.lookup import LookupDrafter
from jaxis.engine.drafting.speculation import DraftRequest

if TYPE_CHECKING:
    from vllm.config import SpeculativeConfig

    from jaxis.engine.execution.runner import Runner
    from jaxis.integrations.vllm.requests import RunningRequest


class Drafts:
    """Copies of what followed the text's last tokens before, by jaxis' n-gram lookup.

    Args:
      config: vLLM's, with the method "ngram".
      runner: Runs the steps that compare drafts.
    """

    def __init__(self, config: SpeculativeConfig, runner: Runner) -> None:
        assert config.prompt_lookup_min is not None
        assert config.prompt_lookup_max is not None  # vLLM sets both
        self._drafter = LookupDrafter(config.prompt_lookup_min, config.prompt_lookup_max)
        self._limit, self._runner = config.num_speculative_tokens, runner

    def propose(self, requests: Sequence[RunningRequest]) -> list[list[int]]:
        """Guesses at the next tokens of each request.

        Args:
          requests: Those that run; the host knows all their tokens.
        """
        found = self._drafter.propose([DraftRequest(request.sequence, self._limit) for request in requests])
        num_tokens = len(requests) + sum(map(len, found))
        # A guess is not worth the wait for a program: it is compiled meanwhile.
        if num_tokens > len(requests) and not self._runner.can_draft(num_tokens):
            return [[] for _ in requests]
        return [list(each) for each in found]

    def forget(self, request: RunningRequest) -> None:
        """A request has ended, or goes on with other tokens."""
        self._drafter.forget(request.sequence)
