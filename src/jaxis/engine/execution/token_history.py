"""The tokens that penalties apply to: a sequence's history as its output grows, and a step's rows of histories."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class TokenHistory:
    """The distinct tokens of a sequence and their counts. A token keeps its place once it has one.

    The prompt's tokens count as seen, though not as generated. Tokens outside the vocabulary are left out.

    Attributes:
      ids: int32, at least `len(self)` elements; the first ones are the tokens.
      counts: int32, as many: the times that each was generated; 0 if it stands in the prompt only.
      places: The place of each generated token, in their order.
    """

    def __init__(self, prompt_token_ids: Sequence[int], vocab_size: int) -> None:
        distinct = np.unique(np.asarray(prompt_token_ids, np.int32))
        self.ids = distinct[(distinct >= 0) & (distinct < vocab_size)]
        self.counts = np.zeros_like(self.ids)
        self.places: list[int] = []
        self._place_of = {token_id: place for place, token_id in enumerate(self.ids.tolist())}

    def __len__(self) -> int:
        return len(self._place_of)

    def find(self, token_id: int) -> int | None:
        """Returns the token's place; None if it has none."""
        return self._place_of.get(token_id)

    def follow(self, output_token_ids: Sequence[int]) -> None:
        """Counts the tokens generated since the last call; all of them are given."""
        for token_id in output_token_ids[len(self.places) :]:
            place = self._place_of.setdefault(token_id, len(self._place_of))
            if place >= len(self.ids):
                more = np.zeros(max(16, place), np.int32)
                self.ids = np.concatenate([self.ids, more])
                self.counts = np.concatenate([self.counts, more])
            self.ids[place] = token_id
            self.counts[place] += 1
            self.places.append(place)

    def num_with(self, drafts: Sequence[int]) -> int:
        """Returns the number of distinct tokens, those of drafts included."""
        return len(self) + len({token_id for token_id in drafts if token_id not in self._place_of})


class _Held(NamedTuple):
    """The contents of a row.

    Attributes:
      history: History of the row's sequence; None if the row is empty.
      num_generated: The sequence's generated tokens when the row was written.
      drafted: Places that count drafts too.
    """

    history: TokenHistory | None
    num_generated: int
    drafted: tuple[int, ...]


_NOTHING = _Held(None, 0, ())


class HistoryRows:
    """The histories of R rows, of which a step writes only new entries.

    They are written into `ids`, int32 [R, W], the tokens of each row, padded with V, and into `counts`, int32 [R, W],
    the times that each was generated, padded with 0.
    """

    def __init__(self, ids: np.ndarray, counts: np.ndarray, vocab_size: int) -> None:
        self._ids, self._counts, self._vocab_size = ids, counts, vocab_size
        ids[:] = vocab_size
        counts[:] = 0
        self._held = [_NOTHING] * len(ids)

    def write(self, row: int, history: TokenHistory | None, drafts: Sequence[int] = ()) -> None:
        """Writes a sequence's history into a row, as if these drafts were output; no history empties the row."""
        held = self._held[row]
        if history is None:
            if held is not _NOTHING:
                self._ids[row], self._counts[row] = self._vocab_size, 0
                self._held[row] = _NOTHING
            return
        ids, counts = self._ids[row], self._counts[row]
        if held.history is not history:
            size = len(history)
            ids[:size], counts[:size] = history.ids[:size], history.counts[:size]
            ids[size:], counts[size:] = self._vocab_size, 0
        else:
            for place in held.drafted:
                if place >= len(history):
                    ids[place], counts[place] = self._vocab_size, 0
                else:
                    ids[place], counts[place] = history.ids[place], history.counts[place]
            for place in history.places[held.num_generated :]:
                ids[place], counts[place] = history.ids[place], history.counts[place]
        drafted = _add(history, drafts, ids, counts) if drafts else ()
        self._held[row] = _Held(history, len(history.places), drafted)

    def clear_from(self, row: int) -> None:
        """Empties the row and those after it."""
        for i in range(row, len(self._held)):
            self.write(i, None)


def _add(history: TokenHistory, drafts: Sequence[int], ids: np.ndarray, counts: np.ndarray) -> tuple[int, ...]:
    """Counts drafts in the row of a history; returns their places."""
    new: dict[int, int] = {}
    places = []
    for token_id in drafts:
        place = history.find(token_id)
        if place is None:
            place = new.setdefault(token_id, len(history) + len(new))
        ids[place] = token_id
        counts[place] += 1
        places.append(place)
    return tuple(places)
