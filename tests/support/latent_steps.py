"""Steps for latent attention: those of paged attention with one kv head, whose keys are the entries."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxis.kernels.batch import Batch
from tests.support.attention_steps import Step, as_cached, make_step, quantize

SCALE = 0.2


def make_latent_step(requests: list[tuple[int, int]], *, head_dim: int = 48, **options: Any) -> Step:
    """A step whose `keys` are each request's entries [S, 1, D]."""
    step = make_step(requests, num_kv_heads=1, head_dim=head_dim, **options)
    return dataclasses.replace(step, kv_cache=step.kv_cache[:, :, :1], values=step.keys)


def expected(step: Step, value_dim: int, dtype: type = np.float32) -> np.ndarray:
    """Dense attention in float64 to the entries as a cache of this type gives them back: [num_tokens, H, value_dim]."""
    entries = [np.concatenate([as_cached(part, dtype) for part in split(x, value_dim)], axis=-1) for x in step.keys]
    return dataclasses.replace(step, keys=entries, values=entries).expected(SCALE)[..., :value_dim]


def split(entries: np.ndarray, value_dim: int) -> tuple[np.ndarray, np.ndarray]:
    return entries[..., :value_dim], entries[..., value_dim:]


def cached(kv_cache: np.ndarray, value_dim: int, dtype: type) -> np.ndarray:
    """Entries [..., D], NaN where nothing was written -> as a cache of this type has them."""
    if dtype != np.int8:
        return kv_cache.astype(dtype)
    numbers, scales = zip(*(quantize(np.nan_to_num(part)) for part in split(kv_cache, value_dim)), strict=True)
    scales = np.where(np.isnan(kv_cache[..., :1]), np.float32(np.nan), np.concatenate(scales, axis=-1))
    return np.concatenate([*numbers, scales.view(np.int8)], axis=-1)


@dataclass(frozen=True)
class Operands:
    """Operands of `latent_attention`: the cache is as it was before the step, NaN where nothing was written."""

    q: np.ndarray
    entries: np.ndarray
    kv_cache: np.ndarray
    batch: Batch

    @classmethod
    def of(cls, step: Step, value_dim: int, dtype: type = np.float32) -> Operands:
        """From a step with a float32 cache, in which its own tokens stand already: they are taken out."""
        block_size = step.kv_cache.shape[1]
        entries = np.zeros((len(step.q), step.q.shape[-1]), np.float32)
        before = step.kv_cache.copy()
        for r, keys in enumerate(step.keys):
            rows = slice(step.query_start_loc[r], step.query_start_loc[r + 1])
            own = np.arange(step.seq_lens[r] - (rows.stop - rows.start), step.seq_lens[r])
            entries[rows] = keys[own, 0]
            before[step.block_tables[r, own // block_size], own % block_size] = np.nan
        return cls(step.q, entries, cached(before, value_dim, dtype), step.batch)

    @property
    def all(self) -> tuple[jax.Array, jax.Array, jax.Array, Batch]:
        return jax.tree.map(jnp.asarray, (self.q, self.entries, self.kv_cache, self.batch))
