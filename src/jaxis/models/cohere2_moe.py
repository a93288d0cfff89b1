"""North and Command A+ (Cohere 2 MoE): Cohere 2 with experts, except in the first layers."""

from __future__ import annotations

from jaxis.config.hf_config import HFConfig
from jaxis.config.layer_types import FULL_ATTENTION, SLIDING_ATTENTION, layer_span, listed_layer_type
from jaxis.layers.decoder_layer import ParallelDecoderLayer
from jaxis.layers.grouped_query_attention import GroupedQueryAttention
from jaxis.layers.leaves import rms_norm
from jaxis.layers.mlp import FeedForward, GatedMLP
from jaxis.layers.moe import SparseMoE
from jaxis.layers.norm import Norm
from jaxis.layers.routing import Routing
from jaxis.layers.scope import LayerScope
from jaxis.models.common.cohere import Cohere2CausalLM
from jaxis.models.common.decoder import DecoderOptions
from jaxis.models.common.family import Family
from jaxis.models.common.layer_norms import unbiased_layer_norm
from jaxis.models.common.sparse_layers import is_sparse_layer, num_dense_layers


class Cohere2MoeDecoderLayer(ParallelDecoderLayer):
    def __init__(self, scope: LayerScope) -> None:
        config = scope.config
        is_sparse, kind = (
            is_sparse_layer(scope.config, scope.layer_index, default_first_sparse=0),
            _layer_type(config, scope.layer_index),
        )
        dense_pattern = config.get("prefix_dense_sliding_window_pattern", 1)
        super().__init__(
            scope,
            self_attn=GroupedQueryAttention(
                scope / "self_attn",
                head_dim=128,
                use_rope=kind == SLIDING_ATTENTION or (not is_sparse and dense_pattern == 1),
                interleaved_rope=True,
                use_bias=config.get("attention_bias", False),
                span=layer_span(config, kind, default_window=4096),
            ),
            mlp=_experts(scope / "mlp") if is_sparse else _dense(scope / "mlp"),
        )


def _norm(scope: LayerScope) -> Norm:
    """Returns an RMS norm if config.json has `rms_norm_eps`, otherwise Cohere's layer norm."""
    return unbiased_layer_norm(scope) if scope.config.get("rms_norm_eps") is None else rms_norm(scope)


class Cohere2MoeForCausalLM(Cohere2CausalLM):
    layer_class = Cohere2MoeDecoderLayer
    make_norm = _norm

    @classmethod
    def check_config(cls, config: HFConfig) -> None:
        super().check_config(config)
        config.ignore("rms_norm_eps", "layer_norm_eps", because="the norms are of one of two kinds")
        for key in ("intermediate_size", "prefix_dense_intermediate_size"):
            config.ignore(key, because="a model may lack one of the two kinds of layers")

    @classmethod
    def options(cls, scope: LayerScope) -> DecoderOptions:
        return DecoderOptions(logits_multiplier=scope.config.get("logit_scale", 0.0625))


def _layer_type(config: HFConfig, layer_index: int) -> str:
    """Returns the layer's type by `layer_types`, or by two patterns, for the first dense layers and for the others."""
    keys = ("prefix_dense_sliding_window_pattern", "sliding_window_pattern")
    if (kind := listed_layer_type(config, layer_index, FULL_ATTENTION, SLIDING_ATTENTION)) is not None:
        config.ignore(*keys, because="layer_types names each layer's type")
        return kind
    dense_pattern, pattern = (config.get(key, default) for key, default in zip(keys, (1, 4), strict=True))
    num_dense = num_dense_layers(config, 0)
    number, every = (layer_index, dense_pattern) if layer_index < num_dense else (layer_index - num_dense, pattern)
    if type(every) is not int or every < 1:
        raise config.fault(*keys, why="expected integers of at least 1")
    return SLIDING_ATTENTION if (number + 1) % every else FULL_ATTENTION


def _dense(scope: LayerScope) -> GatedMLP:
    return GatedMLP(scope, intermediate_size=scope.config.get("prefix_dense_intermediate_size"))


def _experts(scope: LayerScope) -> FeedForward:
    config = scope.config
    config.expect("shared_expert_combination_strategy", "average", "sum")
    is_softmax = config.get("expert_selection_fn", "softmax") == "softmax"
    num_shared = config.get("num_shared_experts", 0)
    is_mean = bool(num_shared) and config.get("shared_expert_combination_strategy", "average") == "average"
    share = 0.5 if is_mean else 1.0
    # The reference scores the chosen logits only: for softmax, that equals scoring all and renormalizing.
    routing = Routing(
        num_experts=config.get("num_experts", 8),
        num_experts_per_token=config.get("num_experts_per_tok", 2),
        score_function=config.get("expert_selection_fn", "softmax"),
        renormalize=is_softmax or config.get("norm_topk_prob", True),
        scaling_factor=share,
    )
    size: int = config["intermediate_size"]
    shared = None
    if num_shared:
        width = num_shared * size
        shared = GatedMLP(scope / "shared_experts", intermediate_size=width, multipliers=(1.0, share))
    return SparseMoE(scope, routing, intermediate_size=size, shared_experts=shared)


FAMILY = Family(
    "North Mini, Command A+",
    (Cohere2MoeForCausalLM,),
    "as Command A, with 128 experts by sigmoid or softmax after first layers that are dense, RMS norms, "
    "shared experts averaged",
    gguf=("cohere2moe",),
)
