"""Drafts copied from the text so far: prompt, the client's prediction, and output (n-gram or prompt lookup).

The longest end of the text that occurred before is found, and the tokens that followed it there are the draft. Of
equally long occurrences, the latest counts. The method is that of transformers' prompt lookup and vLLM's "ngram".
Beyond it, a sequence that leaves what it copies, as an edit does, is expected to return close to where it left.
"""

from __future__ import annotations

from collections.abc import Sequence as AbstractSequence

import numpy as np

from jaxis.engine.drafting.speculation import Drafter, DraftRequest
from jaxis.engine.scheduling.sequence import Sequence, SequenceId

# A copy that was left goes on after an edit: for so many tokens, a shorter match counts if it is where the copy would
# be, give or take so many places.
MAX_EDIT_TOKENS = 16
MAX_EDIT_SHIFT = 8
# Tokens of the runs that are known to have occurred, at most.
_RUN_LENGTH = 3


def longest_matches(
    tokens: np.ndarray, places: np.ndarray, length: int, end: AbstractSequence[int] | np.ndarray
) -> tuple[np.ndarray, int]:
    """Where the most of a sequence's last tokens occur.

    Args:
      tokens: int32 [N], where they are looked for.
      places: int [P], of their last one, where `length` of them or more occur.
      length: See above.
      end: The sequence's last tokens, as many as are looked for.

    Returns:
      The places where no fewer occur than anywhere else, in order, and how many those are.
    """
    while len(places) and length < len(end):
        # A place too close to the start reads the other end instead, and is dropped by the first condition.
        longer = places[(places >= length) & (tokens[places - length] == end[-1 - length])]
        if not len(longer):
            break
        places, length = longer, length + 1
    return places, length


class LookupDrafter(Drafter):
    """Guesses that a sequence goes on as it did before.

    Args:
      min_match: Fewest tokens at the text's end that must have occurred before.
      max_match: Most tokens of the text's end that are looked for; a longer match counts as one of so many.
    """

    def __init__(self, min_match: int, max_match: int) -> None:
        self._min_match, self._max_match = min_match, max_match
        self._texts: dict[SequenceId, LookupText] = {}

    def propose(self, requests: AbstractSequence[DraftRequest]) -> list[AbstractSequence[int]]:
        """See `Drafter`."""
        return [
            self._text(sequence).continuation(sequence.output_token_ids, self._min_match, self._max_match, limit)
            for sequence, limit in requests
        ]

    def observe(self, sequence: Sequence, num_drafts: int, num_right: int) -> None:
        """See `Drafter`; also counts what became of guesses from a prediction."""
        text = self._texts.get(sequence.seq_id)
        if text is not None and text.is_from_prediction:
            sequence.num_accepted_predictions += num_right
            sequence.num_rejected_predictions += num_drafts - num_right

    def forget(self, sequence: Sequence) -> None:
        """See `Drafter`."""
        self._texts.pop(sequence.seq_id, None)

    def _text(self, sequence: Sequence) -> LookupText:
        text = self._texts.get(sequence.seq_id)
        if text is None:
            text = LookupText(sequence, min(self._min_match, _RUN_LENGTH), self._max_match)
            self._texts[sequence.seq_id] = text
        return text


class LookupText:
    """What is looked up for one sequence.

    Attributes:
      is_from_prediction: Whether the last continuation found began in the prediction.

    Args:
      sequence: With its prompt and prediction.
      run_length: Where the text's last tokens, so many, did not occur before, nothing is looked for.
      max_match: Most tokens that are looked for.
    """

    def __init__(self, sequence: Sequence, run_length: int, max_match: int) -> None:
        self.is_from_prediction = False
        prompt, prediction = sequence.prompt_token_ids, sequence.prediction_token_ids
        tokens = list(prompt)
        self._prediction_start = self._prediction_stop = len(prompt)
        if prediction:
            # The output begins where the prediction does, behind the prompt: so the prompt's end comes before both.
            tokens = [*prompt, *prediction, *prompt[-max_match:]]
            self._prediction_stop += len(prediction)
        self._tokens = np.asarray(tokens, np.int32)  # and, behind them, room
        self._num_fixed = self._num_tokens = len(tokens)
        # All runs of tokens but the newest one, which is compared with those before it.
        self._runs = set(zip(*(tokens[i:] for i in range(run_length)), strict=False))
        self._newest_run = tuple(tokens[-run_length:])
        self._num_in_runs = 0
        # The text was a copy of what is at the first of these places up to the second one; before there was any, 0.
        self._copied_from = self._copied_to = 0

    def continuation(
        self, output_token_ids: AbstractSequence[int], min_match: int, max_match: int, limit: int
    ) -> list[int]:
        """Up to `limit` tokens that followed the latest of the longest earlier occurrences of the text's end.

        Args:
          output_token_ids: The output so far.
          min_match: Fewest tokens that must match.
          max_match: Most tokens that are looked for.
          limit: Most tokens to guess.
        """
        # Without numpy, until there is something to look for.
        is_new = self._ends_in_new_run(output_token_ids)
        if is_new and self._copied_to == 0:
            return []
        self._follow(output_token_ids)
        may_return = self._may_return()
        if is_new and not may_return:
            return []
        tokens = self._tokens[: self._num_tokens]
        last = self._num_tokens - 1
        # Where the text's end may have occurred before: the places of its last token.
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
            # A sequence that repeats itself goes on doing so: what follows its end is what is guessed to.
            while len(found) < limit:
                found += found[: limit - len(found)]
        return found

    def _ends_in_new_run(self, output_token_ids: AbstractSequence[int]) -> bool:
        """Whether the text's last tokens, as many as runs have, did not occur before."""
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
        """Whether the text is a copy, or has left one so few tokens ago that it may return."""
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
        """Where the text goes on if it has just returned, after an edit, to what it copied; None if it has not.

        Args:
          places: Where its last tokens, though too few, occurred before; at least one.
        """
        distances = np.abs(places + 1 - (self._copied_from + self._num_tokens - self._copied_to))
        nearest = int(distances.argmin())
        return int(places[nearest]) + 1 if distances[nearest] <= MAX_EDIT_SHIFT else None
