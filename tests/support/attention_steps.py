"""Steps for paged attention, and what dense attention in float64 numpy makes of them."""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass
from typing import Literal

import jax
import ml_dtypes
import numpy as np

from jaxis.config.attention_span import FULL_CONTEXT, AttentionSpan
from jaxis.kernels.batch import Batch
from jaxis.kernels.paged_cache import CacheLayout, PagedCache

# (history, query tokens) of each request: decodes first, then prefills, chunks with history, and empty requests.
MIX = [(0, 1), (130, 1), (7, 1), (0, 13), (200, 71), (5, 0), (31, 1), (16, 16)]


def paged(array: jax.Array | np.ndarray, kernels: Literal["native", "any"] = "any") -> PagedCache:
    """A cache of one device in the layout of these kernels, of an array [num_blocks, ...] that has it."""
    shape = array.shape[1:]
    layout = CacheLayout(kernels, shape[0], 1, shape, np.dtype(array.dtype), (None,) * len(shape))
    return layout.cache(jax.device_put(array))


def alone(length: int, size: int, block_table: np.ndarray, *, is_decode: bool = False) -> Batch:
    """The batch of the last `size` of a request's `length` tokens."""
    lengths, starts = np.array([length], np.int32), np.array([0, size], np.int32)
    distribution = np.array([int(is_decode), 1, 1], np.int32)
    return Batch(lengths, block_table[None], starts, distribution, np.arange(length - size, length, dtype=np.int32))


@dataclass
class Step:
    """A step's operands, and each request's keys and values laid out densely, [S, K, D]."""

    q: np.ndarray
    kv_cache: np.ndarray
    seq_lens: np.ndarray
    block_tables: np.ndarray
    query_start_loc: np.ndarray
    request_distribution: np.ndarray
    keys: list[np.ndarray]
    values: list[np.ndarray]

    @property
    def batch(self) -> Batch:
        positions = np.zeros(len(self.q), np.int32)
        for length, (begin, end) in zip(self.seq_lens, itertools.pairwise(self.query_start_loc), strict=True):
            positions[begin:end] = np.arange(length - (end - begin), length)
        return Batch(self.seq_lens, self.block_tables, self.query_start_loc, self.request_distribution, positions)

    @property
    def operands(self) -> tuple[jax.Array, jax.Array, Batch]:
        return jax.device_put((self.q, self.kv_cache, self.batch))

    @property
    def num_tokens(self) -> int:
        return int(self.query_start_loc[self.request_distribution[2]])

    def expected(
        self,
        scale: float,
        span: AttentionSpan = FULL_CONTEXT,
        soft_cap: float | None = None,
        sinks: np.ndarray | None = None,
        bias: np.ndarray | None = None,
    ) -> np.ndarray:
        """Dense attention in float64: [num_tokens, H, D]."""
        sliding_window, attention_chunk_size = span.sliding_window, span.attention_chunk_size
        out = np.zeros((self.num_tokens, *self.q.shape[1:]))
        for r, (keys, values) in enumerate(zip(self.keys, self.values, strict=True)):
            begin, end = self.query_start_loc[r], self.query_start_loc[r + 1]
            for row in range(begin, end):
                position = self.seq_lens[r] - (end - row)
                first = 0 if sliding_window is None else max(0, position - sliding_window + 1)
                last = position
                if span.lookahead != 0:
                    last = len(keys) - 1 if span.lookahead is None else min(position + span.lookahead, len(keys) - 1)
                if attention_chunk_size is not None:
                    first = max(first, position - position % attention_chunk_size)
                for head in range(self.q.shape[1]):
                    kv_head = head // (self.q.shape[1] // keys.shape[1])
                    k, v = (x[first : last + 1, kv_head].astype(np.float64) for x in (keys, values))
                    scores = k @ self.q[row, head].astype(np.float64) * scale
                    if bias is not None:
                        distance = position - np.arange(first, last + 1)
                        is_biased = (distance >= 0) & (distance < bias.shape[2])
                        scores[is_biased] += bias[row, head, distance[is_biased]]
                    if soft_cap is not None:
                        scores = soft_cap * np.tanh(scores / soft_cap)
                    weights = np.exp(scores - scores.max())
                    own = None if sinks is None else sinks[head] if sinks.ndim == 1 else sinks[row, head]
                    sink = 0 if own is None else np.exp(float(own) - scores.max())
                    out[row, head] = weights @ v / (weights.sum() + sink)
        return out


