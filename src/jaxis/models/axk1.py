"""A.X K1: DeepSeek V3's layer with a norm after its experts."""

from __future__ import annotations

import jax

from jaxis.layers.attention_metadata import AttentionMetadata
from jaxis.layers.decoder_layer import LayerCache, LayerOutput
from jaxis.layers.leaves import rms_norm
from jaxis.layers.scope import LayerScope
from jaxis.models.common.deepseek import DeepseekCausalLM, DeepseekDecoderLayer, deepseek_v3_routing
from jaxis.models.common.family import Family
from jaxis.models.common.sparse_layers import is_sparse_layer


class AXK1DecoderLayer(DeepseekDecoderLayer):
    """`x = x + latent_attention(norm(x))`
    `x = x + norm(mlp(norm(x)))`; dense layers have no outer norm.
    """

    def __init__(self, scope: LayerScope) -> None:
        config = scope.config
        is_sparse = is_sparse_layer(config, scope.layer_index, default_first_sparse=1)
        super().__init__(
            scope,
            routing=deepseek_v3_routing(config),
            is_sparse=is_sparse,
            use_selection_bias=True,
            interleaved_rope=config.get("rope_interleave", True),
        )
        self.post_mlp_layernorm = rms_norm(scope) if is_sparse else None

    def __call__(self, kv_cache: LayerCache, x: jax.Array, metadata: AttentionMetadata) -> LayerOutput:
        kv_cache, attended = self.mixer(kv_cache, self.input_layernorm(x), metadata)
        x = x + attended
        fed = self.mlp(self.post_attention_layernorm(x), metadata)
        return kv_cache, x + (fed if self.post_mlp_layernorm is None else self.post_mlp_layernorm(fed))


class AXK1ForCausalLM(DeepseekCausalLM):
    layer_class = AXK1DecoderLayer
    # Files of the makers have the norm in the layer, those of the reference in the block.
    other_names = (("mlp.post_mlp_layernorm", "post_mlp_layernorm"),)
    supported_values = (("moe_layer_freq", 1),)


FAMILY = Family("A.X K1", (AXK1ForCausalLM,), "as DeepSeek V3, with a norm after the experts")
