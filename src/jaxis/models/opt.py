"""OPT (arXiv:2205.01068): learned positions, layer norms, biases, ReLU without a gate."""

from __future__ import annotations

from jaxis.config.hf_config import HFConfig
from jaxis.layers.decoder_layer import PreNormDecoderLayer
from jaxis.layers.embed import PositionEmbedding
from jaxis.layers.grouped_query_attention import GroupedQueryAttention
from jaxis.layers.mlp import UngatedMLP, activation_function
from jaxis.layers.scope import LayerScope
from jaxis.models.common.decoder import CausalLM, DecoderOptions
from jaxis.models.common.family import Family
from jaxis.models.common.layer_norms import biased_layer_norm


class OPTDecoderLayer(PreNormDecoderLayer):
    def __init__(self, scope: LayerScope) -> None:
        super().__init__(
            scope,
            self_attn=GroupedQueryAttention(
                scope / "self_attn",
                num_kv_heads=scope.config["num_attention_heads"],
                use_rope=False,
                qkv_bias=True,
                o_bias=True,
            ),
            mlp=UngatedMLP(
                scope / "mlp", activation=activation_function(scope.config.get("hidden_act", "relu")), use_bias=True
            ),
            make_norm=biased_layer_norm,
        )


class OPTForCausalLM(CausalLM):
    layer_class = OPTDecoderLayer
    renames = (
        ("model.decoder.final_layer_norm", "model.norm"),
        ("final_layer_norm", "post_attention_layernorm"),
        ("self_attn_layer_norm", "input_layernorm"),
        ("model.decoder.embed_tokens", "model.embed_tokens"),
        ("model.decoder.embed_positions", "model.embed_positions"),
        ("model.decoder.layers", "model.layers"),
        ("self_attn.out_proj", "self_attn.o_proj"),
        ("fc1", "mlp.up_proj"),
        ("fc2", "mlp.down_proj"),
    )
    # The first checkpoints have no prefix.
    other_names = (("model.decoder", "decoder"), ("decoder", "model.decoder"))

    @classmethod
    def check_config(cls, config: HFConfig) -> None:
        for key in ("do_layer_norm_before", "enable_bias", "layer_norm_elementwise_affine"):
            config.expect(key, True)  # OPT 350M has its norms after the blocks
        config.expect("_remove_final_layer_norm", False)
        config.expect("word_embed_proj_dim", config["hidden_size"])

    @classmethod
    def options(cls, scope: LayerScope) -> DecoderOptions:
        config = scope.config
        positions = PositionEmbedding(
            config["max_position_embeddings"], config["hidden_size"], scope.rngs, offset=2, dtype=scope.dtype
        )
        return DecoderOptions(norm=biased_layer_norm(scope), embed_positions=positions, tied_by_default=True)


FAMILY = Family(
    "OPT (but 350M)",
    (OPTForCausalLM,),
    "learned positions, LayerNorm, ReLU without a gate, biases",
    tiny={"word_embed_proj_dim": lambda twin: twin["hidden_size"]},
)
