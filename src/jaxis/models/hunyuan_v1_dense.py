"""Hunyuan 0.5B to 7B (v1, dense): the Llama layer with norms on heads after the rope, and a rope with a larger base."""

from __future__ import annotations

from jaxis.config.hf_config import HFConfig
from jaxis.config.rope_config import rope_config_with_alpha
from jaxis.layers.decoder_layer import PreNormDecoderLayer
from jaxis.layers.grouped_query_attention import GroupedQueryAttention
from jaxis.layers.mlp import GatedMLP
from jaxis.layers.scope import LayerScope
from jaxis.models.common.decoder import CausalLM
from jaxis.models.common.family import Family, PlainGGUF
from jaxis.models.common.hunyuan import HUNYUAN_RENAMES, check_hunyuan_keys


class HunYuanDenseV1DecoderLayer(PreNormDecoderLayer):
    def __init__(self, scope: LayerScope) -> None:
        config = scope.config
        head_dim = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
        super().__init__(
            scope,
            self_attn=GroupedQueryAttention(
                scope / "self_attn",
                rope_settings=rope_config_with_alpha(config, head_dim),
                qk_norm=True,
                norm_after_rope=True,
                use_bias=config.get("attention_bias", False),
            ),
            mlp=GatedMLP(scope / "mlp"),
        )


class HunYuanDenseV1ForCausalLM(CausalLM):
    layer_class = HunYuanDenseV1DecoderLayer
    renames = HUNYUAN_RENAMES

    @classmethod
    def check_config(cls, config: HFConfig) -> None:
        check_hunyuan_keys(config)


FAMILY = Family(
    "Hunyuan 0.5B to 7B",
    (HunYuanDenseV1ForCausalLM,),
    "norms on heads after RoPE, whose base is larger by a fixed alpha",
    # Whose rope's base is the larger one.
    gguf=(
        PlainGGUF(
            "hunyuan-dense",
            switches={"attention_bias": ["attn_q.bias"]},
        ),
    ),
)
