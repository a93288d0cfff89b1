"""Token sequences of one length to calibrate on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from jaxis.errors import RequestError

SEQUENCE_TOKENS = 512
MIN_SEQUENCES = 4


def cut_sequences(documents: Iterable[Sequence[int]], bos: int | None, num_tokens: int) -> list[np.ndarray]:
    """Cuts joined documents into sequences int32 [SEQUENCE_TOKENS], and takes some that are evenly spread.

    `bos` begins every sequence, if documents begin with it. All sequences together have at most `num_tokens`. Raises
    RequestError if the documents have fewer than MIN_SEQUENCES.
    """
    tokens = [token for document in documents for token in document]
    opening = [bos] if bos is not None and tokens[:1] == [bos] else []
    fresh = SEQUENCE_TOKENS - len(opening)
    num_available = len(tokens) // fresh
    if num_available < MIN_SEQUENCES:
        raise RequestError(
            f"the text to calibrate on has {len(tokens)} tokens; it needs {MIN_SEQUENCES * SEQUENCE_TOKENS} or more"
        )
    count = min(num_available, max(MIN_SEQUENCES, num_tokens // SEQUENCE_TOKENS))
    chosen = np.linspace(0, num_available - 1, count).round().astype(int)
    pieces = (tokens[number * fresh : (number + 1) * fresh] for number in chosen)
    return [np.asarray([*opening, *piece], np.int32) for piece in pieces]
