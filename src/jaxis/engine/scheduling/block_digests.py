"""The names of full blocks: what a block holds depends on all tokens before it, and so does its digest."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Sequence


def extend_digests(
    digests: list[bytes],
    num_blocks: int,
    token_ids: Callable[[int, int], Sequence[int]],
    block_size: int,
    cache_salt: str | None,
) -> None:
    """Appends the digests of a sequence's next full blocks.

    Args:
      digests: Those of its first blocks.
      num_blocks: How many there are to be.
      token_ids: `token_ids(start, stop)` are the sequence's tokens at these positions.
      block_size: B.
      cache_salt: The sequence's.
    """
    for index in range(len(digests), num_blocks):
        parent = digests[-1] if digests else _root_digest(cache_salt)
        start = index * block_size
        tokens = array("q", token_ids(start, start + block_size))
        digests.append(hashlib.sha256(parent + tokens.tobytes()).digest())


def _root_digest(cache_salt: str | None) -> bytes:
    """The first block's parent; having no salt differs from every salt, even an empty one."""
    if cache_salt is None:
        return bytes(hashlib.sha256().digest_size)
    return hashlib.sha256(cache_salt.encode("utf-8", "surrogatepass")).digest()
