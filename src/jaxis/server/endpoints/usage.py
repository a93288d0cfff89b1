"""Counts the tokens of an answer."""

from __future__ import annotations

from collections.abc import Iterable

from jaxis.server.endpoints.chat_output import ChatOutput
from jaxis.server.endpoints.generation import PromptOutput
from jaxis.server.protocol.base import CompletionTokensDetails, PromptTokensDetails, Usage


class UsageCounter:
    """Adds up token counts of outputs; each prompt counts once, whatever `n` is."""

    def __init__(self) -> None:
        self._prompts: dict[int, tuple[int, int]] = {}
        self._num_generated = 0
        self._predictions: dict[tuple[int, int], tuple[int, int]] = {}

    def add(self, prompt_output: PromptOutput) -> None:
        """Adds an output of a prompt."""
        index, output = prompt_output
        self._prompts[index] = (len(output.prompt_token_ids), output.num_cached_tokens)
        self._num_generated += sum(len(completion.token_ids) for completion in output.outputs)
        for completion in output.outputs:
            counts = completion.num_accepted_predictions, completion.num_rejected_predictions
            self._predictions[index, completion.index] = counts

    def usage(self, readers: Iterable[ChatOutput] = ()) -> Usage:
        """The counts so far; `readers` know how many tokens were reasoning."""
        num_prompt = sum(num_tokens for num_tokens, _ in self._prompts.values())
        num_cached = sum(num_cached for _, num_cached in self._prompts.values())
        return Usage(
            prompt_tokens=num_prompt,
            completion_tokens=self._num_generated,
            total_tokens=num_prompt + self._num_generated,
            completion_tokens_details=CompletionTokensDetails(
                reasoning_tokens=sum(reader.num_reasoning_tokens for reader in readers),
                accepted_prediction_tokens=sum(accepted for accepted, _ in self._predictions.values()),
                rejected_prediction_tokens=sum(rejected for _, rejected in self._predictions.values()),
            ),
            prompt_tokens_details=PromptTokensDetails(cached_tokens=num_cached),
        )
