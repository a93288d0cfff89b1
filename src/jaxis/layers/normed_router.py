from __future__ import annotations

import jax
from flax import nnx

from jaxis.layers.leaves import router
from jaxis.layers.module import JaxModule, make_parameter
from jaxis.layers.norm import UnweightedRmsNorm
from jaxis.layers.routing import Routing
from jaxis.layers.scope import LayerScope


class NormedRouter(JaxModule):
    """Routes by `proj(norm(x) * scale * E ** -0.5)`; each weight is multiplied by its expert's `per_expert_scale`.

    The norm has no weight: `scale` [E] is a parameter of the router's own (Gemma 4).
    """

    def __init__(self, scope: LayerScope, routing: Routing) -> None:
        hidden_size: int = scope.config["hidden_size"]
        ones = nnx.initializers.ones
        self.factor = hidden_size**-0.5
        self.norm = UnweightedRmsNorm(epsilon=scope.config["rms_norm_eps"])
        self.scale = make_parameter(scope.rngs, ones, (hidden_size,), scope.dtype, axes=(None,))
        self.proj = router(scope / "proj", routing)
        self.per_expert_scale = make_parameter(scope.rngs, ones, (routing.num_experts,), scope.dtype, axes=(None,))

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns expert_ids i32 [T, k], best first, and expert_weights float32 [T, k] for x [T, E]."""
        expert_ids, expert_weights = self.proj(self.norm(x) * self.scale[...] * self.factor)
        return expert_ids, expert_weights * self.per_expert_scale[...][expert_ids]
