"""Whether the last tokens of a text may have occurred in it before: a quick no for most texts."""

from __future__ import annotations

import numpy as np

# Bytes for each token of the text; of the runs that did not occur, one in so many is taken for one that did.
_BYTES_PER_TOKEN = 8
# Large odd numbers: products modulo a power of two mix all bits of a token.
_FACTORS = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)


class RunFilter:
    """A Bloom filter of the runs of `LENGTH` tokens of a text that grows.

    Args:
      max_tokens: Most tokens of the text.
    """

    LENGTH = len(_FACTORS)

    def __init__(self, max_tokens: int) -> None:
        size = 1 << (_BYTES_PER_TOKEN * max_tokens).bit_length()
        self._mask = size - 1
        self._marks = bytearray(size)
        self._num_tokens = 0

    def add(self, tokens: np.ndarray) -> None:
        """Takes in a text, int32 [T], which begins with the one taken in before."""
        start = max(self._num_tokens, self.LENGTH - 1)
        if len(tokens) - start == 1:
            self._marks[self._place(tokens)] = 1
        elif len(tokens) > start:
            wide = tokens[start - self.LENGTH + 1 :].astype(np.int64)
            count = len(tokens) - start
            hashes = sum(wide[i : i + count] * factor for i, factor in enumerate(_FACTORS))
            np.frombuffer(self._marks, np.uint8)[(hashes >> 7) & self._mask] = 1
        self._num_tokens = len(tokens)

    def may_have(self, tokens: np.ndarray) -> bool:
        """Whether the last tokens of a text, int32 [T], may be among the runs taken in; False is certain."""
        return len(tokens) >= self.LENGTH and self._marks[self._place(tokens)] == 1

    def _place(self, tokens: np.ndarray) -> int:
        a, b, c = tokens[-self.LENGTH :].tolist()
        return ((a * _FACTORS[0] + b * _FACTORS[1] + c * _FACTORS[2]) >> 7) & self._mask
