"""Suffix decoding: drafts the tokens that followed the same tokens earlier in the text, or in finished outputs.

After "SuffixDecoding: Extreme Speculative Decoding for Emerging AI Applications" (https://arxiv.org/abs/2411.04975),
with the options of vLLM's method "suffix". Each sequence has an index of its own prompt and output. Sequences of one
`cache_salt` share an index of finished outputs, so that no tenant can find, or time, another's text.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence as AbstractSequence

import numpy as np

from jaxis.engine.drafting.lookup import longest_matches
from jaxis.engine.drafting.speculation import Drafter, DraftRequest
from jaxis.engine.scheduling.sequence import Sequence, SequenceId

# Most tokens of finished outputs of all salts together. Beyond it, the least recently used salt loses its outputs.
MAX_CACHED_TOKENS = 1 << 21
# Separator between two outputs; no token has this id.
_END = -1


class TextIndex:
    """Index of texts as token ids, with the places of each pair of neighbouring tokens.

    It answers the queries of a suffix tree with counts, for runs of two tokens or more, with one entry per token.

    Attributes:
      num_tokens: Tokens of all texts, separators included.
    """

    def __init__(self) -> None:
        self.num_tokens = 0
        self._tokens = np.empty(64, np.int32)
        self._places: dict[tuple[int, int], list[int]] = {}
        self._newest = _END

    def extend(self, token_ids: AbstractSequence[int]) -> None:
        """Adds tokens to the last text."""
        while self.num_tokens + len(token_ids) > len(self._tokens):
            self._tokens = np.concatenate([self._tokens, np.empty_like(self._tokens)])
        self._tokens[self.num_tokens : self.num_tokens + len(token_ids)] = token_ids
        newest = self._newest
        for place, token_id in enumerate(token_ids, start=self.num_tokens):
            self._places.setdefault((newest, token_id), []).append(place)
            newest = token_id
        self._newest = newest
        self.num_tokens += len(token_ids)

    def add(self, token_ids: AbstractSequence[int]) -> None:
        self.extend([*token_ids, _END])

    def continuation(
        self, end: AbstractSequence[int], limit: int, *, max_match: int, spec_factor: float, min_prob: float
    ) -> tuple[float, list[int]]:
        """Finds the likeliest tokens after the longest run at the end of a sequence that occurs in the index.

        Args:
          end: The sequence's last tokens, at least `max_match` if it has so many.
          limit: Most tokens to return.
          max_match: Most tokens of the end that are compared.
          spec_factor: Tokens to guess for each token that matches.
          min_prob: Least probability of the guess, by counts; the guess ends before it falls below.

        Returns:
          The expected number of right tokens, by counts, and the tokens.
        """
        places, length = self._longest(end, max_match)
        guess: list[int] = []
        probability, score = 1.0, 0.0
        while len(guess) < min(limit, int(length * spec_factor)):
            places = places[places + 1 < self.num_tokens] + 1
            if not len(places):
                break
            following, counts = np.unique(self._tokens[places], return_counts=True)
            most = int(counts.argmax())
            probability *= float(counts[most]) / len(places)
            if following[most] == _END or probability < min_prob:
                break
            guess.append(int(following[most]))
            score += probability
            places = places[self._tokens[places] == following[most]]
        return score, guess

    def _longest(self, end: AbstractSequence[int], max_match: int) -> tuple[np.ndarray, int]:
        """Returns the places of the last token of the longest run at `end` that occurs and goes on, and its length."""
        if len(end) < 2:
            return np.empty(0, np.int64), 0
        places = np.asarray(self._places.get((end[-2], end[-1]), ()), np.int64)
        places = places[places + 1 < self.num_tokens]
        places, length = longest_matches(self._tokens, places, 2, end[-max_match:])
        return places, length if len(places) else 0


class _FinishedOutputs:
    """Index of the finished outputs of one salt."""

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
        for _ in range((len(self._outputs) + 1) // 2):
            self._outputs.popleft()
        self.index = TextIndex()
        for output in self._outputs:
            self.index.add(output)


class SuffixDrafter(Drafter):
    """Guesses that a sequence goes on as it did before, or as finished outputs of the same `cache_salt` did.

    Args:
      max_tree_depth: Most tokens of the text's end that are compared.
      max_cached_requests: Most finished outputs kept for each salt; 0 keeps none.
      max_spec_factor: Tokens to draft for each token that matches.
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
        return [self._propose(sequence, limit) for sequence, limit in requests]

    def forget(self, sequence: Sequence) -> None:
        """Drops a sequence's index; its output stays available to others of the same salt."""
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
        index = self._own.get(sequence.seq_id)
        if index is None:
            index = self._own[sequence.seq_id] = TextIndex()
        index.extend(sequence.token_ids(index.num_tokens, sequence.num_tokens))
        return index
