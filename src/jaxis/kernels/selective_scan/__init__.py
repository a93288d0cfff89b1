"""Mamba's selective scan, a state space with a decay for each channel and element of its state (arXiv:2312.00752).

`reference.py` is the definition, `cpu.py` the native kernel, `chunked.py` for GPU and TPU; all take the same arguments.
"""

from __future__ import annotations

import jax

from jaxis.kernels.model_axis import num_shards, split_over_model
from jaxis.kernels.platform import target_platform
from jaxis.kernels.selective_scan import chunked, cpu, reference
from jaxis.kernels.state_slots import StateSlots

__all__ = ["selective_scan"]


def selective_scan(
    x: jax.Array,
    dt: jax.Array,
    a: jax.Array,
    b: jax.Array,
    c: jax.Array,
    d: jax.Array,
    state: jax.Array | None,
    slots: StateSlots | None,
    query_start_loc: jax.Array,
    num_requests: jax.Array,
) -> tuple[jax.Array | None, jax.Array]:
    """Computes, for each token and channel: `S = exp(dt * a) * S + dt * x * b; y = sum(S * c) + d * x`, in float32.

    Args:
      x: [T, I], a flat batch. The tokens of request r are rows query_start_loc[r] to [r + 1]; later rows are padding.
      dt: float32 [T, I], the time step, after its softplus.
      a: float32 [I, N], negative.
      b: [T, N], shared by all channels.
      c: [T, N], shared by all channels.
      d: [I].
      state: float32 [num_slots, N, I]. It is updated in place if donated. None: the requests are whole sequences, and
        the function is differentiable.
      slots: State slots that the requests read and write; None without a state.
      query_start_loc: i32 [R + 1].
      num_requests: i32 [], the number of requests that are not padding.

    Returns:
      The updated state (None without one), and y [T, I] in x's type, zeros for padding.

    Raises:
      ValueError: The arguments do not fit together.
    """
    if (state is None) != (slots is None):
        raise ValueError("a state and its slots are given together")
    operands = (x, dt, a, b, c, d, state, slots, query_start_loc, num_requests)
    if num_shards(x.shape[1]) == 1:
        return _selective_scan(*operands)
    return split_over_model(_selective_scan, operands, (1, 1, 0, None, None, 0, 2, None, None, None), (2, 1))


def _selective_scan(
    x: jax.Array,
    dt: jax.Array,
    a: jax.Array,
    b: jax.Array,
    c: jax.Array,
    d: jax.Array,
    state: jax.Array | None,
    slots: StateSlots | None,
    query_start_loc: jax.Array,
    num_requests: jax.Array,
) -> tuple[jax.Array | None, jax.Array]:
    operands = (x, dt, a, b, c, d, state, slots, query_start_loc, num_requests)
    if cpu.supports(state):
        return cpu.selective_scan(*operands)
    chosen = reference if target_platform() == "cpu" else chunked
    return chosen.selective_scan(*operands)
