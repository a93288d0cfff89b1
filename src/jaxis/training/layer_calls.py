"""Calls of layers in training: recomputation for derivatives, gathering of weights, observation of routers."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxis.kernels.platform import target_platform
from jaxis.layers.attention_metadata import AttentionMetadata
from jaxis.layers.decoder_layer import LayerOutput
from jaxis.layers.routing import RouterObserver, Routing
from jaxis.models.common.decoder import run_layer
from jaxis.training.recompute import recomputed
from jaxis.training.sharding import GATHERED, has_shards, whole


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RouterSums:
    """Statistics of routers, summed over tokens, whose number is a float32 scalar.

    `chosen`, float32 [X], counts tokens that have each expert among their k most likely ones; `probability`, float32
    [X], is the sum of each expert's probabilities.
    """

    chosen: jax.Array
    probability: jax.Array
    num_tokens: jax.Array


@dataclass
class LayerCalls:
    """Runner of a `CausalLM`'s layers.

    Attributes:
      recompute: True to recompute layers for their derivatives.
      observes_routers: True to collect `router_sums` of the routers in the layers called so far.
      rows_axis: Name of the `jax.vmap` axis over batch rows; None without one.
    """

    recompute: bool
    observes_routers: bool
    rows_axis: str | None = None
    router_sums: list[RouterSums] = field(default_factory=list)

    def __call__(self, graph: nnx.GraphDef, state: nnx.State, *arguments: Any) -> LayerOutput:
        output, sums = _call(self.recompute, self.observes_routers, self.rows_axis, graph, state, *arguments)
        self.router_sums.extend(sums)
        return output


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _call(
    recompute: bool, observes: bool, rows_axis: str | None, graph: nnx.GraphDef, state: nnx.State, *arguments: Any
) -> Any:
    """Returns the output of a layer and the sums of its routers. Equal layers are traced once."""

    def run(state: nnx.State, kv_cache: Any, x: jax.Array, metadata: Any, *inputs: jax.Array) -> Any:
        sums: list[RouterSums] = []

        observe = None
        if observes:
            observe = _adding_to(sums, jnp.arange(len(metadata.input_positions)) < metadata.num_tokens)
        return run_layer(graph, whole(state), kv_cache, x, metadata, *inputs, observe=observe), sums

    is_paged = any(isinstance(each, AttentionMetadata) and each.scratch is not None for each in arguments)
    if recompute and target_platform() == "cpu" and not has_shards(state) and not is_paged:
        return recomputed(run, rows_axis, state, *arguments)
    if recompute:
        run = jax.checkpoint(run)
    elif has_shards(state):
        # Weights gathered from other devices are never kept.
        run = jax.checkpoint(run, policy=jax.checkpoint_policies.save_anything_except_these_names(GATHERED))
    return run(state, *arguments)


def _adding_to(sums: list[RouterSums], is_token: jax.Array) -> RouterObserver:
    def observe(routing: Routing, logits: jax.Array, _expert_ids: jax.Array) -> None:
        probabilities = jax.nn.softmax(logits, axis=-1)
        _, best = jax.lax.top_k(probabilities, routing.num_experts_per_token)
        counts = jnp.where(is_token, 1.0, 0.0)
        chosen = jnp.zeros(routing.num_experts).at[best].add(counts[:, None])
        sums.append(RouterSums(chosen, counts @ probabilities, jnp.sum(counts)))

    return observe
