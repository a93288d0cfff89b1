"""Ling 2.0, Ring 2.0 and Sarvam 30B: GLM-4.5's layer with packed projections and DeepSeek V3's routing; and Ling 2.5
and Ring 2.5, with lightning attention, and latent attention as the last layer of each group."""

from __future__ import annotations

from jaxis.config.hf_config import HFConfig
from jaxis.config.rope_config import rope_config
from jaxis.layers.alibi import Alibi
from jaxis.layers.decoder_layer import PreNormDecoderLayer, SelfAttention
from jaxis.layers.grouped_query_attention import GroupedQueryAttention
from jaxis.layers.lightning_attention import LightningAttention
from jaxis.layers.mla import MultiHeadLatentAttention
from jaxis.layers.qkv_packing import PACKED
from jaxis.layers.rope import make_rotary_embedding
from jaxis.layers.scope import LayerScope
from jaxis.models.common.decoder import CausalLM
from jaxis.models.common.deepseek import LatentAttentionSettings
from jaxis.models.common.family import Family
from jaxis.models.common.sparse_layers import (
    dense_or_sparse,
    num_dense_layers,
    sigmoid_routing,
)


class BailingMoeV2DecoderLayer(PreNormDecoderLayer):
    """A decoder layer.

    `default_theta` is the base of the rope if config.json has none; `self_attn` replaces attention by grouped queries.
    """

    def __init__(
        self, scope: LayerScope, *, default_theta: float = 600_000.0, self_attn: SelfAttention | None = None
    ) -> None:
        config = scope.config
        routing = sigmoid_routing(config, 2.5)
        super().__init__(
            scope,
            self_attn=self_attn
            or GroupedQueryAttention(
                scope / "self_attn",
                rope_settings=rope_config(config, default_theta=default_theta),
                packing=PACKED,
                qkv_bias=config.get("use_qkv_bias", False),
                qk_norm=config.get("use_qk_norm", True),
            ),
            mlp=dense_or_sparse(
                scope,
                routing,
                is_sparse=scope.layer_index >= num_dense_layers(config, 1),
                num_shared_experts=config.get("num_shared_experts", 1),
            ),
        )


class BailingMoeV2ForCausalLM(CausalLM):
    layer_class = BailingMoeV2DecoderLayer
    renames = (
        ("model.word_embeddings", "model.embed_tokens"),
        ("attention", "self_attn"),
        ("self_attn.query_key_value", "self_attn.qkv_proj"),
        ("self_attn.dense", "self_attn.o_proj"),
        ("self_attn.query_layernorm", "self_attn.q_norm"),
        ("self_attn.key_layernorm", "self_attn.k_norm"),
        ("mlp.gate.expert_bias", "mlp.gate.e_score_correction_bias"),
    )

    @classmethod
    def check_config(cls, config: HFConfig) -> None:
        config.expect_all(hidden_act="silu", moe_shared_expert_intermediate_size=config.get("moe_intermediate_size"))
        config.expect_all(score_function="sigmoid", router_dtype="fp32", moe_router_enable_expert_bias=True)
        config.expect_all(use_rmsnorm=True, use_bias=False, norm_head=False, norm_softmax=False)
        config.expect("use_sliding_window", False)
        config.expect("rotary_dim", int(config.get("partial_rotary_factor", 1.0) * config["head_dim"]))
        config.ignore("num_mtp_layers", because="layers that draft tokens are not loaded")


class BailingMoeV2_5DecoderLayer(BailingMoeV2DecoderLayer):
    def __init__(self, scope: LayerScope) -> None:
        config, index = scope.config, scope.layer_index
        rope, attn = rope_config(config, default_theta=600_000.0), scope / "self_attn"
        num_layers, group_size = config["num_hidden_layers"], config["layer_group_size"]
        if (index + 1) % group_size == 0 or index >= num_layers // group_size * group_size:
            settings = LatentAttentionSettings.with_rope(attn, rope)
            super().__init__(scope, self_attn=settings.make(MultiHeadLatentAttention, attn))
            return
        # The published code counts layers from 0 and subtracts 1; other programs that serve the model do not.
        share = 1 - (index - 1) / max(num_layers - 1, 1) + 1e-5
        head_dim: int = config["head_dim"]
        attention = LightningAttention(
            attn,
            head_dim=head_dim,
            rates=[slope * share for slope in Alibi.of_powers(config["num_attention_heads"]).slopes],
            rope=make_rotary_embedding(rope, head_dim=head_dim, max_model_len=scope.max_model_len),
            num_groups=config.get("group_norm_size", 1),
        )
        super().__init__(scope, self_attn=attention)


class BailingMoeV2_5ForCausalLM(BailingMoeV2ForCausalLM):
    layer_class = BailingMoeV2_5DecoderLayer

    @classmethod
    def check_config(cls, config: HFConfig) -> None:
        super().check_config(config)
        config.expect("topk_method", "noaux_tc")
        config.expect("num_kv_heads_for_linear_attn", 0, config["num_attention_heads"])
        config.expect_all(use_qk_norm=True, linear_rope=True, rope_interleave=True, linear_silu=False)
        config.expect_all(use_linear_silu=False, use_qkv_bias=False, attention_bias=False)


FAMILY = Family(
    "Ling 2.0 mini, flash, 1T; Ring 2.0; Ling 2.5, Ring 2.5; Sarvam 30B",
    (BailingMoeV2ForCausalLM, BailingMoeV2_5ForCausalLM),
    "norms on heads, packed projections, partial RoPE, DeepSeek V3's routing; from 2.5 on lightning attention, and "
    "latent attention as the last layer of each group",
    gguf=("bailingmoe2",),
    other_names={"SarvamMoEForCausalLM": BailingMoeV2ForCausalLM},
)
