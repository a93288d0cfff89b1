"""Falcon (arXiv:2311.16867): attention and MLP in parallel; Falcon RW: ALiBi, one after the other."""

from __future__ import annotations

from collections.abc import Sequence

from jaxis.config.hf_config import HFConfig
from jaxis.layers.alibi import Alibi
from jaxis.layers.checkpoint_names import Rename
from jaxis.layers.decoder_layer import ParallelDecoderLayer, PreNormDecoderLayer
from jaxis.layers.grouped_query_attention import GroupedQueryAttention
from jaxis.layers.mlp import UngatedMLP, activation_function
from jaxis.layers.qkv_packing import PACKED, PACKED_BY_GROUP
from jaxis.layers.scope import LayerScope
from jaxis.models.common.decoder import CausalLM
from jaxis.models.common.family import Family
from jaxis.models.common.layer_norms import biased_layer_norm


def _layer(scope: LayerScope) -> PreNormDecoderLayer | ParallelDecoderLayer:
    config = scope.config
    use_bias = config.get("bias", False)
    is_new: bool = config.get("new_decoder_architecture", False)
    self_attn = GroupedQueryAttention(
        scope / "self_attn",
        num_kv_heads=_num_kv_heads(config, is_new),
        use_rope=not config.get("alibi", False),
        alibi=_alibi(config),
        packing=PACKED if config.get("multi_query", True) and not is_new else PACKED_BY_GROUP,
        use_bias=use_bias,
    )
    mlp = UngatedMLP(
        scope / "mlp",
        activation=activation_function(config.get("hidden_act", "gelu")),
        intermediate_size=config.get("intermediate_size", 4 * config["hidden_size"]),
        use_bias=use_bias,
    )
    if not is_new and not config.get("parallel_attn", True):
        return PreNormDecoderLayer(scope, self_attn=self_attn, mlp=mlp)
    has_mlp_norm = is_new and config.get("num_ln_in_parallel_attn", 2) == 2
    return ParallelDecoderLayer(scope, self_attn=self_attn, mlp=mlp, has_mlp_norm=has_mlp_norm)


def _alibi(config: HFConfig) -> Alibi | None:
    """Returns the biases, which the reference divides by the root of a head's size, as it does the scores."""
    if not config.get("alibi", False):
        return None
    num_heads: int = config["num_attention_heads"]
    return Alibi.of_powers(num_heads, rounds=True, multiplier=(config["hidden_size"] // num_heads) ** -0.5)


def _num_kv_heads(config: HFConfig, is_new: bool) -> int:
    """Returns the number of key-value heads; the first models' config.json has the key even with one head."""
    if is_new:
        return config.get("num_key_value_heads", config["num_attention_heads"])
    config.ignore("num_key_value_heads", because="multi_query says it")
    return 1 if config.get("multi_query", True) else config["num_attention_heads"]


class FalconForCausalLM(CausalLM):
    layer_class = _layer
    make_norm = biased_layer_norm
    tied_by_default = True
    renames = (
        ("transformer.word_embeddings", "model.embed_tokens"),
        ("transformer.h", "model.layers"),
        ("transformer.ln_f", "model.norm"),
        ("ln_attn", "input_layernorm"),
        ("ln_mlp", "post_attention_layernorm"),
        ("self_attention.query_key_value", "self_attn.qkv_proj"),
        ("self_attention.dense", "self_attn.o_proj"),
        ("mlp.dense_h_to_4h", "mlp.up_proj"),
        ("mlp.dense_4h_to_h", "mlp.down_proj"),
    )

    @classmethod
    def check_config(cls, config: HFConfig) -> None:
        if config.get("alibi", False):
            for key in ("rope_parameters", "rope_theta", "rope_scaling", "max_position_embeddings"):
                config.ignore(key, because="positions are known by biases alone")
        if config.get("new_decoder_architecture", False):
            config.ignore("parallel_attn", because="later models always are")
        config.ignore("num_ln_in_parallel_attn", because="the first models have one norm")
        config.ignore("multi_query", because="later models have num_kv_heads")

    @classmethod
    def all_renames(cls, config: HFConfig) -> Sequence[Rename]:
        if config.get("new_decoder_architecture", False) and config.get("num_ln_in_parallel_attn", 2) == 2:
            return cls.renames
        return tuple(rename for rename in cls.renames if rename[0] not in ("ln_attn", "ln_mlp"))


FAMILY = Family(
    "Falcon 7B, 40B, 180B, Falcon 2 11B, Falcon RW",
    (FalconForCausalLM,),
    "parallel attention and feed-forward after LayerNorm, packed projections group by group; RW: ALiBi, serial",
    gguf=("falcon",),
    names={
        "falcon": {
            "num_kv_heads": "num_key_value_heads",
            "ffn_hidden_size": "intermediate_size",
            "layer_norm_epsilon": "layer_norm_eps",
            "activation": "hidden_act",
            "n_head": "num_attention_heads",
            "n_layer": "num_hidden_layers",
        }
    },
    other_names={"RWForCausalLM": FalconForCausalLM},
)
