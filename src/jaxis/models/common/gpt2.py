"""Code shared by GPT-2 and models with its layer: learned positions, layer norms, biases, no gate."""

from __future__ import annotations

from jaxis.layers.alibi import Alibi
from jaxis.layers.decoder_layer import PreNormDecoderLayer
from jaxis.layers.embed import PositionEmbedding
from jaxis.layers.grouped_query_attention import GroupedQueryAttention
from jaxis.layers.mlp import UngatedMLP, activation_function
from jaxis.layers.qkv_packing import PACKED, QKVPacking
from jaxis.layers.scope import LayerScope
from jaxis.models.common.decoder import CausalLM, DecoderOptions
from jaxis.models.common.layer_norms import biased_layer_norm


def ungated_mlp(scope: LayerScope, default_activation: str) -> UngatedMLP:
    """A block with biases and without a gate; four times as wide as the model by default."""
    config = scope.config
    return UngatedMLP(
        scope,
        activation=activation_function(config.get("hidden_act", default_activation)),
        intermediate_size=config.get("intermediate_size", 4 * config["hidden_size"]),
        use_bias=True,
    )


class Gpt2DecoderLayer(PreNormDecoderLayer):
    """`x = x + self_attn(norm(x))`
    `x = x + mlp(norm(x))`, with packed projections.

    `num_kv_heads`, `packing` and `alibi` are arguments of `GroupedQueryAttention`, and `default_activation` is
    for a config.json that names none.
    """

    def __init__(
        self,
        scope: LayerScope,
        *,
        num_kv_heads: int | None = None,
        packing: QKVPacking = PACKED,
        alibi: Alibi | None = None,
        default_activation: str = "gelu_new",
    ) -> None:
        super().__init__(
            scope,
            self_attn=GroupedQueryAttention(
                scope / "self_attn",
                num_kv_heads=num_kv_heads or scope.config["num_attention_heads"],
                use_rope=False,
                alibi=alibi,
                packing=packing,
                use_bias=True,
            ),
            mlp=ungated_mlp(scope / "mlp", default_activation),
        )


class Gpt2CausalLM(CausalLM):
    make_norm = biased_layer_norm
    tied_by_default = True
    renames = (
        ("transformer.wte", "model.embed_tokens"),
        ("transformer.wpe", "model.embed_positions"),
        ("transformer.h", "model.layers"),
        ("transformer.ln_f", "model.norm"),
        ("ln_1", "input_layernorm"),
        ("ln_2", "post_attention_layernorm"),
        ("attn.c_attn", "self_attn.qkv_proj"),
        ("attn.c_proj", "self_attn.o_proj"),
        ("mlp.c_fc", "mlp.up_proj"),
        ("mlp.c_proj", "mlp.down_proj"),
    )
    buffers = (".attn.bias", ".attn.masked_bias")
    supported_values = (
        ("scale_attn_weights", True),
        ("scale_attn_by_inverse_layer_idx", False),
        ("add_cross_attention", False),
    )
    ignored_keys = (("reorder_and_upcast_attn", "scores are in float32 anyway"),)

    @classmethod
    def options(cls, scope: LayerScope) -> DecoderOptions:
        config = scope.config
        positions = PositionEmbedding(
            config["max_position_embeddings"], config["hidden_size"], scope.rngs, dtype=scope.dtype
        )
        return DecoderOptions(embed_positions=positions)
