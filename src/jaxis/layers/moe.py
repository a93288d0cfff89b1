"""The sparse feed-forward block: a router, its experts, and what every token goes through besides."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
from flax import nnx

from jaxis.layers.experts import JaxExperts, StackLayout
from jaxis.layers.glu import GLU, GatedUnit
from jaxis.layers.mlp import activation_function
from jaxis.layers.module import JaxModule
from jaxis.layers.routing import JaxRouter, Routing

if TYPE_CHECKING:
    from jaxis.config import VllmConfig
    from jaxis.quantization.config import QuantizationConfig


class SparseMoE(JaxModule):
    """`experts(x)` of the experts that the router chooses, plus `shared_experts(x)` where there are any.

    Args:
      router: Takes x [T, E], gives expert_ids [T, k] and expert_weights [T, k].
      experts: Takes x and both of those, gives [T, E].
      shared_experts: Takes x, gives [T, E]; None for none.
      router_name, shared_experts_name: What the checkpoint calls them.
    """

    def __init__(
        self,
        router: JaxRouter,
        experts: JaxExperts,
        shared_experts: JaxModule | None = None,
        *,
        router_name: str = "gate",
        shared_experts_name: str = "shared_experts",
    ) -> None:
        self._router_name, self._shared_experts_name = router_name, shared_experts_name
        setattr(self, router_name, router)
        self.experts = experts
        setattr(self, shared_experts_name, shared_experts)

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [T, E] -> [T, E]."""
        expert_ids, expert_weights = getattr(self, self._router_name)(x)
        y = self.experts(x, expert_ids, expert_weights)
        shared_experts = getattr(self, self._shared_experts_name)
        return y if shared_experts is None else y + shared_experts(x)


def moe_from_config(
    vllm_config: VllmConfig,
    rng: nnx.Rngs,
    quant_config: QuantizationConfig | None,
    prefix: str,
    *,
    routing: Routing,
    intermediate_size: int,
    gated_unit: GatedUnit | None = None,
    use_bias: bool = False,
    use_selection_bias: bool = False,
    stack_layout: StackLayout | None = None,
    router_name: str = "gate",
    **options: Any,
) -> SparseMoE:
    """A sparse block whose width and activation are config.json's.

    Args:
      vllm_config, rng, quant_config, prefix: As for `JaxLinear`.
      routing: How experts are chosen.
      intermediate_size: F of one expert.
      gated_unit: None is the plain one, with config.json's `hidden_act`.
      use_bias: Whether router and experts have biases.
      use_selection_bias, stack_layout: As for `JaxRouter` and `JaxExperts`.
      router_name, options: Of `SparseMoE`, as they are.
    """
    config, dtype = vllm_config.model_config.hf_config, vllm_config.model_config.dtype
    if gated_unit is None:
        gated_unit = GLU(activation_function(config.get("hidden_act", "silu")))
    common = {"dtype": dtype, "quant_config": quant_config, "use_bias": use_bias}
    router = JaxRouter(
        config["hidden_size"],
        routing,
        rng,
        use_selection_bias=use_selection_bias,
        prefix=f"{prefix}.{router_name}",
        **common,
    )
    experts = JaxExperts(
        routing.num_experts,
        config["hidden_size"],
        intermediate_size,
        rng,
        gated_unit=gated_unit,
        scales_input=routing.scales_input,
        stack_layout=stack_layout,
        prefix=f"{prefix}.experts",
        **common,
    )
    return SparseMoE(router, experts, router_name=router_name, **options)
