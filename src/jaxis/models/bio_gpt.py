"""BioGPT (doi:10.1093/bib/bbac409): OPT's positions, layer norms and biases, with GELU and scaled embeddings."""

from __future__ import annotations

from jaxis.layers.decoder_layer import PreNormDecoderLayer
from jaxis.layers.embed import PositionEmbedding
from jaxis.layers.grouped_query_attention import GroupedQueryAttention
from jaxis.layers.leaves import layer_norm
from jaxis.layers.mlp import UngatedMLP, activation_function
from jaxis.layers.norm import JaxLayerNorm
from jaxis.layers.scope import LayerScope
from jaxis.models.common.decoder import CausalLM, DecoderOptions
from jaxis.models.common.family import Family


def _norm(scope: LayerScope) -> JaxLayerNorm:
    """The reference's layer norm, with PyTorch's epsilon instead of config.json's."""
    return layer_norm(scope, epsilon=1e-5)


class BioGptDecoderLayer(PreNormDecoderLayer):
    def __init__(self, scope: LayerScope) -> None:
        config = scope.config
        super().__init__(
            scope,
            self_attn=GroupedQueryAttention(
                scope / "self_attn",
                num_kv_heads=config["num_attention_heads"],
                use_rope=False,
                use_bias=True,
            ),
            mlp=UngatedMLP(
                scope / "mlp", activation=activation_function(config.get("hidden_act", "gelu")), use_bias=True
            ),
        )


class BioGptForCausalLM(CausalLM):
    layer_class = BioGptDecoderLayer
    make_norm = _norm
    tied_by_default = True
    renames = (
        ("biogpt", "model"),
        ("model.layer_norm", "model.norm"),
        ("self_attn_layer_norm", "input_layernorm"),
        ("final_layer_norm", "post_attention_layernorm"),
        ("self_attn.out_proj", "self_attn.o_proj"),
        ("fc1", "mlp.up_proj"),
        ("fc2", "mlp.down_proj"),
        ("output_projection", "lm_head"),
    )
    ignored_keys = (("layer_norm_eps", "the reference's norms have PyTorch's, 1e-5"),)

    @classmethod
    def options(cls, scope: LayerScope) -> DecoderOptions:
        config = scope.config
        hidden_size: int = config["hidden_size"]
        return DecoderOptions(
            embed_scale=hidden_size**0.5 if config.get("scale_embedding", True) else 1.0,
            embed_positions=PositionEmbedding(
                config["max_position_embeddings"], hidden_size, scope.rngs, offset=2, dtype=scope.dtype
            ),
        )


FAMILY = Family(
    "BioGPT",
    (BioGptForCausalLM,),
    "learned positions, LayerNorm, GELU without a gate, biases, scaled embeddings",
)
