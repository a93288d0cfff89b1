"""The sparse feed-forward block: a router, its experts, and shared experts that every token goes through."""

from __future__ import annotations

import jax

from jaxis.kernels.weights import GatedUnit
from jaxis.layers import leaves
from jaxis.layers.experts import StackLayout
from jaxis.layers.glu import GLU
from jaxis.layers.mlp import FeedForward, activation_function
from jaxis.layers.module import JaxModule, NamedByCheckpoint
from jaxis.layers.routing import JaxRouter, Routing
from jaxis.layers.scope import LayerScope


class SparseMoE(JaxModule):
    """`experts(x)` of the experts that the router chooses, plus `shared_experts(x)` if there are any.

    Args:
      scope: The layer's scope.
      routing: How experts are chosen.
      intermediate_size: F of one expert.
      gated_unit: None means the plain GLU with config.json's `hidden_act`.
      use_bias: Whether router and experts have biases.
      use_selection_bias, stack_layout: See `JaxRouter` and `JaxExperts`.
      shared_experts: The block that every token goes through; None for none.
      router_name, shared_experts_name: Their names in the checkpoint.

    Raises:
      ConfigError: The activation is unknown.
    """

    router = NamedByCheckpoint[JaxRouter]("_router_name")
    shared = NamedByCheckpoint[FeedForward | None]("_shared_experts_name")

    def __init__(
        self,
        scope: LayerScope,
        *,
        routing: Routing,
        intermediate_size: int,
        gated_unit: GatedUnit | None = None,
        use_bias: bool = False,
        use_selection_bias: bool = False,
        stack_layout: StackLayout | None = None,
        shared_experts: FeedForward | None = None,
        router_name: str = "gate",
        shared_experts_name: str = "shared_experts",
    ) -> None:
        unit = gated_unit or GLU(activation_function(scope.config.get("hidden_act", "silu")))
        self._router_name, self._shared_experts_name = router_name, shared_experts_name
        router = leaves.router(scope / router_name, routing, use_bias=use_bias, use_selection_bias=use_selection_bias)
        setattr(self, router_name, router)
        self.experts = leaves.experts(
            scope / "experts",
            routing,
            intermediate_size,
            gated_unit=unit,
            use_bias=use_bias,
            stack_layout=stack_layout,
        )
        setattr(self, shared_experts_name, shared_experts)

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [T, E] -> [T, E]."""
        expert_ids, expert_weights = self.router(x)
        y = self.experts(x, expert_ids, expert_weights)
        return y if self.shared is None else y + self.shared(x)
