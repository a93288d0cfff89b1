"""MPT: ALiBi, layer norms without biases, packed projections, no biases."""

from __future__ import annotations

from jaxis.config.hf_config import HFConfig
from jaxis.layers.alibi import Alibi
from jaxis.layers.decoder_layer import PreNormDecoderLayer
from jaxis.layers.grouped_query_attention import GroupedQueryAttention
from jaxis.layers.mlp import UngatedMLP, activation_function
from jaxis.layers.qkv_packing import PACKED
from jaxis.layers.scope import LayerScope
from jaxis.models.common.decoder import CausalLM
from jaxis.models.common.family import Family
from jaxis.models.common.layer_norms import unbiased_layer_norm


class MptDecoderLayer(PreNormDecoderLayer):
    def __init__(self, scope: LayerScope) -> None:
        config = scope.config
        attention, num_heads = config.get("attn_config", HFConfig({})), config["num_attention_heads"]
        super().__init__(
            scope,
            self_attn=GroupedQueryAttention(
                scope / "self_attn",
                num_kv_heads=num_heads,
                use_rope=False,
                alibi=Alibi.of_max_bias(num_heads, attention.get("alibi_bias_max", 8)),
                scale=attention.get("softmax_scale"),
                packing=PACKED,
                qkv_clip=attention.get("clip_qkv"),
            ),
            mlp=UngatedMLP(
                scope / "mlp", activation=activation_function("gelu"), intermediate_size=4 * config["hidden_size"]
            ),
        )


class MptForCausalLM(CausalLM):
    layer_class = MptDecoderLayer
    make_norm = unbiased_layer_norm
    tied_by_default = True
    renames = (
        ("transformer.wte", "model.embed_tokens"),
        ("transformer.blocks", "model.layers"),
        ("transformer.norm_f", "model.norm"),
        ("norm_1", "input_layernorm"),
        ("norm_2", "post_attention_layernorm"),
        ("attn.Wqkv", "self_attn.qkv_proj"),
        ("attn.out_proj", "self_attn.o_proj"),
        ("ffn.up_proj", "mlp.up_proj"),
        ("ffn.down_proj", "mlp.down_proj"),
    )

    @classmethod
    def check_config(cls, config: HFConfig) -> None:
        attention = config.get("attn_config", HFConfig({}))
        attention.expect_all(attn_type="multihead_attention", alibi=True, qk_ln=False, prefix_lm=False)
        attention.ignore("attn_uses_sequence_id", because="a prompt is one sequence")
        config.expect_all(no_bias=True, expansion_ratio=4, logit_scale=None, norm_type="low_precision_layernorm")
        config.ignore("learned_pos_emb", "max_position_embeddings", because="positions are known by biases alone")
        for key in ("id2label", "label2id"):  # which the reference writes as if attention were a model of its own
            attention.read_object(key)
        config.ignore("embedding_fraction", because="it scales gradients alone")


FAMILY = Family(
    "MPT 7B, 30B",
    (MptForCausalLM,),
    "ALiBi, LayerNorm without biases, plain feed-forward",
    gguf=("mpt",),
    names={
        "mpt": {
            "d_model": "hidden_size",
            "n_heads": "num_attention_heads",
            "n_layers": "num_hidden_layers",
            "max_seq_len": "max_position_embeddings",
            "layer_norm_epsilon": "layer_norm_eps",
        }
    },
    other_names={"MPTForCausalLM": MptForCausalLM},
)
