"""GPT-NeoX (arXiv:2204.06745), Pythia and Dolly 2: parallel attention and MLP, packed projections, biases."""

from __future__ import annotations

from jaxis.config.rope_config import rope_config
from jaxis.layers.decoder_layer import ParallelDecoderLayer, PreNormDecoderLayer
from jaxis.layers.grouped_query_attention import GroupedQueryAttention
from jaxis.layers.mlp import UngatedMLP, activation_function
from jaxis.layers.qkv_packing import PACKED_BY_GROUP
from jaxis.layers.scope import LayerScope
from jaxis.models.common.decoder import CausalLM
from jaxis.models.common.family import Family
from jaxis.models.common.layer_norms import biased_layer_norm


def _layer(scope: LayerScope) -> PreNormDecoderLayer | ParallelDecoderLayer:
    config = scope.config
    self_attn = GroupedQueryAttention(
        scope / "self_attn",
        num_kv_heads=config["num_attention_heads"],
        rope_settings=rope_config(config, default_partial_rotary_factor=0.25),
        packing=PACKED_BY_GROUP,
        use_bias=config.get("attention_bias", True),
    )
    activation = activation_function(config.get("hidden_act", "gelu"))
    mlp = UngatedMLP(scope / "mlp", activation=activation, use_bias=True)
    if not config.get("use_parallel_residual", True):
        return PreNormDecoderLayer(scope, self_attn=self_attn, mlp=mlp)
    return ParallelDecoderLayer(scope, self_attn=self_attn, mlp=mlp, has_mlp_norm=True)


class GPTNeoXForCausalLM(CausalLM):
    layer_class = _layer
    make_norm = biased_layer_norm
    renames = (
        ("gpt_neox.embed_in", "model.embed_tokens"),
        ("gpt_neox.final_layer_norm", "model.norm"),
        ("gpt_neox.layers", "model.layers"),
        ("attention.query_key_value", "self_attn.qkv_proj"),
        ("attention.dense", "self_attn.o_proj"),
        ("mlp.dense_h_to_4h", "mlp.up_proj"),
        ("mlp.dense_4h_to_h", "mlp.down_proj"),
        ("embed_out", "lm_head"),
    )
    buffers = (".attention.rotary_emb.inv_freq", ".attention.bias", ".attention.masked_bias")
    supported_values = (("is_decoder", True, False),)


FAMILY = Family(
    "GPT-NeoX 20B, Pythia, Dolly 2",
    (GPTNeoXForCausalLM,),
    "parallel attention and feed-forward, each after a LayerNorm, partial RoPE, packed projections head by head",
    gguf=("gptneox",),
    names={"gpt_neox": {"rotary_pct": "partial_rotary_factor", "rotary_emb_base": "rope_theta"}},
)
