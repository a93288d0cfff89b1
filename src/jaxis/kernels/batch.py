"""The flat batch of a step: whose tokens its rows are, and which blocks of a paged cache hold them."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class CachePlaces(NamedTuple):
    """Places of T tokens in a cache: blocks i32 [T], num_blocks for padding, and offsets in them i32 [T]."""

    block: jax.Array
    offset: jax.Array


class Batch(NamedTuple):
    """T tokens of R requests in a flat batch, without padding between requests; rows past the last one's are padding.

    Fields are arrays, or references to them inside a kernel.

    Attributes:
      seq_lens: i32 [R], the length of each request after this step.
      block_tables: i32 [R, max_blocks], the blocks that hold each request's tokens, in order; None without a cache.
      query_start_loc: i32 [R + 1]; request r's tokens are rows [r] to [r + 1] of the flat batch.
      request_distribution: i32 [3]: requests up to the first are decodes (one token each), up to the second prefills,
        up to the third either; the third is the number of requests. Requests past it are padding.
      positions: i32 [T], the position of each token in its sequence.
    """

    seq_lens: Any
    block_tables: Any
    query_start_loc: Any
    request_distribution: Any
    positions: Any

    @property
    def of_requests(self) -> tuple[Any, Any, Any, Any]:
        """Arrays that native kernels take, in their order; the positions follow from these."""
        return self[:4]

    @property
    def num_requests(self) -> jax.Array:
        """Number of requests, i32 scalar."""
        return self.request_distribution[2]

    @property
    def num_tokens(self) -> jax.Array:
        """Number of tokens of the requests, i32 scalar; later rows are padding."""
        return self.query_start_loc[self.num_requests]

    @property
    def query_lens(self) -> jax.Array:
        """Number of each request's tokens in this step, i32 [R]; 0 for padding."""
        lengths = self.query_start_loc[1:] - self.query_start_loc[:-1]
        return jnp.where(jnp.arange(lengths.shape[0]) < self.num_requests, lengths, 0)

    def query_len(self, request: jax.Array) -> jax.Array:
        """Returns the number of a request's tokens in this step; 0 for padding."""
        queries = self.query_start_loc[request + 1] - self.query_start_loc[request]
        return jnp.where(request < self.num_requests, queries, 0)

    def request_of_token(self) -> tuple[jax.Array, jax.Array]:
        """Returns each token's request i32 [T], the last request's for padding, and bool [T]: False for padding."""
        return request_of_token(self.query_start_loc, self.num_requests, len(self.positions))

    def places(self, block_size: int, num_blocks: int) -> CachePlaces:
        """Returns the tokens' places in a cache of this shape."""
        request, valid = self.request_of_token()
        index = jnp.minimum(self.positions // block_size, self.block_tables.shape[1] - 1)
        block = jnp.where(valid, self.block_tables[request, index], num_blocks)
        return CachePlaces(block, self.positions % block_size)


def request_of_token(
    query_start_loc: jax.Array, num_requests: jax.Array, num_tokens: int
) -> tuple[jax.Array, jax.Array]:
    """Returns `Batch.request_of_token` of T tokens, for kernels that read no positions."""
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    # Compares with all rather than searches: one fusion, where a search is a loop.
    request = jnp.searchsorted(query_start_loc[1:], token, side="right", method="compare_all").astype(jnp.int32)
    valid = token < query_start_loc[num_requests]
    return jnp.minimum(request, query_start_loc.shape[0] - 2), valid


def sees_in_request(request: jax.Array, valid: jax.Array) -> jax.Array:
    """Returns bool [T, T], True where a token sees another: of its own request, up to itself, and no padding.

    Takes the results of `Batch.request_of_token`, for a step that has all tokens of its requests.
    """
    token = jnp.arange(request.shape[0])
    return (request[:, None] == request) & (token[:, None] >= token) & valid
