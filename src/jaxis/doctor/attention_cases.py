"""Checks of paged attention: two steps of a few requests against dense attention in float64."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxis.config.attention_span import FULL_CONTEXT, AttentionSpan
from jaxis.doctor.check import Case, compare
from jaxis.kernels.batch import Batch
from jaxis.kernels.latent_attention import latent_attention, latent_cache_layout
from jaxis.kernels.paged_cache import CacheLayout, PagedCache
from jaxis.kernels.ragged_paged_attention import kv_cache_layout, ragged_paged_attention
from jaxis.parallel.mesh import logical_sharding, make_mesh

# Tokens of each request in a step: prompts first, then two decodes beside a longer chunk.
_STEPS = ((37, 5, 20), (1, 1, 30))
_NUM_DECODES = (0, 2)
_STEP_TOKENS, _STEP_REQUESTS = 64, 4
_BLOCK_SIZE, _NUM_BLOCKS, _MAX_BLOCKS = 16, 25, 8


@dataclass(frozen=True)
class _Attention:
    """Attention of some model, with H, K and D, the type of its cache, and extra scores of heads (`has_sinks`)."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    cache_dtype: DTypeLike
    span: AttentionSpan = FULL_CONTEXT
    soft_cap: float | None = None
    has_sinks: bool = False


def attention_cases(dtype: DTypeLike, tolerance: float) -> Iterator[Case]:
    """Yields checks of both kinds of attention, with activations of this type."""
    same = dtype
    kinds = {
        "head size 64": _Attention(8, 2, 64, same),
        "head size 128": _Attention(8, 2, 128, same),
        "head size 256, soft cap": _Attention(4, 1, 256, same, soft_cap=30.0),
        "head size 128, window": _Attention(8, 2, 128, same, AttentionSpan(24)),
        "head size 128, chunks": _Attention(8, 2, 128, same, AttentionSpan(None, 32)),
        "head size 64, sinks": _Attention(8, 2, 64, same, has_sinks=True),
        "head size 128, int8 cache": _Attention(8, 2, 128, jnp.int8),
    }
    for name, kind in kinds.items():
        allowed = max(tolerance, 2e-2) if kind.cache_dtype == jnp.int8 else tolerance
        yield Case("kernels", f"paged attention, {name}", functools.partial(_check_paged, kind, dtype, allowed))
    for name, cache_dtype, allowed in (("", same, tolerance), (", int8 cache", jnp.int8, max(tolerance, 2e-2))):
        run = functools.partial(_check_latent, cache_dtype, dtype, allowed)
        yield Case("kernels", f"latent attention 512 + 64{name}", run)


def _check_paged(kind: _Attention, dtype: DTypeLike, tolerance: float) -> str:
    rng = np.random.default_rng(0)
    scale = kind.head_dim**-0.5
    sinks = jnp.asarray(rng.standard_normal(kind.num_heads), dtype) if kind.has_sinks else None
    cache = _make_cache(kv_cache_layout(_BLOCK_SIZE, kind.num_kv_heads, kind.head_dim, kind.cache_dtype))

    def attend(cache: PagedCache, q: jax.Array, k: jax.Array, v: jax.Array, batch: Batch) -> tuple:
        return ragged_paged_attention(
            q, k, v, cache, batch, scale=scale, span=kind.span, soft_cap=kind.soft_cap, sinks=sinks
        )

    def draw(num_heads: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal((_STEP_TOKENS, num_heads, kind.head_dim)), dtype)

    def expect(q: np.ndarray, keys: np.ndarray, values: np.ndarray, first: int) -> np.ndarray:
        return _dense(q, keys, values, first, scale, kind, None if sinks is None else np.asarray(sinks, np.float64))

    def draw_step() -> tuple[jax.Array, jax.Array, jax.Array]:
        return draw(kind.num_heads), draw(kind.num_kv_heads), draw(kind.num_kv_heads)

    return _run_steps(attend, cache, draw_step, expect, tolerance)


def _check_latent(cache_dtype: DTypeLike, dtype: DTypeLike, tolerance: float) -> str:
    num_heads, latent, rope, scale = 16, 512, 64, 0.08
    rng = np.random.default_rng(0)
    cache = _make_cache(latent_cache_layout(_BLOCK_SIZE, latent, rope, cache_dtype))
    dense = _Attention(num_heads, 1, latent + rope, cache_dtype)

    def attend(cache: PagedCache, q: jax.Array, k: jax.Array, _: jax.Array, batch: Batch) -> tuple:
        return latent_attention(q, k[:, 0], cache, batch, value_dim=latent, scale=scale)

    def draw(num_heads: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal((_STEP_TOKENS, num_heads, latent + rope)), dtype)

    def draw_step() -> tuple[jax.Array, jax.Array, jax.Array]:
        q, entries = draw(num_heads), draw(1)
        return q, entries, entries

    def expect(q: np.ndarray, keys: np.ndarray, values: np.ndarray, first: int) -> np.ndarray:
        return _dense(q, keys, values, first, scale, dense, None)[..., :latent]

    return _run_steps(attend, cache, draw_step, expect, tolerance)


