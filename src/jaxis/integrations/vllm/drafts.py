"""Drafts for vLLM's scheduler, which sends them back in the next step to be verified."""

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
    """Drafts by jaxis' n-gram lookup, which copies what followed the last tokens earlier in the text.

    Args:
      config: vLLM's configuration, with the method "ngram".
      runner: Runner of the steps that verify drafts.
    """

    def __init__(self, config: SpeculativeConfig, runner: Runner) -> None:
        assert config.prompt_lookup_min is not None
        assert config.prompt_lookup_max is not None  # vLLM sets both
        self._drafter = LookupDrafter(config.prompt_lookup_min, config.prompt_lookup_max)
        self._limit, self._runner = config.num_speculative_tokens, runner

    def propose(self, requests: Sequence[RunningRequest]) -> list[list[int]]:
        """Drafts the next tokens of each request.

        Args:
          requests: Running requests, all of whose tokens the host knows.
        """
        found = self._drafter.propose([DraftRequest(request.sequence, self._limit) for request in requests])
        num_tokens = len(requests) + sum(map(len, found))
        # A draft is not worth waiting for a program, which is compiled meanwhile.
        if num_tokens > len(requests) and not self._runner.can_draft(num_tokens):
            return [[] for _ in requests]
        return [list(each) for each in found]

    def forget(self, request: RunningRequest) -> None:
        """Forgets a request that has ended, or continues with other tokens."""
        self._drafter.forget(request.sequence)
