"""TPU kernels in Pallas's interpreter: races that fail a test, and JAX's kernel of paged attention."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import kernel
from jax.typing import DTypeLike


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
class _Pages:
    """Pages in the form of a reference, which the kernel reshapes and bitcasts: interpreters can do that to values."""

    values: jax.Array

    @property
    def dtype(self) -> DTypeLike:
        return self.values.dtype

    def reshape(self, *shape: int) -> _Pages:
        return _Pages(self.values.reshape(*shape))

    def bitcast(self, dtype: DTypeLike) -> _Pages:
        """Joins neighbouring rows, as registers of 32 bits hold them."""
        rows, lanes = self.values.shape
        packing = jnp.dtype(dtype).itemsize // self.values.dtype.itemsize
        neighbours = self.values.reshape(rows // packing, packing, lanes).swapaxes(1, 2)
        return _Pages(jax.lax.bitcast_convert_type(neighbours, dtype))

    def __getitem__(self, index: Any) -> jax.Array:
        return self.values[index]


def make_interpretable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets JAX's kernel of paged attention run in an interpreter."""
    wait = kernel.MultiPageAsyncCopyDescriptor.wait
    monkeypatch.setattr(kernel.MultiPageAsyncCopyDescriptor, "wait", lambda self: _Pages(wait(self)[...]))
