"""Suffix decoding: drafts of how the text, and texts finished before, went on after the same tokens.

After "SuffixDecoding: Extreme Speculative Decoding for Emerging AI Applications" (https://arxiv.org/abs/2411.04975),
with the options of vLLM's method "suffix". A sequence has an index of its own prompt and output; those of one
`cache_salt` share one of outputs that have ended, so that nothing of one tenant's text can be found, or timed, by
another.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence as AbstractSequence

from jaxis.engine.drafting.drafter import DraftRequest
from jaxis.engine.drafting.text_index import TextIndex
from jaxis.engine.scheduling.sequence import Sequence, SequenceId

# Of finished outputs, over all salts; those of the salt that was not used for longest go first.
MAX_CACHED_TOKENS = 1 << 21


class _FinishedOutputs:
    """The outputs of one salt that have ended."""

    def __init__(self, max_outputs: int) -> None:
        self.index = TextIndex()
        self._outputs: deque[list[int]] = deque()
        self._max_outputs = max_outputs

    def add(self, output_token_ids: list[int]) -> None:
        """Adds an output; beyond the limit, the older half is dropped."""
        if len(self._outputs) == self._max_outputs:
            self.drop_half()
        self._outputs.append(output_token_ids)
        self.index.add(output_token_ids)

    def drop_half(self) -> None:
        """Drops the older half."""
        for _ in range((len(self._outputs) + 1) // 2):
            self._outputs.popleft()
        self.index = TextIndex()
        for output in self._outputs:
            self.index.add(output)


class SuffixDrafter:
    """Guesses that a text goes on as it did before, here or in outputs of the same `cache_salt`.

    Args:
      max_tree_depth: Most tokens of the text's end that are looked for.
      max_cached_requests: Finished outputs that are kept, of each salt; 0: none.
      max_spec_factor: Tokens to draft for each that matches.
      min_token_prob: Least probability of a draft, by counts.
    """

    def __init__(
        self, max_tree_depth: int, max_cached_requests: int, max_spec_factor: float, min_token_prob: float
    ) -> None:
        self._max_match, self._max_cached = max_tree_depth, max_cached_requests
        self._spec_factor, self._min_prob = max_spec_factor, min_token_prob
        self._own: dict[SequenceId, TextIndex] = {}
        self._finished: OrderedDict[str | None, _FinishedOutputs] = OrderedDict()

    def propose(self, requests: AbstractSequence[DraftRequest]) -> list[AbstractSequence[int]]:
        """See `Drafter`."""
        return [self._propose(sequence, limit) for sequence, limit in requests]

    def observe(self, sequence: Sequence, num_drafts: int, num_right: int) -> None:
        """See `Drafter`."""

    def forget(self, sequence: Sequence) -> None:
        """See `Drafter`; the output stays, for others of the same salt."""
        self._own.pop(sequence.seq_id, None)
        if not self._max_cached or len(sequence.output_token_ids) < 2:
            return
        salt = sequence.cache_salt
        finished = self._finished.setdefault(salt, _FinishedOutputs(self._max_cached))
        self._finished.move_to_end(salt)
        finished.add(list(sequence.output_token_ids))
        while sum(each.index.num_tokens for each in self._finished.values()) > MAX_CACHED_TOKENS:
            if len(self._finished) > 1:
                self._finished.popitem(last=False)
            else:
                finished.drop_half()

    def _propose(self, sequence: Sequence, limit: int) -> list[int]:
        indexes = [self._own_index(sequence)]
        if sequence.cache_salt in self._finished:
            indexes.append(self._finished[sequence.cache_salt].index)
        end = sequence.token_ids(max(sequence.num_tokens - self._max_match, 0), sequence.num_tokens)
        found = [
            index.continuation(
                end, limit, max_match=self._max_match, spec_factor=self._spec_factor, min_prob=self._min_prob
            )
            for index in indexes
        ]
        return max(found, key=lambda scored: scored[0])[1]

    def _own_index(self, sequence: Sequence) -> TextIndex:
        """The index of the sequence's text, brought up to date."""
        index = self._own.get(sequence.seq_id)
        if index is None:
            index = self._own[sequence.seq_id] = TextIndex()
        index.extend(sequence.token_ids(index.num_tokens, sequence.num_tokens))
        return index
