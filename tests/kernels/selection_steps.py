"""Steps for the selection of tokens by an indexer, and a definition to compare with in numpy."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from jaxis.kernels.batch import Batch
from tests.support.attention_steps import alone, quantize
from tests.support.latent_steps import Operands, make_latent_step

NUM_HEADS = 6


@dataclass(frozen=True)
class SelectionStep:
    """Operands of `select_tokens`, and each request's keys [S, D]; the cache is NaN where nothing was written."""

    q: np.ndarray
    weights: np.ndarray
    operands: Operands
    keys: list[np.ndarray]

    @classmethod
    def make(cls, requests: list[tuple[int, int]], *, head_dim: int = 32, dtype: type = np.float32) -> SelectionStep:
        """Requests of (tokens in the cache, tokens of the step). Numbers are small and whole: sums are exact in any
        order and every type, and many scores are equal."""
        rng = np.random.default_rng(0)
        step = make_latent_step(
            requests, num_heads=NUM_HEADS, head_dim=head_dim, block_size=8, pad_tokens=5, pad_requests=2
        )
        known = ~np.isnan(step.kv_cache)
        keys = [rng.integers(-1, 2, size=x.shape).astype(np.float32) for x in step.keys]
        kv_cache = np.full_like(step.kv_cache, np.nan)
        for r, own in enumerate(keys):
            position = np.arange(len(own))
            kv_cache[step.block_tables[r, position // 8], position % 8] = own
        assert (known == ~np.isnan(kv_cache)).all()
        step = dataclasses.replace(step, keys=keys, values=keys, kv_cache=kv_cache)
        operands = Operands.of(step, head_dim, np.float32)
        before = _cached(operands.kv_cache[:, :, 0], dtype)
        q = rng.integers(-1, 2, size=step.q.shape).astype(np.float32)
        weights = rng.integers(-2, 3, size=step.q.shape[:2]).astype(np.float32)
        return cls(q, weights, dataclasses.replace(operands, kv_cache=before), [x[:, 0] for x in keys])

    @property
    def all(self) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, Batch]:
        """The operands of `select_tokens`, in its order."""
        _, keys, cache, batch = self.operands.all
        return jnp.asarray(self.q), jnp.asarray(self.weights), keys, cache, batch

    def expected(self, num_selected: int, always: tuple[int, int] = (0, 0)) -> np.ndarray:
        """i32 [T, K], by a stable sort of the scores in float64, infinite for the first and last `always`."""
        seq_lens, _, query_start_loc = self.operands.batch[:3]
        selected = np.full((len(self.q), num_selected), -1, np.int32)
        for r, keys in enumerate(self.keys):
            begin, end = query_start_loc[r], query_start_loc[r + 1]
            for row in range(begin, end):
                context = keys[: seq_lens[r] - (end - row) + 1].astype(np.float64)
                scores = self.weights[row] @ np.maximum(self.q[row].astype(np.float64) @ context.T, 0)
                scores[: always[0]] = scores[len(scores) - min(always[1], len(scores)) :] = np.inf
                best = np.sort(np.argsort(-scores, kind="stable")[:num_selected])
                selected[row, : len(best)] = best
        return selected

    def part(self, request: int, begin: int, end: int, kv_cache: np.ndarray) -> SelectionStep:
        """Tokens `begin` to `end` of those of one request, alone."""
        seq_lens, block_tables, query_start_loc = self.operands.batch[:3]
        first, last = query_start_loc[request], query_start_loc[request + 1]
        rows = slice(first + begin, first + end)
        length = seq_lens[request] - (last - first - end)
        part = dataclasses.replace(
            self.operands,
            q=self.operands.q[rows],
            entries=self.operands.entries[rows],
            kv_cache=kv_cache,
            batch=alone(length, end - begin, block_tables[request], is_decode=end - begin == 1),
        )
        return SelectionStep(self.q[rows], self.weights[rows], part, [self.keys[request]])


def _cached(keys: np.ndarray, dtype: type) -> np.ndarray:
    """Keys [..., D], NaN where nothing was written -> as a cache of this type has them."""
    if dtype != np.int8:
        return keys.astype(dtype)
    numbers, scales = quantize(np.nan_to_num(keys))
    scales = np.where(np.isnan(keys[..., :1]), np.float32(np.nan), scales)
    return np.concatenate([numbers, scales.view(np.int8)], axis=-1)
