"""Search for the longest known prefix of a sequence, given which blocks of each group are known."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from jaxis.config.attention_span import FULL_CONTEXT, AttentionSpan

Known = Callable[[int, bytes], bool]
"""Function of a group's index and a digest that returns whether that block is known."""


class PrefixSearch:
    """Finds the longest prefix whose next token finds, in every group, all blocks that it sees.

    In layers with full context a token sees all blocks of the prefix; in layers with a window, the last blocks.
    Recurrent layers need the state after the prefix's last block. States count as one more group, after those of
    `spans`.

    Args:
      spans: The span of each group; full context, if any, must come first.
      block_size: Tokens in a block (B).
      has_states: True if there are recurrent layers.
    """

    def __init__(self, spans: Sequence[AttentionSpan], block_size: int, *, has_states: bool) -> None:
        self._spans = tuple(spans)
        self._block_size = block_size
        self._has_states = has_states
        self._has_full_context = self._spans[:1] == (FULL_CONTEXT,)
        self._windows = range(1 if self._has_full_context else 0, len(self._spans))

    def first_block(self, group: int, position: int) -> int:
        """Returns the first block that a token at `position` or later sees in a group."""
        return self._spans[group].first_visible(position) // self._block_size

    def longest(self, digests: Sequence[bytes], is_known: Known) -> tuple[int, int]:
        """Returns the length in blocks of the longest known prefix, and its length if every state were known.

        The prefix may have the blocks named by `digests`.
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
        """Returns the group and index of each block, and of the state, that the token after a prefix needs."""
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
        """Returns the longest prefix of at most `num_blocks` blocks for which every window is known."""
        while True:
            longest = num_blocks
            for group in self._windows:
                num_blocks = self._known_end(group, digests, num_blocks, is_known)
            if num_blocks == longest:
                return num_blocks

    def _known_end(self, group: int, digests: Sequence[bytes], num_blocks: int, is_known: Known) -> int:
        """Returns the longest prefix of at most `num_blocks` blocks whose next token sees only known blocks of the
        group."""
        index = num_blocks
        while index > self.first_block(group, num_blocks * self._block_size):
            index -= 1
            if not is_known(group, digests[index]):
                # The tokens after longer prefixes, down to this one, see this block too.
                num_blocks = index
        return num_blocks
