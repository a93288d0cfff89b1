"""The gated delta rule (arXiv:2412.06464), and Kimi Delta Attention, the rule with a decay per channel (2510.26692).

`reference.py` is the definition, `cpu.py` the native kernel, `chunked.py` for GPU and TPU; all take the same arguments.
"""

from __future__ import annotations

import functools

import jax

from jaxis.kernels import native_states
from jaxis.kernels.delta_rule import chunked, cpu, reference
from jaxis.kernels.delta_rule.reference import DeltaRuleOperands
from jaxis.kernels.model_axis import num_shards, repeat_groups, split_over_model
from jaxis.kernels.platform import target_platform

__all__ = ["DeltaRuleOperands", "gated_delta_rule"]


def gated_delta_rule(
    operands: DeltaRuleOperands, *, l2_norm_epsilon: float | None, scale: float
) -> tuple[jax.Array | None, jax.Array]:
    """Computes, for each token and value head: `S = decay * S; S += k^T (beta * (v - k S)); out = q S`, in float32.

    Args:
      operands: Queries, keys, values, decays, rates and states.
      l2_norm_epsilon: First divides q and k of each head by `sqrt(sum(x ** 2) + epsilon)`; None: no division.
      scale: Then multiplies q.

    Returns:
      The updated states (None without any), and [T, Hv, dv] in v's type, zeros for padding.

    Raises:
      ValueError: The operands do not fit together.
    """
    key_heads, num_heads = operands.k.shape[1], operands.v.shape[1]
    if num_heads % key_heads:
        raise ValueError(f"{key_heads} key heads do not divide {num_heads} value heads")
    operands.states.check()
    kernel = functools.partial(_gated_delta_rule, l2_norm_epsilon=l2_norm_epsilon, scale=scale)
    shards = num_shards(num_heads)
    if shards == 1:
        return kernel(operands)
    q, k = repeat_groups(operands.q, shards), repeat_groups(operands.k, shards)
    return split_over_model(kernel, operands._replace(q=q, k=k), (1, 1, 1, 1, 1, 1), (1, 1))


def _gated_delta_rule(
    operands: DeltaRuleOperands, *, l2_norm_epsilon: float | None, scale: float
) -> tuple[jax.Array | None, jax.Array]:
    if native_states.supports(operands.states):
        return cpu.gated_delta_rule(operands, l2_norm_epsilon=l2_norm_epsilon, scale=scale)
    chosen = reference if target_platform() == "cpu" else chunked
    return chosen.gated_delta_rule(operands, l2_norm_epsilon=l2_norm_epsilon, scale=scale)
