"""Spans against the definition of each kind of attention, token by token."""

from __future__ import annotations

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from jaxis.config.attention_span import FULL_CONTEXT, AttentionSpan

SPANS = [
    FULL_CONTEXT,
    *(AttentionSpan(window) for window in (1, 2, 4, 5, 11)),
    *(AttentionSpan(None, chunk) for chunk in (1, 4, 6, 11)),
    AttentionSpan(5, 8),
]
BLOCK_SIZE = 4

spans = pytest.mark.parametrize("span", SPANS, ids=str)


def visible(span: AttentionSpan, position: int) -> list[int]:
    window, chunk = span.sliding_window or 10**9, span.attention_chunk_size or 10**9
    return [p for p in range(position + 1) if position - p < window and p // chunk == position // chunk]


def blocks_of_step(span: AttentionSpan, start: int, stop: int) -> int:
    """Blocks with a token that the tokens from `start` to `stop` see."""
    seen = {p // BLOCK_SIZE for position in range(start, stop) for p in visible(span, position)}
    return len(seen)


@spans
def test_first_visible_and_reach(span: AttentionSpan) -> None:
    for position in range(50):
        assert span.first_visible(position) == visible(span, position)[0]
    for positions in (np.arange(40), jnp.arange(40, dtype=jnp.int32).reshape(5, 8)):
        first = span.first_visible(positions)
        assert (type(first), first.dtype, first.shape) == (type(positions), positions.dtype, positions.shape)
        assert first.ravel().tolist() == [span.first_visible(position) for position in range(40)]
    longest = max(len(visible(span, position)) for position in range(50)) - 1
    assert span.reach == (None if span == FULL_CONTEXT else longest)


@spans
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 8, 9])
def test_blocks_of_a_step_have_room_and_not_more_than_a_block_too_much(span: AttentionSpan, num_tokens: int) -> None:
    most = max(blocks_of_step(span, start, start + num_tokens) for start in range(60))
    if span != FULL_CONTEXT:
        assert (
            most <= span.max_step_blocks(1000, BLOCK_SIZE, num_tokens) <= most + (span.attention_chunk_size is not None)
        )
    assert span.max_step_blocks(3, BLOCK_SIZE, num_tokens) <= 3
    assert FULL_CONTEXT.max_step_blocks(1000, BLOCK_SIZE, num_tokens) == 1000


@spans
def test_sequences_of_a_step_never_hold_more_than_said(span: AttentionSpan) -> None:
    """Three sequences anywhere in their 40 tokens, however a step's 7 tokens are shared out."""
    limit = span.max_held_blocks(3, 40, BLOCK_SIZE, 7)
    most = {n: max(blocks_of_step(span, start, start + n) for start in range(40 - n + 1)) for n in range(1, 6)}
    held = [sum(most[n] for n in sizes) for sizes in itertools.product(range(1, 6), repeat=3) if sum(sizes) <= 7]
    assert max(held) <= limit <= 30
    assert FULL_CONTEXT.max_held_blocks(3, 40, BLOCK_SIZE, 7) == 30
    # So many tokens more and it grows no further, but for full context.
    assert span == FULL_CONTEXT or span.max_held_blocks(3, 4000, BLOCK_SIZE, 7) == span.max_held_blocks(
        3, 8000, BLOCK_SIZE, 7
    )
