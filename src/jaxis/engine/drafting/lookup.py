"""Drafts copied from the text so far: prompt, the client's prediction, and output (n-gram or prompt lookup).

The drafter finds the longest end of the text that occurred before and drafts the tokens that followed it there. Of
equally long occurrences, it takes the latest. The method is that of transformers' prompt lookup and vLLM's "ngram". In
addition, a sequence that leaves the text that it copies, as an edit does, is expected to return close to that place.
"""

from __future__ import annotations

from collections.abc import Sequence as AbstractSequence

import numpy as np

from jaxis.engine.drafting.speculation import Drafter, DraftRequest
from jaxis.engine.scheduling.sequence import Sequence, SequenceId

# A sequence that has left the text that it copied may return to it after an edit. For so many tokens, a match that is
# shorter than `min_match` counts if it lies within so many places of where the copy would be.
MAX_EDIT_TOKENS = 16
MAX_EDIT_SHIFT = 8
# Longest runs of tokens that `LookupText` keeps a set of.
_RUN_LENGTH = 3


def longest_matches(
    tokens: np.ndarray, places: np.ndarray, length: int, end: AbstractSequence[int] | np.ndarray
) -> tuple[np.ndarray, int]:
    """Finds the places where most of a sequence's last tokens occur.

    Args:
      tokens: int32 [N], the text to search.
      places: int [P], indices in `tokens` at which `length` or more of the last tokens end.
      length: Known length of the matches at `places`.
      end: The sequence's last tokens; its length limits the matches.

    Returns:
      The places with the longest match, in order, and its length.
    """
    while len(places) and length < len(end):
        # A negative index reads the other end of `tokens`; the first condition drops such places.
        longer = places[(places >= length) & (tokens[places - length] == end[-1 - length])]
        if not len(longer):
            break
        places, length = longer, length + 1
    return places, length


class LookupDrafter(Drafter):
    """Guesses that a sequence goes on as it did after an earlier occurrence of its last tokens.

    Args:
      min_match: Fewest tokens at the text's end that must have occurred before.
      max_match: Most tokens of the text's end that are compared; longer matches count as equal.
    """

    def __init__(self, min_match: int, max_match: int) -> None:
        self._min_match, self._max_match = min_match, max_match
        self._texts: dict[SequenceId, LookupText] = {}

    def propose(self, requests: AbstractSequence[DraftRequest]) -> list[AbstractSequence[int]]:
        return [
            self._text(sequence).continuation(sequence.output_token_ids, self._min_match, self._max_match, limit)
            for sequence, limit in requests
        ]

    def observe(self, sequence: Sequence, num_drafts: int, num_right: int) -> None:
        """Counts the accepted and rejected tokens of guesses from a prediction."""
        text = self._texts.get(sequence.seq_id)
        if text is not None and text.is_from_prediction:
            sequence.num_accepted_predictions += num_right
            sequence.num_rejected_predictions += num_drafts - num_right

    def forget(self, sequence: Sequence) -> None:
        self._texts.pop(sequence.seq_id, None)

    def _text(self, sequence: Sequence) -> LookupText:
        text = self._texts.get(sequence.seq_id)
        if text is None:
            text = LookupText(sequence, min(self._min_match, _RUN_LENGTH), self._max_match)
            self._texts[sequence.seq_id] = text
        return text


