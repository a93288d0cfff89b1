"""The tokens that a layer's attention reads, and the part of a sequence that its cache must keep."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar, overload

# An array of ints, NumPy's or JAX's, which this file does not import.
Positions = TypeVar("Positions")


@dataclass(frozen=True)
class AttentionSpan:
    """The tokens that a token sees: itself, and all or the nearest tokens before it; in encoders, after it too.

    Attributes:
      sliding_window: Number of tokens it sees up to itself, itself included; None for all.
      attention_chunk_size: C; it sees its own chunk of C tokens, up to itself: from p // C * C to p.
      lookahead: Number of tokens after itself that it sees; None for all of its sequence. Unless it is 0, the tokens of
        a sequence must be in one step.
    """

    sliding_window: int | None = None
    attention_chunk_size: int | None = None
    lookahead: int | None = 0

    @property
    def is_causal(self) -> bool:
        return self.lookahead == 0

    @property
    def reach(self) -> int | None:
        """The maximum number of earlier tokens that a token sees; None means all."""
        sizes = [size for size in (self.sliding_window, self.attention_chunk_size) if size is not None]
        return min(sizes) - 1 if sizes else None

    @overload
    def first_visible(self, position: int) -> int: ...
    @overload
    def first_visible(self, position: Positions) -> Positions: ...
    def first_visible(self, position: Any) -> Any:
        """The first position that the token at `position`, an int or an array, sees; never smaller for a later one."""
        maximum = max if isinstance(position, int) else position.__array_namespace__().maximum
        first = 0 * position
        if self.sliding_window is not None:
            first = maximum(first, position - self.sliding_window + 1)
        if self.attention_chunk_size is not None:
            first = maximum(first, position // self.attention_chunk_size * self.attention_chunk_size)
        return first

    @overload
    def last_visible(self, position: int, seq_len: int) -> int: ...
    @overload
    def last_visible(self, position: Positions, seq_len: Positions) -> Positions: ...
    def last_visible(self, position: Any, seq_len: Any) -> Any:
        """The last position that the token at `position`, an int or an array, sees in its sequence of `seq_len` tokens.

        It is never smaller for a later position.
        """
        if self.lookahead is None:
            return seq_len - 1 + 0 * position
        minimum = min if isinstance(position, int) else position.__array_namespace__().minimum
        return minimum(position + self.lookahead, seq_len - 1) if self.lookahead else position

    def max_step_blocks(self, max_blocks: int, block_size: int, num_tokens: int) -> int:
        """Returns the most blocks of a sequence of up to `max_blocks` that a step of `num_tokens` reads and writes."""
        if self.reach is None:
            return max_blocks
        # The most blocks that k consecutive tokens touch, wherever they begin.
        k = self.reach + num_tokens
        return min(max_blocks, (k - 2) // block_size + 2)

    def max_held_blocks(self, num_seqs: int, num_tokens: int, block_size: int, max_step_tokens: int) -> int:
        """The number of blocks that always suffices for `num_seqs` sequences that grow side by side to `num_tokens`
        each.

        A step computes `max_step_tokens` of all of them together.
        """
        whole = num_seqs * -(-num_tokens // block_size)
        if self.reach is None:
            return whole
        # A sequence with c tokens in the step touches at most (reach + c - 2) // B + 2 blocks.
        return min(whole, num_seqs * (-(-self.reach // block_size) + 2) + max_step_tokens // block_size)


FULL_CONTEXT = AttentionSpan()
WHOLE_SEQUENCE = AttentionSpan(lookahead=None)
