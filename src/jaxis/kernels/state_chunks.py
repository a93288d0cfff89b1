"""A recurrence over the tokens of a flat batch, chunk by chunk, for devices that multiply matrices fast.

Requests with one token in the step, decodes, take that step together. The tokens of the others go in chunks, one after
the other; a loop whose length is data serves every mix of requests. Chunks begin at a request's first token of the step
and at the token after which its state is kept. Numbers thus depend, by rounding, on a request's split into steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxis.kernels.batch import request_of_token
from jaxis.kernels.state_slots import RecurrentStates, load_slots, store_slots


def sums_between(log_decay: jax.Array) -> jax.Array:
    """Returns at [i, j, ...] the sum of log decays [C, ...] over the tokens after j up to i; -inf where i < j.

    Each is summed by itself: as a difference of two sums from the chunk's beginning, it would lose digits.
    """
    num_rows = log_decay.shape[0]
    row = jnp.arange(num_rows)
    wide = (..., *[None] * (log_decay.ndim - 1))
    after = (row[:, None] > row)[wide]
    sums = jnp.cumsum(jnp.where(after, log_decay[:, None], 0), axis=0)
    return jnp.where((row[:, None] >= row)[wide], sums, -jnp.inf)


class TokenChunk(NamedTuple):
    """Some of a request's tokens, as scalars i32 [] or bool []."""

    request: jax.Array
    row: jax.Array  # the first row
    num_tokens: jax.Array
    is_first: jax.Array  # True if the request begins here
    is_last: jax.Array  # True if it ends here
    is_kept: jax.Array  # True if the state after the chunk is kept


