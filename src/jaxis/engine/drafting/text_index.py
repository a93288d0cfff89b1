"""Texts in which it is quick to find where a run of tokens occurs, and what follows it there how often."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

# Between two texts; no token's id.
_END = -1


class TextIndex:
    """Token ids of some texts, with the places of each pair of neighbours.

    It answers what a suffix tree with counts answers, for runs of two tokens or more, from one entry a token.

    Attributes:
      num_tokens: Of all texts, with the marks between them.
    """

    def __init__(self) -> None:
        self.num_tokens = 0
        self._tokens = np.empty(64, np.int32)
        self._places: dict[tuple[int, int], list[int]] = {}
        self._newest = _END

    def extend(self, token_ids: Sequence[int]) -> None:
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

    def add(self, token_ids: Sequence[int]) -> None:
        """Adds a text."""
        self.extend([*token_ids, _END])

    def continuation(
        self, end: Sequence[int], limit: int, *, max_match: int, spec_factor: float, min_prob: float
    ) -> tuple[float, list[int]]:
        """The likeliest tokens after the longest run at the end of a text that occurs here.

        Args:
          end: The text, or its last tokens, at least `max_match` if it has them.
          limit: Most tokens.
          max_match: Most tokens of the text's end that are looked for.
          spec_factor: Tokens to guess for each that matches.
          min_prob: Least probability of the guess, by counts; it ends before it falls below.

        Returns:
          How many of the tokens are right, as expected by counts, and the tokens.
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

    def _longest(self, end: Sequence[int], max_match: int) -> tuple[np.ndarray, int]:
        """The places of the last token of the longest run at `end` that occurs and goes on, and the run's length."""
        if len(end) < 2:
            return np.empty(0, np.int64), 0
        places = np.asarray(self._places.get((end[-2], end[-1]), ()), np.int64)
        places = places[places + 1 < self.num_tokens]
        length = 2
        while len(places) and length < min(max_match, len(end)):
            longer = places[(places >= length) & (self._tokens[places - length] == end[-1 - length])]
            if not len(longer):
                break
            places, length = longer, length + 1
        return places, length if len(places) else 0
