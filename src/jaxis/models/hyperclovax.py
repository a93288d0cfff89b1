"""HyperCLOVA X SEED: Granite's layer with a norm after each block as well, and a multiplier of logits."""

from __future__ import annotations

import jax

from jaxis.layers.attention_metadata import AttentionMetadata
from jaxis.layers.decoder_layer import LayerCache, LayerOutput
from jaxis.layers.leaves import rms_norm
from jaxis.layers.mlp import GatedMLP
from jaxis.layers.module import JaxModule
from jaxis.layers.scale import scaled
from jaxis.layers.scope import LayerScope
from jaxis.models.common.decoder import CausalLM, DecoderOptions
from jaxis.models.common.family import Family
from jaxis.models.common.granite import granite_attention


class HyperCLOVAXDecoderLayer(JaxModule):
    """`x = x + multiplier * norm(self_attn(norm(x)))`
    `x = x + multiplier * norm(mlp(norm(x)))`
    """

    def __init__(self, scope: LayerScope) -> None:
        config = scope.config
        head_dim = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
        multiplier = config.get("attention_multiplier", head_dim**-0.5)
        self.self_attn = granite_attention(scope / "self_attn", scale=multiplier)
        self.mlp = GatedMLP(scope / "mlp", use_bias=config.get("mlp_bias", False))
        self.residual_multiplier: float = config.get("residual_multiplier", 1.0)
        self.input_layernorm, self.post_attention_layernorm = rms_norm(scope), rms_norm(scope)
        has_post_norms = config.get("use_post_norm", True)
        self.post_norm1 = rms_norm(scope) if has_post_norms else None
        self.post_norm2 = rms_norm(scope) if has_post_norms else None

    def __call__(self, kv_cache: LayerCache, x: jax.Array, metadata: AttentionMetadata) -> LayerOutput:
        kv_cache, y = self.self_attn(kv_cache, self.input_layernorm(x), metadata)
        x = x + scaled(y if self.post_norm1 is None else self.post_norm1(y), self.residual_multiplier)
        y = self.mlp(self.post_attention_layernorm(x), metadata)
        return kv_cache, x + scaled(y if self.post_norm2 is None else self.post_norm2(y), self.residual_multiplier)


class HyperCLOVAXForCausalLM(CausalLM):
    layer_class = HyperCLOVAXDecoderLayer

    @classmethod
    def options(cls, scope: LayerScope) -> DecoderOptions:
        return DecoderOptions(
            embedding_multiplier=scope.config.get("embedding_multiplier", 1.0),
            logits_multiplier=scope.config.get("logits_scaling", 1.0),
        )


FAMILY = Family(
    "HyperCLOVA X SEED Think",
    (HyperCLOVAXForCausalLM,),
    "Granite's multipliers, norms before and after, multiplied logits",
)
