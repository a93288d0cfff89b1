"""The digests that name full blocks. A block's contents depend on all tokens before it, and so does its digest."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Sequence

from jaxis.engine.scheduling.sequence import PromptSpan


def extend_digests(
    digests: list[bytes],
    num_blocks: int,
    token_ids: Callable[[int, int], Sequence[int]],
    block_size: int,
    cache_salt: str | None,
    identity: bytes = b"",
    weights: bytes = b"",
    spans: Sequence[PromptSpan] = (),
) -> None:
    """Appends the digests of a sequence's next full blocks, until `digests` has `num_blocks`.

    `token_ids(start, stop)` returns the sequence's tokens at these positions. `cache_salt`, `identity` and `spans`
    are the sequence's; `weights` is `BlockManager.weights`.
    """
    for index in range(len(digests), num_blocks):
        parent = digests[-1] if digests else _root_digest(cache_salt, identity, weights)
        start = index * block_size
        tokens = array("q", token_ids(start, start + block_size))
        # Every entry has the same length, and so have the tokens: blocks that differ never hash the same bytes.
        others = (
            each.digest + (each.start - start).to_bytes(8, "little", signed=True)
            for each in spans
            if each.overlaps(start, start + block_size)
        )
        digests.append(hashlib.sha256(b"".join((parent, tokens.tobytes(), *others))).digest())


def _root_digest(cache_salt: str | None, identity: bytes, weights: bytes) -> bytes:
    """Returns the first block's parent. Having no salt differs from every salt, even an empty one."""
    if cache_salt is None:
        root = bytes(hashlib.sha256().digest_size)
    else:
        root = hashlib.sha256(cache_salt.encode("utf-8", "surrogatepass")).digest()
    # No salt's encoding begins with these bytes, and a block's hashed bytes have another length.
    if identity:
        root = hashlib.sha256(b"\xff" + identity + root).digest()
    return hashlib.sha256(b"\xfe" + weights + root).digest() if weights else root
