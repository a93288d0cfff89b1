"""Mellum 2: the Qwen3 MoE layer with windows in some layers, each kind of layer with a rope of its own."""

from __future__ import annotations

from jaxis.config.hf_config import HFConfig
from jaxis.config.layer_types import FULL_ATTENTION, SLIDING_ATTENTION, layer_span, listed_layer_type
from jaxis.config.rope_config import rope_config
from jaxis.layers.decoder_layer import PreNormDecoderLayer
from jaxis.layers.grouped_query_attention import GroupedQueryAttention
from jaxis.layers.mlp import GatedMLP
from jaxis.layers.scope import LayerScope
from jaxis.models.common.decoder import CausalLM
from jaxis.models.common.family import Family
from jaxis.models.common.prediction_layers import PredictionNames
from jaxis.models.common.qwen import qwen_feed_forward
from jaxis.models.common.sparse_layers import ignore_sizes_of_other_layers, is_sparse_layer


class MellumDecoderLayer(PreNormDecoderLayer):
    def __init__(self, scope: LayerScope) -> None:
        config = scope.config
        kind = listed_layer_type(config, scope.layer_index, FULL_ATTENTION, SLIDING_ATTENTION) or FULL_ATTENTION
        is_sparse = is_sparse_layer(scope.config, scope.layer_index, default_first_sparse=0)
        super().__init__(
            scope,
            self_attn=GroupedQueryAttention(
                scope / "self_attn",
                head_dim=128,
                rope_settings=rope_config(config, kind, default_theta=500_000.0, default_local_theta=10_000.0),
                qk_norm=True,
                use_bias=config.get("attention_bias", False),
                span=layer_span(config, kind, default_window=1024),
            ),
            mlp=qwen_feed_forward(scope, renormalize=config.get("norm_topk_prob", True))
            if is_sparse
            else GatedMLP(scope / "mlp"),
        )


class MellumForCausalLM(CausalLM):
    layer_class = MellumDecoderLayer
    router_aux_loss_coef = 0.001
    default_prediction_layers = 1
    prediction_modules = ("mtp.",)

    @classmethod
    def check_config(cls, config: HFConfig) -> None:
        ignore_sizes_of_other_layers(config)
        config.expect("use_sliding_window", True)
        for key in ("num_mtp_layers", "mtp_layer_types", "mtp_mlp_layer_types"):
            config.ignore(key, because="layers that predict later tokens do not change logits")

    @classmethod
    def prediction_names(cls, config: HFConfig) -> PredictionNames | None:
        """Returns the prediction layer, which is like the model's first sparse layer with the same attention."""
        [kind] = config.get("mtp_layer_types", [SLIDING_ATTENTION])
        kinds, blocks = config.get("layer_types", []), config.get("mlp_layer_types")
        like = (i for i, each in enumerate(kinds) if each == kind and (blocks is None or blocks[i] == "sparse"))
        index = next(like, None)
        return None if index is None else PredictionNames.separate(index)


FAMILY = Family(
    "Mellum 2",
    (MellumForCausalLM,),
    "Qwen3 MoE with windows and a RoPE for each kind of layer",
    gguf=("mellum",),
)
