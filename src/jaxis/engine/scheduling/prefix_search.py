"""Finds how long a prefix of a sequence is known, given which blocks of each group are known."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Sequence

from jaxis.config.attention_span import FULL_CONTEXT, AttentionSpan
from jaxis.prompts import EmbeddedInput

# The names of full blocks: what a block holds depends on all tokens before it, and so does its digest.


def extend_digests(
    digests: list[bytes],
    num_blocks: int,
    token_ids: Callable[[int, int], Sequence[int]],
    block_size: int,
    cache_salt: str | None,
    adapter: bytes = b"",
    weights: bytes = b"",
    inputs: Sequence[EmbeddedInput] = (),
) -> None:
    """Appends the digests of a sequence's next full blocks.

    Args:
      digests: Those of its first blocks.
      num_blocks: How many digests there are to be in the end.
      token_ids: `token_ids(start, stop)` are the sequence's tokens at these positions.
      block_size: B.
      cache_salt: The sequence's.
      adapter: The sequence's.
      weights: See `BlockManager`.
      inputs: The sequence's.
    """
    for index in range(len(digests), num_blocks):
        parent = digests[-1] if digests else _root_digest(cache_salt, adapter, weights)
        start = index * block_size
        tokens = array("q", token_ids(start, start + block_size))
        # Of one length each, after tokens of one length: no two blocks that differ hash the same bytes.
        others = (
            each.digest + (each.start - start).to_bytes(8, "little", signed=True)
            for each in inputs
            if each.overlaps(start, start + block_size)
        )
        digests.append(hashlib.sha256(b"".join((parent, tokens.tobytes(), *others))).digest())


def _root_digest(cache_salt: str | None, adapter: bytes, weights: bytes) -> bytes:
    """The first block's parent; having no salt differs from every salt, even an empty one."""
    if cache_salt is None:
        root = bytes(hashlib.sha256().digest_size)
    else:
        root = hashlib.sha256(cache_salt.encode("utf-8", "surrogatepass")).digest()
    # No salt's encoding begins with these bytes, and what is hashed of a block has another length.
    if adapter:
        root = hashlib.sha256(b"\xff" + adapter + root).digest()
    return hashlib.sha256(b"\xfe" + weights + root).digest() if weights else root


Known = Callable[[int, bytes], bool]
"""Whether a block is known, by the index of its group and its digest."""


class PrefixSearch:
    """Finds the longest prefix such that every group has what the token after the prefix sees.

    Layers with full context see all blocks of the prefix, layers with a window its last blocks. Recurrent layers need
    the state after its last block; states count as one more group, after those of `spans`.

    Args:
      spans: Each group's, full context first if there is such a group.
      block_size: Tokens in a block (B).
      has_states: Whether there are recurrent layers.
    """

    def __init__(self, spans: Sequence[AttentionSpan], block_size: int, *, has_states: bool) -> None:
        self._spans = tuple(spans)
        self._block_size = block_size
        self._has_states = has_states
        self._has_full_context = self._spans[:1] == (FULL_CONTEXT,)
        self._windows = range(1 if self._has_full_context else 0, len(self._spans))

    def first_block(self, group: int, position: int) -> int:
        """The first block that a token at `position` or later sees in a group."""
        return self._spans[group].first_visible(position) // self._block_size

    def longest(self, digests: Sequence[bytes], is_known: Known) -> tuple[int, int]:
        """The number of blocks of the longest known prefix, and what that number would be if every state were known.

        Args:
          digests: Of the blocks that the prefix may have.
          is_known: Which blocks, and states, are known.
        """
        num_blocks = len(digests)
        if self._has_full_context:
            num_blocks = next((i for i in range(num_blocks) if not is_known(0, digests[i])), num_blocks)
        num_blocks = self._common_end(digests, num_blocks, is_known)
        if not self._has_states:
            return num_blocks, num_blocks
        without_states, state_group = num_blocks if self._spans else 0, len(self._spans)
        while True:
            kept = next((n for n in range(num_blocks, 0, -1) if is_known(state_group, digests[n - 1])), 0)
            num_blocks = self._common_end(digests, kept, is_known)
            if num_blocks == kept:
                return num_blocks, without_states

    def blocks_of(self, num_blocks: int) -> list[tuple[int, int]]:
        """The groups and indices of all blocks, and the state, that the token after a prefix needs."""
        position = num_blocks * self._block_size
        blocks = [
            (group, index)
            for group in range(len(self._spans))
            for index in range(self.first_block(group, position), num_blocks)
        ]
        if self._has_states and num_blocks:
            blocks.append((len(self._spans), num_blocks - 1))
        return blocks

    def _common_end(self, digests: Sequence[bytes], num_blocks: int, is_known: Known) -> int:
        """The longest prefix of at most `num_blocks` blocks such that every window is known."""
        while True:
            longest = num_blocks
            for group in self._windows:
                num_blocks = self._known_end(group, digests, num_blocks, is_known)
            if num_blocks == longest:
                return num_blocks

    def _known_end(self, group: int, digests: Sequence[bytes], num_blocks: int, is_known: Known) -> int:
        """The longest prefix of at most `num_blocks` blocks such that the group has what the next token sees."""
        index = num_blocks
        while index > self.first_block(group, num_blocks * self._block_size):
            index -= 1
            if not is_known(group, digests[index]):
                # The tokens after longer prefixes, down to this one, see this block too.
                num_blocks = index
        return num_blocks
