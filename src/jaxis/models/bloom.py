"""BLOOM (arXiv:2211.05100): ALiBi, normed embeddings, layer norms, packed projections, biases."""

from __future__ import annotations

from jaxis.config.hf_config import HFConfig
from jaxis.layers.alibi import Alibi
from jaxis.layers.qkv_packing import PACKED_BY_GROUP
from jaxis.layers.scope import LayerScope
from jaxis.models.common.decoder import CausalLM, DecoderOptions
from jaxis.models.common.family import Family
from jaxis.models.common.gpt2 import Gpt2DecoderLayer
from jaxis.models.common.layer_norms import biased_layer_norm


class BloomDecoderLayer(Gpt2DecoderLayer):
    def __init__(self, scope: LayerScope) -> None:
        super().__init__(scope, packing=PACKED_BY_GROUP, alibi=Alibi.of_powers(scope.config["num_attention_heads"]))


class BloomForCausalLM(CausalLM):
    layer_class = BloomDecoderLayer
    make_norm = biased_layer_norm
    tied_by_default = True
    renames = (
        ("transformer.word_embeddings", "model.embed_tokens"),
        ("transformer.word_embeddings_layernorm", "model.embed_norm"),
        ("transformer.h", "model.layers"),
        ("transformer.ln_f", "model.norm"),
        ("self_attention.query_key_value", "self_attn.qkv_proj"),
        ("self_attention.dense", "self_attn.o_proj"),
        ("mlp.dense_h_to_4h", "mlp.up_proj"),
        ("mlp.dense_4h_to_h", "mlp.down_proj"),
    )
    # The first checkpoints have no prefix.
    other_names = (
        ("transformer", "unprefixed"),
        *((name, f"transformer.{name}") for name in ("word_embeddings", "word_embeddings_layernorm", "h", "ln_f")),
        ("unprefixed.transformer", "transformer"),
    )

    @classmethod
    def check_config(cls, config: HFConfig) -> None:
        config.expect("apply_residual_connection_post_layernorm", False)
        for key in ("slow_but_exact", "offset_alibi", "skip_bias_add", "skip_bias_add_qkv", "n_inner"):
            config.ignore(key, because="the reference computes the same whatever it says")
        config.ignore("masked_softmax_fusion", because="it is about kernels of its first code")
        config.ignore("max_position_embeddings", because="positions are known by biases alone")

    @classmethod
    def options(cls, scope: LayerScope) -> DecoderOptions:
        return DecoderOptions(embed_norm=biased_layer_norm(scope))


FAMILY = Family(
    "BLOOM, BLOOMZ",
    (BloomForCausalLM,),
    "ALiBi, normed embeddings, LayerNorm, biases",
    gguf=("bloom",),
    names={
        "bloom": {
            "n_embed": "hidden_size",
            "n_head": "num_attention_heads",
            "n_layer": "num_hidden_layers",
            "seq_length": "max_position_embeddings",
            "layer_norm_epsilon": "layer_norm_eps",
        }
    },
)
