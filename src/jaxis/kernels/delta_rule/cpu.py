"""The gated delta rule on CPU: a native kernel that computes token by token, so that bits do not depend on steps."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxis.kernels import native_states
from jaxis.kernels.delta_rule import reference
from jaxis.kernels.delta_rule.reference import DeltaRuleOperands


def gated_delta_rule(
    operands: DeltaRuleOperands, *, l2_norm_epsilon: float | None, scale: float
) -> tuple[jax.Array | None, jax.Array]:
    options = {"l2_norm_epsilon": l2_norm_epsilon, "scale": scale}
    kernel, definition = (functools.partial(each, **options) for each in (_kernel, reference.gated_delta_rule))
    empty = jax.ShapeDtypeStruct((0, *operands.state_shape), jnp.float32)
    return native_states.in_place_or_whole(kernel, definition, operands, empty)


def _kernel(operands: DeltaRuleOperands, *, l2_norm_epsilon: float | None, scale: float) -> tuple[jax.Array, jax.Array]:
    q, k, v, log_decay, beta, states = operands
    inputs = tuple(x.astype(jnp.float32) for x in (q, k, v, log_decay.reshape(*v.shape[:2], -1), beta))
    state, out = native_states.call(
        "gated_delta_rule",
        inputs,
        states,
        v.shape,
        has_norm=l2_norm_epsilon is not None,
        epsilon=np.float32(l2_norm_epsilon or 0),
        scale=np.float32(scale),
    )
    return state, out.astype(v.dtype)