class TokenChunks(NamedTuple):
    """The chunks of a step. Each request has two parts, before and after the token whose state is kept."""

    starts: jax.Array  # i32 [2 R], the first row of each part
    sizes: jax.Array  # i32 [2 R], the tokens of each part
    ends: jax.Array  # i32 [2 R], the number of chunks up to the end of each part
    chunk_size: int

    @classmethod
    def of(cls, states: RecurrentStates, chunk_size: int) -> TokenChunks:
        slots, starts = states.slots, states.query_start_loc[:-1]
        lengths = jnp.where(states.num_tokens == 1, 0, states.num_tokens)
        before = lengths if slots is None else jnp.where(slots.is_kept(lengths), slots.keep_after, lengths)
        sizes = jnp.stack([before, lengths - before], axis=1).reshape(-1)
        starts = jnp.stack([starts, starts + before], axis=1).reshape(-1)
        return cls(starts, sizes, jnp.cumsum(-(-sizes // chunk_size)), chunk_size)

    def at(self, index: jax.Array) -> TokenChunk:
        """Returns chunk number `index`, i32 []; after the last one, a chunk without tokens."""
        part = jnp.minimum(jnp.sum(self.ends <= index), self.ends.shape[0] - 1)
        first = jnp.where(part == 0, 0, self.ends[part - 1])
        done = (index - first) * self.chunk_size
        num_tokens = jnp.clip(self.sizes[part] - done, 0, self.chunk_size)
        ends_part = num_tokens == self.sizes[part] - done
        is_second = part % 2 == 1
        return TokenChunk(
            request=part // 2,
            row=self.starts[part] + done,
            num_tokens=num_tokens,
            is_first=~is_second & (done == 0),
            is_last=ends_part & (is_second | (self.sizes[jnp.minimum(part + 1, self.sizes.shape[0] - 1)] == 0)),
            is_kept=ends_part & ~is_second,
        )


def run_chunks(
    chunk_step: Callable[[jax.Array, Any, jax.Array], tuple[jax.Array, jax.Array]],
    token_step: Callable[[jax.Array, Any], tuple[jax.Array, jax.Array]],
    states: RecurrentStates,
    shape: tuple[int, ...],
    inputs: Any,
    out_shape: tuple[int, ...],
    *,
    chunk_size: int,
) -> tuple[jax.Array | None, jax.Array]:
    """Runs a recurrence from each request's state; returns the updated state (None without one), and [T, *out_shape].

    Args:
      chunk_step: Maps a state, the inputs [C, ...] of a chunk, and its number of tokens that are not padding, to the
        state after the chunk and its outputs [C, *out_shape]. The inputs of padding must not matter.
      token_step: Maps a state and one token's inputs to the state after the token and its output.
      states: States of the requests.
      shape: Shape of one state.
      inputs: Pytree of arrays [T, ...].
      out_shape: Shape of one token's output, which is zeros for padding.
      chunk_size: C.
    """
    num_tokens = jax.tree.leaves(inputs)[0].shape[0]
    slots, query_start_loc = states.slots, states.query_start_loc
    chunks = TokenChunks.of(states, chunk_size)
    padded = jax.tree.map(lambda x: jnp.pad(x, [(0, chunk_size), *[(0, 0)] * (x.ndim - 1)]), inputs)

    def body(index: jax.Array, carry: tuple[jax.Array, jax.Array | None, jax.Array]) -> tuple[Any, ...]:
        running, state, out = carry
        chunk = chunks.at(index)
        read = jnp.int32(-1) if slots is None else slots.read[chunk.request]
        first = jnp.zeros(shape, jnp.float32) if state is None else load_slots(state, read).astype(jnp.float32)
        rows = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, chunk.row, chunk_size), padded)
        running, rows_out = chunk_step(jnp.where(chunk.is_first, first, running), rows, chunk.num_tokens)
        if state is not None and slots is not None:
            state = store_slots(state, jnp.where(chunk.is_last, slots.write[chunk.request], -1), running)
            state = store_slots(state, jnp.where(chunk.is_kept, slots.keep[chunk.request], -1), running)
        # Later chunks overwrite the rows behind this one; a chunk without tokens is behind all rows.
        row = jnp.where(chunk.num_tokens > 0, chunk.row, num_tokens)
        return running, state, jax.lax.dynamic_update_slice_in_dim(out, rows_out, row, 0)

    out = jnp.zeros((num_tokens + chunk_size, *out_shape), jnp.float32)
    # Without a state the length is a constant, so that the loop can be differentiated: each request has at most one
    # chunk that is not full.
    most = -(-num_tokens // chunk_size) + query_start_loc.shape[0] - 1
    count = most if states.array is None else chunks.ends[-1]
    _, state, out = jax.lax.fori_loop(0, count, body, (jnp.zeros(shape, jnp.float32), states.array, out))
    state, singles = _single_tokens(token_step, states._replace(array=state), shape, inputs)
    request, valid = request_of_token(query_start_loc, states.num_requests, num_tokens)
    is_single = (states.num_tokens == 1)[request]
    wide = (slice(None), *[None] * len(out_shape))
    return state, jnp.where(valid[wide], jnp.where(is_single[wide], singles[request], out[:num_tokens]), 0)


def _single_tokens(
    token_step: Callable[[jax.Array, Any], tuple[jax.Array, jax.Array]],
    states: RecurrentStates,
    shape: tuple[int, ...],
    inputs: Any,
) -> tuple[jax.Array | None, jax.Array]:
    """Returns the updated state, and outputs [R, ...], which are meaningful for requests with one token."""
    state, slots, starts, lengths = states.array, states.slots, states.query_start_loc[:-1], states.num_tokens
    rows = jax.tree.map(lambda x: x[jnp.minimum(starts, x.shape[0] - 1)], inputs)
    if state is None or slots is None:
        return None, jax.vmap(token_step)(jnp.zeros((starts.shape[0], *shape), jnp.float32), rows)[1]
    is_single = lengths == 1
    before = load_slots(state, jnp.where(is_single, slots.read, -1)).astype(jnp.float32)
    after, out = jax.vmap(token_step)(before, rows)
    state = store_slots(state, jnp.where(is_single, slots.write, -1), after)
    return store_slots(state, jnp.where(is_single & slots.is_kept(lengths), slots.keep, -1), after), out
