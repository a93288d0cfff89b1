"""The sparse feed-forward block: a router, its experts, and shared experts that every token goes through."""

from __future__ import annotations

import jax

from jaxis.kernels.gates import gated
from jaxis.kernels.weights import GatedUnit
from jaxis.layers import leaves
from jaxis.layers.experts import StackLayout
from jaxis.layers.glu import GLU
from jaxis.layers.linear import JaxLinear
from jaxis.layers.mlp import FeedForward, activation_function
from jaxis.layers.module import JaxModule, NamedByCheckpoint, get_child, set_child
from jaxis.layers.routing import JaxRouter, Routing, selection_bias
from jaxis.layers.scope import LayerScope, never_quantized

ROUTER_BIAS = "gate.e_score_correction_bias"
"""DeepSeek V3's name of the selection bias, which others have taken over."""


class SparseMoE(JaxModule):
    """`experts(x)` of the experts that the router chooses, plus `shared_experts(x)` if there are any.

    Args:
      scope: The layer's scope.
      routing: How experts are chosen.
      intermediate_size: F of one expert.
      gated_unit: None means the plain GLU with config.json's `hidden_act`.
      use_bias: Whether router and experts have biases.
      stack_layout: See `JaxExperts`.
      shared_experts: The block that every token goes through; None for none.
      shared_gate: The name of a linear layer [1, E] whose sigmoid multiplies the shared block's output; None for none.
      router_name, shared_experts_name: Their names in the checkpoint.
      latent_size: The experts' features in and out: `fc1_latent_proj` maps x to them, and `fc2_latent_proj` maps the
        experts' sum back. None means those of x, without such layers.
      selection_bias_name: The name of the bias [X] that is added to scores for choosing only; None for none.

    Names are relative to this block, and dotted where the checkpoint has a module around what they name.

    Raises:
      ConfigError: The activation is unknown.
    """

    shared = NamedByCheckpoint[FeedForward | None]("_shared_experts_name")

    def __init__(
        self,
        scope: LayerScope,
        *,
        routing: Routing,
        intermediate_size: int,
        gated_unit: GatedUnit | None = None,
        use_bias: bool = False,
        stack_layout: StackLayout | None = None,
        shared_experts: FeedForward | None = None,
        shared_gate: str | None = None,
        router_name: str = "gate",
        shared_experts_name: str = "shared_experts",
        selection_bias_name: str | None = None,
        latent_size: int | None = None,
    ) -> None:
        unit = gated_unit or GLU(activation_function(scope.config.get("hidden_act", "silu")))
        self._router_name, self._shared_experts_name = router_name, shared_experts_name
        self._shared_gate_name, self._selection_bias_name = shared_gate, selection_bias_name
        set_child(self, router_name, leaves.router(scope / router_name, routing, use_bias=use_bias))
        self.experts = leaves.experts(
            scope / "experts",
            routing,
            intermediate_size,
            gated_unit=unit,
            hidden_size=latent_size,
            use_bias=use_bias,
            stack_layout=stack_layout,
        )
        self.fc1_latent_proj = self.fc2_latent_proj = None
        if latent_size is not None:
            size: int = scope.config["hidden_size"]
            into, out_of = scope / "fc1_latent_proj", scope / "fc2_latent_proj"
            self.fc1_latent_proj = leaves.linear(into, size, latent_size, axes=(None, "embed"))
            self.fc2_latent_proj = leaves.linear(out_of, latent_size, size, axes=("embed", None))
        set_child(self, shared_experts_name, shared_experts)
        if selection_bias_name is not None:
            set_child(self, selection_bias_name, selection_bias(scope.rngs, routing))
        if shared_gate is not None:
            set_child(self, shared_gate, _gate(scope / shared_gate))

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [T, E] -> [T, E]."""
        router: JaxRouter = get_child(self, self._router_name)
        if self._selection_bias_name is None:
            expert_ids, expert_weights = router(x)
        else:
            expert_ids, expert_weights = router(x, get_child(self, self._selection_bias_name)[...])
        y = self.experts(x if self.fc1_latent_proj is None else self.fc1_latent_proj(x), expert_ids, expert_weights)
        if self.fc2_latent_proj is not None:
            y = self.fc2_latent_proj(y)
        if self.shared is None:
            return y
        shared = self.shared(x)
        if self._shared_gate_name is not None:
            shared = gated(shared, get_child(self, self._shared_gate_name)(x), "sigmoid")
        return y + shared


def _gate(scope: LayerScope) -> JaxLinear:
    """One number per token; never quantized, as routers are not."""
    return leaves.linear(never_quantized(scope), scope.config["hidden_size"], 1, axes=(None, "embed"))
