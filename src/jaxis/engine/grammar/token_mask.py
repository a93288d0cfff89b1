"""Sets of tokens as bit masks."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np


def pack_token_ids(token_ids: Collection[int], vocab_size: int) -> np.ndarray:
    """Returns a mask with these tokens' bits set.

    Args:
      token_ids: Ids of V and above are ignored.
      vocab_size: V.

    Returns:
      int32 [ceil(V / 32)]; bit i % 32 of word i / 32 is token i's.
    """
    bits = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
    ids = np.fromiter(token_ids, np.int64, len(token_ids))
    bits[ids[ids < vocab_size]] = 1
    return np.packbits(bits, bitorder="little").view("<i4").astype(np.int32)


def is_allowed(mask: np.ndarray, token_id: int) -> bool:
    """Returns whether a token's bit is set in a mask of `pack_token_ids`."""
    return bool(mask[token_id // 32] >> token_id % 32 & 1)
