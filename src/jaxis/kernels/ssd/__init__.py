"""Mamba2's recurrence, a selective state space with one decay per head (arXiv:2405.21060).

`reference.py` is the definition, `cpu.py` the native kernel, `chunked.py` for GPU and TPU; all take the same arguments.
"""

from __future__ import annotations

import jax

from jaxis.kernels.model_axis import num_shards, repeat_groups, split_over_model
from jaxis.kernels.platform import target_platform
from jaxis.kernels.ssd import chunked, cpu, reference
from jaxis.kernels.state_slots import StateSlots

__all__ = ["ssd"]


def ssd(
    x: jax.Array,
    dt: jax.Array,
    a: jax.Array,
    b: jax.Array,
    c: jax.Array,
    d: jax.Array | None,
    state: jax.Array | None,
    slots: StateSlots | None,
    query_start_loc: jax.Array,
    num_requests: jax.Array,
) -> tuple[jax.Array | None, jax.Array]:
    """Computes, for each token and head: `S = exp(dt * a) * S + (dt * x) b^T; y = S c + d * x`, in float32.

    Args:
      x: [T, H, P], a flat batch. The tokens of request r are rows query_start_loc[r] to [r + 1]; later ones are
        padding.
      dt: float32 [T, H], the time step, after its softplus.
      a: float32 [H], negative.
      b: [T, G, N]; H / G consecutive heads share a group.
      c: [T, G, N].
      d: [H]; None for zeros.
      state: float32 [num_slots, H, P, N]. It is updated in place if donated. None: the requests are whole sequences,
        and the function is differentiable.
      slots: State slots that the requests read and write; None without a state.
      query_start_loc: i32 [R + 1].
      num_requests: i32 [], the number of requests that are not padding.

    Returns:
      The updated state (None without one), and y [T, H, P] in x's type, zeros for padding.

    Raises:
      ValueError: The arguments do not fit together.
    """
    if x.shape[1] % b.shape[1]:
        raise ValueError(f"{b.shape[1]} groups do not divide {x.shape[1]} heads")
    if (state is None) != (slots is None):
        raise ValueError("a state and its slots are given together")
    shards = num_shards(x.shape[1])
    if shards > 1:
        b, c = repeat_groups(b, shards), repeat_groups(c, shards)
    operands = (x, dt, a, b, c, d, state, slots, query_start_loc, num_requests)
    if shards == 1:
        return _ssd(*operands)
    return split_over_model(_ssd, operands, (1, 1, 0, 1, 1, 0, 1, None, None, None), (1, 1))


def _ssd(
    x: jax.Array,
    dt: jax.Array,
    a: jax.Array,
    b: jax.Array,
    c: jax.Array,
    d: jax.Array | None,
    state: jax.Array | None,
    slots: StateSlots | None,
    query_start_loc: jax.Array,
    num_requests: jax.Array,
) -> tuple[jax.Array | None, jax.Array]:
    operands = (x, dt, a, b, c, d, state, slots, query_start_loc, num_requests)
    if cpu.supports(state):
        return cpu.ssd(*operands)
    chosen = reference if target_platform() == "cpu" else chunked
    return chosen.ssd(*operands)