class LookupText:
    """Search index over the text of one sequence.

    Attributes:
      is_from_prediction: True if the last continuation found began in the prediction.

    Args:
      sequence: The sequence, with its prompt and prediction.
      run_length: Length of the runs of tokens in the index. If the last run is new, nothing is searched.
      max_match: Most tokens of the text's end that are compared.
    """

    def __init__(self, sequence: Sequence, run_length: int, max_match: int) -> None:
        self.is_from_prediction = False
        prompt, prediction = sequence.prompt_token_ids, sequence.prediction_token_ids
        tokens = list(prompt)
        self._prediction_start = self._prediction_stop = len(prompt)
        if prediction:
            # Output and prediction both follow the prompt, so the prompt's end is repeated before the output.
            tokens = [*prompt, *prediction, *prompt[-max_match:]]
            self._prediction_stop += len(prediction)
        self._tokens = np.asarray(tokens, np.int32)  # with spare places at the end
        self._num_fixed = self._num_tokens = len(tokens)
        # All runs of tokens except the newest one, which is compared with them.
        self._runs = set(zip(*(tokens[i:] for i in range(run_length)), strict=False))
        self._newest_run = tuple(tokens[-run_length:])
        self._num_in_runs = 0
        # The text is a copy up to `_copied_to`, and would go on with the token at `_copied_from`; 0 before the first
        # copy.
        self._copied_from = self._copied_to = 0

    def continuation(
        self, output_token_ids: AbstractSequence[int], min_match: int, max_match: int, limit: int
    ) -> list[int]:
        """Returns up to `limit` tokens that followed the latest of the longest earlier occurrences of the text's end.

        Args:
          output_token_ids: The output so far.
          min_match: Fewest tokens that must match.
          max_match: Most tokens that are compared.
          limit: Most tokens to guess.
        """
        # Without numpy, which would cost more than this test.
        is_new = self._ends_in_new_run(output_token_ids)
        if is_new and self._copied_to == 0:
            return []
        self._follow(output_token_ids)
        may_return = self._may_return()
        if is_new and not may_return:
            return []
        tokens = self._tokens[: self._num_tokens]
        last = self._num_tokens - 1
        # Earlier places of the text's last token.
        places = np.flatnonzero(tokens[:last] == tokens[last])
        places, length = longest_matches(tokens, places, 1, tokens[max(self._num_tokens - max_match, 0) :])
        if len(places) and length >= min_match:
            start = int(places[-1]) + 1
            self._copied_from, self._copied_to = start, self._num_tokens
        else:
            start = self._return(places) if may_return and len(places) else None
        if start is None:
            return []
        self.is_from_prediction = self._prediction_start <= start < self._prediction_stop
        if start == self._prediction_stop > self._prediction_start:
            return []  # nothing is known to follow the prediction
        stop = self._prediction_stop if self.is_from_prediction else self._num_tokens
        found = tokens[start : min(start + limit, stop)].tolist()
        if stop == self._num_tokens:
            # A sequence that repeats itself goes on doing so: the guess continues with its own first tokens.
            while len(found) < limit:
                found += found[: limit - len(found)]
        return found

    def _ends_in_new_run(self, output_token_ids: AbstractSequence[int]) -> bool:
        """Returns whether the text's last run of tokens did not occur before."""
        is_new = False
        for token_id in output_token_ids[self._num_in_runs :]:
            self._runs.add(self._newest_run)
            self._newest_run = (*self._newest_run[1:], token_id)
            is_new = self._newest_run not in self._runs
        self._num_in_runs = len(output_token_ids)
        return is_new

    def _follow(self, output_token_ids: AbstractSequence[int]) -> None:
        new = output_token_ids[self._num_tokens - self._num_fixed :]
        if self._num_tokens + len(new) > len(self._tokens):
            self._tokens = np.concatenate([self._tokens, np.empty(len(self._tokens) + len(new), np.int32)])
        self._tokens[self._num_tokens : self._num_tokens + len(new)] = new
        self._num_tokens += len(new)

    def _may_return(self) -> bool:
        """Returns whether the text is a copy, or left one at most `MAX_EDIT_TOKENS` ago."""
        if self._copied_to == 0:
            return False
        copy = self._tokens[self._copied_to : self._num_tokens]
        is_same = self._tokens[self._copied_from : self._copied_from + len(copy)] == copy
        num_copied = len(copy) if is_same.all() else int(is_same.argmin())
        self._copied_from, self._copied_to = self._copied_from + num_copied, self._copied_to + num_copied
        if self._num_tokens - self._copied_to > MAX_EDIT_TOKENS:
            self._copied_to = 0
        return self._copied_to > 0

    def _return(self, places: np.ndarray) -> int | None:
        """Returns the place at which the sequence goes on after an edit; None if it has not returned to its copy.

        Args:
          places: Places, at least one, at which the text's last tokens, fewer than `min_match`, occurred before.
        """
        distances = np.abs(places + 1 - (self._copied_from + self._num_tokens - self._copied_to))
        nearest = int(distances.argmin())
        return int(places[nearest]) + 1 if distances[nearest] <= MAX_EDIT_SHIFT else None
