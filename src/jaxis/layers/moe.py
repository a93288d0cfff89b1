from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxis.kernels.gates import gated
from jaxis.kernels.materialize import materialize
from jaxis.kernels.weights import GatedUnit
from jaxis.layers import leaves
from jaxis.layers.attention_metadata import AttentionMetadata
from jaxis.layers.experts import StackLayout
from jaxis.layers.glu import GLU
from jaxis.layers.linear import JaxLinear
from jaxis.layers.mlp import FeedForward, GatedMLP, activation_function
from jaxis.layers.module import JaxModule
from jaxis.layers.routing import Routing
from jaxis.layers.scope import LayerScope, never_quantized


class SparseMoE(JaxModule):
    """`experts(x)` of the experts that the router chooses, plus `shared_experts(x)`, if any, of every token.

    Args:
      intermediate_size: F of one expert; None means config.json's `moe_intermediate_size`.
      gated_unit: Gated unit of the experts; None means the plain GLU with config.json's `hidden_act`.
      use_bias: True if router and experts have biases.
      use_selection_bias: True if the router has a bias for choosing only, as in `JaxRouter`.
      use_token_ids: True if experts are chosen by token ids, as in `HashRouter`; calls then take them, too.
      stack_layout: Layout of tensors that hold all experts, as in `JaxExperts`.
      shared_size: F of a `shared_experts` with the experts' unit; 0 for none.
      shared_experts: Another block of every token; None for that of `shared_size`.
      use_shared_gate: True for a linear layer `shared_expert_gate` [1, E] whose sigmoid multiplies the shared block's
        output.
      latent_size: Features of the experts' input and output: `fc1_latent_proj` maps x to them, and `fc2_latent_proj`
        maps the experts' sum back. None means the features of x, without such layers.
      use_latent_norm: True for an RMS norm `latent_norm` of the experts' sum before it is mapped back.

    Raises:
      ConfigError: The activation is unknown.
    """

    def __init__(
        self,
        scope: LayerScope,
        routing: Routing,
        *,
        intermediate_size: int | None = None,
        gated_unit: GatedUnit | None = None,
        use_bias: bool = False,
        use_selection_bias: bool = False,
        use_token_ids: bool = False,
        stack_layout: StackLayout | None = None,
        shared_size: int = 0,
        shared_experts: FeedForward | None = None,
        use_shared_gate: bool = False,
        latent_size: int | None = None,
        use_latent_norm: bool = False,
    ) -> None:
        unit = gated_unit or GLU(activation_function(scope.config.get("hidden_act", "silu")))
        if use_token_ids:
            self.gate = leaves.hash_router(scope / "gate", routing)
        else:
            self.gate = leaves.router(scope / "gate", routing, use_bias=use_bias, use_selection_bias=use_selection_bias)
        self.experts = leaves.experts(
            scope / "experts",
            routing,
            scope.config["moe_intermediate_size"] if intermediate_size is None else intermediate_size,
            gated_unit=unit,
            hidden_size=latent_size,
            use_bias=use_bias,
            stack_layout=stack_layout,
        )
        self.fc1_latent_proj = self.fc2_latent_proj = self.latent_norm = None
        if latent_size is not None:
            size: int = scope.config["hidden_size"]
            into, out_of = scope / "fc1_latent_proj", scope / "fc2_latent_proj"
            self.fc1_latent_proj = leaves.linear(into, size, latent_size, axes=(None, "embed"))
            self.fc2_latent_proj = leaves.linear(out_of, latent_size, size, axes=("embed", None))
            self.latent_norm = leaves.rms_norm(scope / "latent_norm", latent_size) if use_latent_norm else None
        if shared_size:
            shared_experts = GatedMLP(scope / "shared_experts", intermediate_size=shared_size, gated_unit=gated_unit)
        self.shared_experts = shared_experts
        self.shared_expert_gate = _gate(scope / "shared_expert_gate") if use_shared_gate else None

    def __call__(self, x: jax.Array, metadata: AttentionMetadata | None = None, *token_ids: jax.Array) -> jax.Array:
        expert_ids, expert_weights = self.gate(x, *token_ids)
        hidden = x if self.fc1_latent_proj is None else self.fc1_latent_proj(x)
        y = self.experts(hidden, expert_ids, expert_weights, metadata)
        if self.gate.routing.num_identity:
            is_identity = expert_ids >= self.experts.num_experts
            weight = jnp.where(is_identity, expert_weights, 0).sum(-1, keepdims=True)
            y = (y.astype(jnp.float32) + materialize(weight * hidden.astype(jnp.float32))).astype(y.dtype)
        if self.latent_norm is not None:
            y = self.latent_norm(y)
        if self.fc2_latent_proj is not None:
            y = self.fc2_latent_proj(y)
        if self.shared_experts is None:
            return y
        shared = self.shared_experts(x, metadata)
        if self.shared_expert_gate is not None:
            shared = gated(shared, self.shared_expert_gate(x), "sigmoid")
        return y + shared


class SharedExpertMoE(JaxModule):
    """`experts(x)` of the experts that a `SharedExpertRouter` chooses, plus `shared_experts(x)`, all with its weights.

    `routing` has `num_shared` shared experts. Other arguments are those of `SparseMoE`.
    """

    def __init__(
        self, scope: LayerScope, *, routing: Routing, intermediate_size: int, stack_layout: StackLayout | None
    ) -> None:
        unit = GLU(activation_function(scope.config.get("hidden_act", "silu")))
        every = Routing(num_experts=routing.num_shared, num_experts_per_token=routing.num_shared)
        self.gate = leaves.router(scope / "gate", routing, use_selection_bias=True)
        self.experts, self.shared_experts = (
            leaves.experts(scope / name, each, intermediate_size, gated_unit=unit, stack_layout=stack_layout)
            for name, each in (("experts", routing), ("shared_experts", every))
        )

    def __call__(self, x: jax.Array, metadata: AttentionMetadata | None = None) -> jax.Array:
        expert_ids, weights = self.gate(x)
        num_chosen, num_shared = expert_ids.shape[1], self.shared_experts.num_experts
        every = jnp.broadcast_to(jnp.arange(num_shared, dtype=expert_ids.dtype), (len(x), num_shared))
        y = self.experts(x, expert_ids, weights[:, :num_chosen], metadata)
        return y + self.shared_experts(x, every, weights[:, num_chosen:], metadata)


def _gate(scope: LayerScope) -> JaxLinear:
    """Creates a layer with one output; never quantized, like routers."""
    return leaves.linear(never_quantized(scope), scope.config["hidden_size"], 1, axes=(None, "embed"))
