"""Documents become sequences of one length."""

import numpy as np
import pytest

from jaxis.calibration.sequences import MIN_SEQUENCES, SEQUENCE_TOKENS, cut_sequences
from jaxis.errors import RequestError


def test_documents_are_joined_and_sequences_taken_from_all_of_them():
    documents = [list(range(n, n + 1000)) for n in range(0, 20_000, 1000)]
    sequences = cut_sequences(documents, None, 10 * SEQUENCE_TOKENS)
    assert len(sequences) == 10
    assert all(s.shape == (SEQUENCE_TOKENS,) and (np.diff(s) == 1).all() for s in sequences)
    starts = [int(s[0]) for s in sequences]
    assert starts[0] == 0
    assert starts[-1] > 19_000 - SEQUENCE_TOKENS
    assert max(np.diff(starts)) < 2 * min(np.diff(starts))


def test_every_sequence_begins_as_documents_do():
    sequences = cut_sequences([[7, *range(100, 6000)]], 7, 1 << 20)
    assert [s[0] for s in sequences] == [7] * len(sequences)
    assert list(sequences[1][1:3]) == [100 + SEQUENCE_TOKENS - 2, 101 + SEQUENCE_TOKENS - 2]
    assert cut_sequences([range(100, 6000)], 7, 1 << 20)[0][0] == 100


def test_a_short_text_is_an_error_that_says_how_much_is_needed():
    with pytest.raises(RequestError, match=f"has 600 tokens; it needs {MIN_SEQUENCES * SEQUENCE_TOKENS} or more"):
        cut_sequences([range(600)], None, 1 << 20)
