"""The log-probabilities of a completion's tokens, as its output reports them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from jaxis.outputs import CompletionOutput, Logprob
from jaxis.sampling_params import ALL_LOGPROBS, RAW_LOGPROBS, SamplingParams

if TYPE_CHECKING:
    from jaxis.engine.execution.token_logprobs import TokenLogprobs
    from jaxis.tokenizer import Tokenizer


class TokenScores:
    """Log-probabilities of sampled tokens, and the probability that filters kept where they were applied.

    Args:
      params: Parameters of the request, which asks for log-probabilities.
      tokenizer: The checkpoint's tokenizer, if it has one.
    """

    def __init__(self, params: SamplingParams, tokenizer: Tokenizer | None) -> None:
        assert params.logprobs is not None
        self._num_wanted, self._tokenizer = params.logprobs, tokenizer
        self._entries: list[dict[int, Logprob]] = []
        self._cumulative = 0.0
        is_processed = (params.logprobs_mode or RAW_LOGPROBS).startswith("processed")
        self._kept_mass: list[float] | None = [] if is_processed else None

    def add(self, token_id: int, logprobs: TokenLogprobs[np.ndarray], row: int) -> None:
        """Records the log-probabilities of a sampled token, in this row of a step's."""
        entry = logprob_entry(token_id, logprobs, row, self._num_wanted, self._tokenizer)
        self._entries.append(entry)
        self._cumulative += entry[token_id].logprob
        if self._kept_mass is not None and logprobs.kept_mass is not None:
            self._kept_mass.append(float(logprobs.kept_mass[row]))

    def report(self, output: CompletionOutput, start: int) -> None:
        """Writes the scores of output tokens from `start` on; `cumulative_logprob` is of all tokens."""
        output.logprobs, output.cumulative_logprob = self._entries[start:], self._cumulative
        output.kept_mass = None if self._kept_mass is None else self._kept_mass[start:]


def logprob_entry(
    token_id: int, logprobs: TokenLogprobs[np.ndarray], row: int, num_wanted: int, tokenizer: Tokenizer | None
) -> dict[int, Logprob]:
    """Returns the given token first, then the `num_wanted` most likely, or all."""
    top_ids = logprobs.top_ids[row] if num_wanted == ALL_LOGPROBS else logprobs.top_ids[row][:num_wanted]
    entry = {token_id: (float(logprobs.logprobs[row]), int(logprobs.ranks[row]))}
    for rank, other in enumerate(top_ids.tolist(), start=1):
        entry.setdefault(other, (float(logprobs.top_logprobs[row, rank - 1]), rank))
    if tokenizer is None:
        return {id_: Logprob(logprob, rank) for id_, (logprob, rank) in entry.items()}
    return {id_: Logprob(logprob, rank, tokenizer.token_text(id_)) for id_, (logprob, rank) in entry.items()}
