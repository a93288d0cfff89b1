"""Functions that create leaf layers (layers with parameters only) from a scope.

The layers' own constructors have the signatures of the model development guides, so that classes written for those
work.
"""

from __future__ import annotations

import jax.numpy as jnp

from jaxis.kernels.weights import GatedUnit
from jaxis.layers.embed import JaxEmbed, JaxLmHead
from jaxis.layers.experts import JaxExperts, StackLayout
from jaxis.layers.latent_projection import LatentUpProjection
from jaxis.layers.linear import JaxLinear
from jaxis.layers.norm import JaxLayerNorm, JaxRmsNorm
from jaxis.layers.routing import HashRouter, JaxRouter, Routing, SharedExpertRouter
from jaxis.layers.scope import LayerScope


def linear(
    scope: LayerScope,
    input_size: int,
    output_size: int,
    *,
    axes: tuple[str | None, str | None],
    use_bias: bool = False,
) -> JaxLinear:
    """Creates a linear layer; `axes` are the logical axes of the weight's (out, in)."""
    return JaxLinear(
        input_size,
        output_size,
        use_bias=use_bias,
        kernel_axes=axes,
        **scope.of_weights,
    )


def float32_linear(scope: LayerScope, input_size: int, output_size: int) -> JaxLinear:
    """Creates a linear layer without a bias, replicated, whose weight is float32 whatever the model's type."""
    of_weights = scope.of_weights | {"dtype": jnp.float32}
    return JaxLinear(input_size, output_size, use_bias=False, kernel_axes=(None, "embed"), **of_weights)


def embedding(
    scope: LayerScope, num_features: int | None = None, *, num_embeddings: int | None = None, scale: float = 1.0
) -> JaxEmbed:
    """Creates the token embeddings; by default of config.json's `vocab_size` and `hidden_size`."""
    return JaxEmbed(
        num_embeddings or scope.config["vocab_size"],
        num_features or scope.config["hidden_size"],
        scale=scale,
        **scope.of_weights,
    )


def lm_head(scope: LayerScope, *, vocab_size: int | None = None, use_bias: bool = False) -> JaxLmHead:
    """Creates an output head that is not tied to the embeddings, by default of config.json's `vocab_size`."""
    return JaxLmHead(
        scope.config["hidden_size"],
        scope.config["vocab_size"] if vocab_size is None else vocab_size,
        use_bias=use_bias,
        **scope.of_weights,
    )


def rms_norm(
    scope: LayerScope,
    num_features: int | None = None,
    *,
    epsilon: float | None = None,
    add_unit_offset: bool = False,
    use_weight: bool = True,
) -> JaxRmsNorm:
    """Creates an RMS norm, by default with config.json's `hidden_size` and `rms_norm_eps`.

    The scope may be that of the layer that the norm is in: norms are not quantized, so the name is irrelevant.
    """
    return JaxRmsNorm(
        scope.config["hidden_size"] if num_features is None else num_features,
        scope.rngs,
        epsilon=scope.config["rms_norm_eps"] if epsilon is None else epsilon,
        dtype=scope.dtype,
        add_unit_offset=add_unit_offset,
        use_weight=use_weight,
    )


def layer_norm(
    scope: LayerScope, shape: int | tuple[int, ...] | None = None, *, epsilon: float, use_bias: bool = True
) -> JaxLayerNorm:
    """Creates a layer norm, by default of `hidden_size`. The scope may be that of the layer that the norm is in."""
    size: int | tuple[int, ...] = scope.config["hidden_size"] if shape is None else shape
    return JaxLayerNorm(size, scope.rngs, epsilon=epsilon, use_bias=use_bias, dtype=scope.dtype)


def router(
    scope: LayerScope, routing: Routing, *, use_bias: bool = False, use_selection_bias: bool = False
) -> JaxRouter:
    """Creates a router over config.json's `hidden_size`; the biases are those of `JaxRouter`."""
    return (SharedExpertRouter if routing.num_shared else JaxRouter)(
        scope.config["hidden_size"],
        routing,
        use_bias=use_bias,
        use_selection_bias=use_selection_bias,
        **scope.of_weights,
    )


def hash_router(scope: LayerScope, routing: Routing) -> HashRouter:
    """Creates a router by token ids, of config.json's `vocab_size`."""
    config = scope.config
    return HashRouter(
        config["hidden_size"],
        routing,
        vocab_size=config["vocab_size"],
        **scope.of_weights,
    )


def experts(
    scope: LayerScope,
    routing: Routing,
    intermediate_size: int,
    *,
    gated_unit: GatedUnit,
    hidden_size: int | None = None,
    use_bias: bool = False,
    stack_layout: StackLayout | None = None,
) -> JaxExperts:
    """Creates the experts that a router with this routing chooses among; `hidden_size` is config.json's by default."""
    return JaxExperts(
        routing.num_experts - routing.num_identity,
        scope.config["hidden_size"] if hidden_size is None else hidden_size,
        intermediate_size,
        gated_unit=gated_unit,
        use_bias=use_bias,
        stack_layout=stack_layout,
        are_spread=scope.vllm_config.parallel_config.enable_expert_parallel,
        **scope.of_weights,
    )


def latent_up_projection(
    scope: LayerScope, num_heads: int, latent_dim: int, key_dim: int, value_dim: int
) -> LatentUpProjection:
    """Creates the projection from latents to the heads' keys and values, with the sizes of `LatentUpProjection`."""
    return LatentUpProjection(
        num_heads,
        latent_dim,
        key_dim,
        value_dim,
        **scope.of_weights,
    )