def _make_cache(layout: CacheLayout) -> PagedCache:
    shape = (_NUM_BLOCKS, *layout.shape)
    sharding = logical_sharding(make_mesh(), None, shape)
    return layout.cache(jnp.zeros(shape, layout.dtype, device=sharding))


def _run_steps(
    attend: Callable[..., tuple],
    cache: PagedCache,
    draw_step: Callable[[], tuple[jax.Array, jax.Array, jax.Array]],
    expect: Callable[[np.ndarray, np.ndarray, np.ndarray, int], np.ndarray],
    tolerance: float,
) -> str:
    """Writes and attends in each step; compares every request's rows with those expected of its tokens so far.

    `attend` maps (cache, q [T, H, D], k, v [T, K, D], batch) to the cache and [T, H, D], in one program for all
    steps. `expect` maps (q [n, H, D], keys, values [S, K, D], position of the first query) to [n, H, D].
    """
    program = jax.jit(attend, donate_argnums=0)
    num_requests = len(_STEPS[0])
    blocks = np.random.default_rng(1).permutation(np.arange(1, _NUM_BLOCKS))
    tables = np.zeros((_STEP_REQUESTS, _MAX_BLOCKS), np.int32)
    tables[:num_requests] = np.resize(blocks, (num_requests, _MAX_BLOCKS))
    keys: list[list[np.ndarray]] = [[] for _ in range(num_requests)]
    values: list[list[np.ndarray]] = [[] for _ in range(num_requests)]
    found, wanted = [], []
    for counts, num_decodes in zip(_STEPS, _NUM_DECODES, strict=True):
        q, k, v = draw_step()
        starts = [0, *itertools.accumulate(counts)]
        before = [sum(map(len, each)) for each in keys]
        positions = np.zeros(_STEP_TOKENS, np.int32)
        for r, (start, end) in enumerate(itertools.pairwise(starts)):
            positions[start:end] = before[r] + np.arange(end - start)
            keys[r].append(np.asarray(k, np.float64)[start:end])
            values[r].append(np.asarray(v, np.float64)[start:end])
        lengths = np.zeros(_STEP_REQUESTS, np.int32)
        lengths[:num_requests] = np.add(before, counts)
        locations = np.full(_STEP_REQUESTS + 1, starts[-1], np.int32)
        locations[: len(starts)] = starts
        distribution = np.array([num_decodes, num_decodes, num_requests], np.int32)
        batch = Batch(*map(jnp.asarray, (lengths, tables, locations, distribution, positions)))
        cache, out = program(cache, q, k, v, batch)
        for r, (start, end) in enumerate(itertools.pairwise(starts)):
            found.append(np.asarray(out, np.float64)[start:end])
            rows = np.asarray(q, np.float64)[start:end]
            wanted.append(expect(rows, np.concatenate(keys[r]), np.concatenate(values[r]), before[r]))
    return compare(np.concatenate(found), np.concatenate(wanted), tolerance)


def _dense(
    q: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    first: int,
    scale: float,
    kind: _Attention,
    sinks: np.ndarray | None,
) -> np.ndarray:
    """Computes attention of one request's queries [n, H, D], at positions from `first`, to [S, K, D], in float64."""
    group = kind.num_heads // kind.num_kv_heads
    keys, values = np.repeat(keys, group, axis=1), np.repeat(values, group, axis=1)
    scores = np.einsum("nhd,shd->hns", q, keys) * scale
    if kind.soft_cap is not None:
        scores = kind.soft_cap * np.tanh(scores / kind.soft_cap)
    at, key = first + np.arange(len(q)), np.arange(len(keys))
    visible = (key <= at[:, None]) & (key >= np.asarray(kind.span.first_visible(at))[:, None])
    weights = np.where(visible, np.exp(scores - scores.max(-1, keepdims=True)), 0)
    total = weights.sum(-1, keepdims=True)
    if sinks is not None:
        total = total + np.exp(sinks[:, None, None] - scores.max(-1, keepdims=True))
    return np.einsum("hns,shd->nhd", weights / total, values)
