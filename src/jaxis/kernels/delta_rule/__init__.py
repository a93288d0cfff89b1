"""The gated delta rule (arXiv:2412.06464), and Kimi Delta Attention, the rule with a decay per channel (2510.26692).

`reference.py` is the definition, `cpu.py` the native kernel, `chunked.py` for GPU and TPU; all take the same arguments.
"""

from __future__ import annotations

import functools

import jax

from jaxis.kernels.delta_rule import chunked, cpu, reference
from jaxis.kernels.model_axis import num_shards, repeat_groups, split_over_model
from jaxis.kernels.platform import target_platform
from jaxis.kernels.state_slots import StateSlots

__all__ = ["gated_delta_rule"]


def gated_delta_rule(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array,
    state: jax.Array | None,
    slots: StateSlots | None,
    query_start_loc: jax.Array,
    num_requests: jax.Array,
    *,
    l2_norm_epsilon: float | None,
    scale: float,
) -> tuple[jax.Array | None, jax.Array]:
    """Computes, for each token and value head: `S = decay * S; S += k^T (beta * (v - k S)); out = q S`, in float32.

    Args:
      q: [T, Hk, dk], a flat batch. The tokens of request r are rows query_start_loc[r] to [r + 1]; later ones are
        padding.
      k: [T, Hk, dk].
      v: [T, Hv, dv]; Hv / Hk consecutive value heads share a key head.
      log_decay: float32 [T, Hv], the logarithm of the decay, at most 0; [T, Hv, dk] for a decay of each row of S.
      beta: float32 [T, Hv].
      state: float32 [num_slots, Hv, dk, dv]. It is updated in place if donated. None: the requests are whole sequences,
        and the function is differentiable.
      slots: State slots that the requests read and write; None without a state.
      query_start_loc: i32 [R + 1].
      num_requests: i32 [], the number of requests that are not padding.
      l2_norm_epsilon: First divides q and k of each head by `sqrt(sum(x ** 2) + epsilon)`; None: no division.
      scale: Then multiplies q.

    Returns:
      The updated state (None without one), and [T, Hv, dv] in v's type, zeros for padding.

    Raises:
      ValueError: The arguments do not fit together.
    """
    if v.shape[1] % k.shape[1]:
        raise ValueError(f"{k.shape[1]} key heads do not divide {v.shape[1]} value heads")
    if (state is None) != (slots is None):
        raise ValueError("a state and its slots are given together")
    kernel = functools.partial(_gated_delta_rule, l2_norm_epsilon=l2_norm_epsilon, scale=scale)
    shards = num_shards(v.shape[1])
    if shards > 1:
        q, k = repeat_groups(q, shards), repeat_groups(k, shards)
    operands = (q, k, v, log_decay, beta, state, slots, query_start_loc, num_requests)
    if shards == 1:
        return kernel(*operands)
    return split_over_model(kernel, operands, (1, 1, 1, 1, 1, 1, None, None, None), (1, 1))


def _gated_delta_rule(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array,
    state: jax.Array | None,
    slots: StateSlots | None,
    query_start_loc: jax.Array,
    num_requests: jax.Array,
    *,
    l2_norm_epsilon: float | None,
    scale: float,
) -> tuple[jax.Array | None, jax.Array]:
    operands = (q, k, v, log_decay, beta, state, slots, query_start_loc, num_requests)
    if cpu.supports(state):
        return cpu.gated_delta_rule(*operands, l2_norm_epsilon=l2_norm_epsilon, scale=scale)
    chosen = reference if target_platform() == "cpu" else chunked
    return chosen.gated_delta_rule(*operands, l2_norm_epsilon=l2_norm_epsilon, scale=scale)
