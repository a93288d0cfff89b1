"""Whether the last tokens of a text may have occurred in it before: a quick no for most texts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

# Bytes for each token of the text, at least: of the runs that did not occur, one in 64 is taken for one that did.
_BYTES_PER_TOKEN = 8
# A filter has room for so many tokens at least.
_LEAST_TOKENS = 256
# Large odd numbers: products modulo a power of two mix all bits of a token.
_FACTORS = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)
# Which bits of the sum of products choose a run's byte, and its bit there.
_PLACE_SHIFT, _BIT_SHIFT = 7, 33


class RunFilter:
    """A Bloom filter of the runs of `LENGTH` tokens of a text that grows.

    Args:
      text: What the text begins with.
    """

    LENGTH = len(_FACTORS)

    def __init__(self, text: Sequence[int] | np.ndarray) -> None:
        # Room for twice the text.
        size = 1 << (_BYTES_PER_TOKEN * max(len(text), _LEAST_TOKENS)).bit_length()
        self._room = size // _BYTES_PER_TOKEN - len(text)
        self._mask = size - 1
        self._marks = bytearray(size)
        # The text's last run is marked when the next one is known: it is compared with those before it.
        self._place, self._bit = 0, 0
        self._newest = tuple(int(token) for token in text[-self.LENGTH + 1 :])
        if len(text) >= self.LENGTH:
            wide = np.asarray(text, np.int64)
            count = len(text) - self.LENGTH + 1
            hashes = np.zeros(count, np.int64)
            for i, factor in enumerate(_FACTORS):
                hashes += wide[i : i + count] * factor
            places = (hashes >> _PLACE_SHIFT) & self._mask
            bits = np.left_shift(1, (hashes >> _BIT_SHIFT) & 7).astype(np.uint8)
            np.bitwise_or.at(np.frombuffer(self._marks, np.uint8), places[:-1], bits[:-1])
            self._place, self._bit = int(places[-1]), int(bits[-1])

    @property
    def is_full(self) -> bool:
        """Whether the text has grown so much that a new filter would be right more often."""
        return self._room < 0

    def extend(self, tokens: Sequence[int]) -> None:
        """Takes in the text's next tokens, as Python numbers: a few at a time, which numpy would not make faster."""
        self._room -= len(tokens)
        for token in tokens:
            self._marks[self._place] |= self._bit
            if len(self._newest) < self.LENGTH - 1:
                self._newest = (*self._newest, token)
                continue
            a, b = self._newest
            hashed = a * _FACTORS[0] + b * _FACTORS[1] + token * _FACTORS[2]
            self._place, self._bit = (hashed >> _PLACE_SHIFT) & self._mask, 1 << ((hashed >> _BIT_SHIFT) & 7)
            self._newest = (b, token)

    def may_have_occurred(self) -> bool:
        """Whether the text's last tokens may be among the runs before them; False is certain."""
        return self._marks[self._place] & self._bit != 0
