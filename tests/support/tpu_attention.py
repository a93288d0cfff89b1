"""Paged attention on TPU in Pallas's interpreter: steps in its cache's layout, and races that fail a test."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu

from tests.support.attention_steps import Step, quantize

LANES = 128


@contextlib.contextmanager
def strict_interpreter() -> Iterator[None]:
    """Interprets TPU kernels, and fails if they race."""
    if len(os.sched_getaffinity(0)) == 1:
        pytest.skip("with one core, the interpreter waits for itself")
    # One clock for each copy: with the default, races between two copies stay unseen.
    params = pltpu.InterpretParams(detect_races=True, vector_clock_size=64)
    try:
        with pltpu.force_tpu_interpret_mode(params):
            yield
        assert interpret_pallas_call.races is None or not interpret_pallas_call.races.races_found
    finally:
        pltpu.reset_tpu_interpret_mode_state()


@dataclass(frozen=True)
class TpuStep:
    """What the kernel takes: the cache before the step, NaN where nothing was written; and the cache after it."""

    q: np.ndarray
    entries: tuple[np.ndarray, np.ndarray]
    kv_cache: np.ndarray
    rest: tuple[np.ndarray, ...]
    cache_after: np.ndarray


def tpu_step(step: Step, parts: Sequence[Sequence[np.ndarray]], widths: tuple[int, int], dtype: type) -> TpuStep:
    """From a float step, whose own cache is not looked at.

    Args:
      step: The step.
      parts: Of each of the two parts of an entry, what each request has of it, [S, K, d] float32.
      widths: Elements of each part in the cache, padded.
      dtype: The cache's type.
    """
    num_blocks, block_size = step.kv_cache.shape[:2]
    num_kv_heads, planes = parts[0][0].shape[1], sum(widths) // LANES
    is_int8 = dtype == np.int8
    shape = (num_blocks, num_kv_heads, planes * block_size + (8 if is_int8 else 0), LANES)
    before = np.zeros(shape, np.int8) if is_int8 else np.full(shape, np.nan, dtype)
    if is_int8:
        # The bytes of a float32 NaN, whose upper two of four rows say so.
        before[:, :, -8:].reshape(num_blocks, num_kv_heads, 2, 4, LANES)[..., 2:, :] = [[-64], [127]]
    after = before.copy()
    entries = [np.zeros((len(step.q), *part[0].shape[1:]), np.float32) for part in parts]
    for r, length in enumerate(step.seq_lens[: len(step.keys)]):
        first_row, num_new = step.query_start_loc[r], step.query_start_loc[r + 1] - step.query_start_loc[r]
        for p in range(length):
            block, slot = step.block_tables[r, p // block_size], p % block_size
            is_new = p >= length - num_new
            for i, part in enumerate(parts):
                if is_new:
                    entries[i][first_row + p - (length - num_new)] = part[r][p]
            for cache in [after] if is_new else [before, after]:
                _put(cache[block], [part[r][p] for part in parts], widths, p, slot, block_size)
    rest = (step.seq_lens, step.block_tables, step.query_start_loc, step.request_distribution)
    return TpuStep(step.q, (entries[0], entries[1]), before, rest, after)


def _put(
    page: np.ndarray, entry: list[np.ndarray], widths: tuple[int, int], position: int, slot: int, block_size: int
) -> None:
    """Puts the two parts of an entry, each [K, d], into a page [K, N, 128]."""
    row = np.zeros((page.shape[0], sum(widths)), page.dtype)
    for i, part in enumerate(entry):
        numbers = part
        if page.dtype == np.int8:
            numbers, scale = quantize(part)
            page[:, 4 * i - 8 : 4 * i - 4 or None, position % LANES] = scale.view(np.int8)
        row[:, i * widths[0] : i * widths[0] + part.shape[-1]] = numbers
    for plane in range(sum(widths) // LANES):
        page[:, plane * block_size + slot] = row[:, plane * LANES : (plane + 1) * LANES]


def assert_equal_caches(actual: np.ndarray, desired: np.ndarray) -> None:
    """Floats are the same. Scales are to the last bit, by which a number that is just between two may be either."""
    if desired.dtype != np.int8:
        np.testing.assert_array_equal(actual.astype(np.float32), desired.astype(np.float32))
        return
    numbers = actual[:, :, :-8].astype(int) - desired[:, :, :-8]
    assert np.abs(numbers).max() <= 1
    assert np.mean(numbers != 0) < 1e-3
    np.testing.assert_allclose(_scales(actual), _scales(desired), rtol=2e-7, atol=0)


def _scales(kv_cache: np.ndarray) -> np.ndarray:
    scales = kv_cache[:, :, -8:].reshape(*kv_cache.shape[:2], 2, 4, LANES).swapaxes(-1, -2)
    return np.ascontiguousarray(scales).view(np.float32)