def make_step(
    requests: list[tuple[int, int]],
    *,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 64,
    block_size: int = 16,
    max_blocks: int | None = None,
    pad_tokens: int = 0,
    pad_requests: int = 0,
    dtype: np.dtype = np.float32,
    seed: int = 0,
) -> Step:
    """A step of requests (history, query tokens) whose blocks are scattered and whose unowned slots are NaN.

    Leading requests of one token are declared decodes.
    """
    rng = np.random.default_rng(seed)
    seq_lens = np.array([history + queries for history, queries in requests])
    needed = -(-seq_lens // block_size)
    max_blocks = max_blocks or max(1, needed.max())
    blocks = rng.permutation(np.arange(1, needed.sum() + 4))
    kv_cache = np.full((needed.sum() + 4, block_size, 2 * num_kv_heads, head_dim), np.nan, dtype)
    # Entries past a request's own name block 0, full of NaN, as do the padding requests.
    block_tables = np.zeros((len(requests) + pad_requests, max_blocks), np.int32)
    keys, values, used = [], [], 0
    for r, length in enumerate(seq_lens):
        own = blocks[used : used + needed[r]]
        used += needed[r]
        block_tables[r, : len(own)] = own
        kv = rng.standard_normal((2, length, num_kv_heads, head_dim)).astype(dtype)
        keys.append(kv[0])
        values.append(kv[1])
        for position in range(length):
            slot = kv_cache[own[position // block_size], position % block_size]
            slot[0::2], slot[1::2] = kv[0, position], kv[1, position]
    starts = np.concatenate([[0], np.cumsum([queries for _, queries in requests])])
    num_decodes = next((i for i, (_, queries) in enumerate(requests) if queries != 1), len(requests))
    q = rng.standard_normal((int(starts[-1]) + pad_tokens, num_heads, head_dim)).astype(dtype)
    return Step(
        q,
        kv_cache,
        np.concatenate([seq_lens, np.zeros(pad_requests)]).astype(np.int32),
        block_tables,
        np.concatenate([starts, np.full(pad_requests, starts[-1])]).astype(np.int32),
        np.array([num_decodes, num_decodes, len(requests)], np.int32),
        keys,
        values,
    )


def quantize(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[..., D] -> int8 numbers, and the float32 scale [..., 1] that they are multiples of."""
    scale = np.abs(x).max(-1, keepdims=True) / np.float32(127)
    return np.round(x / np.where(scale == 0, np.float32(1), scale)).astype(np.int8), scale


def as_cached(x: np.ndarray, dtype: type) -> np.ndarray:
    """Keys or values as a cache of this type gives them back, in float32."""
    if dtype == np.int8:
        numbers, scale = quantize(x)
        return numbers * scale
    return x.astype(dtype).astype(np.float32)


def with_cache_type(step: Step, dtype: type) -> Step:
    """The step with a cache of another type, in the standard layout; its keys and values are as the cache has them."""
    if dtype == np.int8:
        numbers, scale = quantize(np.nan_to_num(step.kv_cache))
        scale[np.isnan(step.kv_cache[..., :1])] = np.nan
        kv_cache = np.concatenate([numbers, scale.view(np.int8)], axis=-1)
    else:
        kv_cache = step.kv_cache.astype(dtype)
    keys, values = ([as_cached(x, dtype) for x in xs] for xs in (step.keys, step.values))
    return dataclasses.replace(step, kv_cache=kv_cache, keys=keys, values=values)


BFLOAT16 = ml_dtypes.bfloat16
