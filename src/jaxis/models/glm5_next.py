"""GLM-5.3-Flash: four residual streams, Kimi Delta Attention, latent attention without RoPE to groups of tokens."""

from __future__ import annotations

from jaxis.config.hf_config import HFConfig
from jaxis.config.layer_types import FULL_ATTENTION, INDEXED_ATTENTION, LINEAR_ATTENTION, listed_layer_type
from jaxis.layers.decoder_layer import PreNormDecoderLayer, SelfAttention, StreamsDecoderLayer
from jaxis.layers.glu import LimitedGLU
from jaxis.layers.group_indexer import GatedGroupIndexer, GroupIndexerSizes
from jaxis.layers.mlp import FeedForward
from jaxis.layers.scope import LayerScope
from jaxis.layers.sparse_mla import SparseLatentAttention
from jaxis.layers.streams import StreamMean, StreamsNorm
from jaxis.models.common.deepseek import LatentAttentionSettings
from jaxis.models.common.family import Family
from jaxis.models.common.kda_hybrid import kimi_delta_attention
from jaxis.models.common.mamba import ignore_rope
from jaxis.models.common.prediction_layers import PredictionNames
from jaxis.models.common.sparse_latent import TINY_INDEXER, index_query_size, layers_with_indexer
from jaxis.models.common.sparse_layers import (
    dense_or_sparse,
    is_sparse_layer,
    sigmoid_routing,
)
from jaxis.models.common.streams import CONNECTION_RENAMES, StreamsModel, manifold_connection
from jaxis.models.common.text_part import InnerTextPart
from jaxis.models.common.towers.glm import Glm5NextVision


class Glm5NextDecoderLayer(StreamsDecoderLayer):
    def __init__(self, scope: LayerScope) -> None:
        is_linear = _is_linear(scope.config, scope.layer_index)
        super().__init__(
            scope,
            self_attn=(_linear_attention if is_linear else _latent_attention)(scope / "self_attn"),
            mlp=_feed_forward(scope),
            make_connection=manifold_connection,
        )


class Glm5NextPredictionLayer(PreNormDecoderLayer):
    """The layer that predicts later tokens, of latent attention with its own indexer, without streams.

    As `Glm5NextMTP` in vLLM.
    """

    def __init__(self, scope: LayerScope) -> None:
        super().__init__(
            scope, self_attn=_latent_attention(scope / "self_attn", predicts=True), mlp=_feed_forward(scope)
        )


def _feed_forward(scope: LayerScope) -> FeedForward:
    config = scope.config
    unit = LimitedGLU(config.get("swiglu_limit", 10.0))
    routing = sigmoid_routing(config, 2.5)
    return dense_or_sparse(
        scope,
        routing,
        is_sparse=is_sparse_layer(config, scope.layer_index, default_first_sparse=3),
        num_shared_experts=config.get("n_shared_experts", 1),
        gated_unit=unit,
        block_unit=unit,
    )


def _is_linear(config: HFConfig, index: int) -> bool:
    indexed = FULL_ATTENTION, INDEXED_ATTENTION, "deepseek_sparse_attention"  # as published
    kind = listed_layer_type(config, index, LINEAR_ATTENTION, *indexed)
    return index % 4 != 3 if kind is None else kind == LINEAR_ATTENTION


def _linear_attention(scope: LayerScope) -> SelfAttention:
    config = scope.config
    # Files that transformers saves have no such object, but sizes of other names.
    linear: HFConfig = config.get("linear_attn_config") or HFConfig({}, source=config.source)
    linear.ignore("kda_layers", "full_attn_layers", because="layer_types says it of each layer")
    bound = linear.get("gate_lower_bound", config.get("linear_lower_bound", -5.0))
    return kimi_delta_attention(
        scope,
        num_heads=linear.get("num_heads", config.get("linear_num_heads", 64)),
        head_dim=linear.get("head_dim", config.get("linear_head_dim", 128)),
        conv_width=linear.get("short_conv_kernel_size", config.get("linear_conv_kernel_dim", 4)),
        lower_bound=-5.0 if linear.get("safe_gate", False) and bound is None else bound,
        decay_names=("f_a_proj", "f_b_proj"),
        gate_names=("g_a_proj", "g_b_proj"),
    )


def _latent_attention(scope: LayerScope, *, predicts: bool = False) -> SparseLatentAttention:
    config = scope.config
    settings = LatentAttentionSettings.with_rope(scope, None)
    if settings.sizes.qk_rope_head_dim:
        raise config.fault("qk_rope_head_dim", why="but no layer has a rope: expected 0")
    group_size = config.get("index_kpool", 16)
    sizes = GroupIndexerSizes(
        num_heads=config["index_n_heads"],
        head_dim=config["index_head_dim"],
        group_size=group_size,
        num_groups=config["index_topk"] // group_size,
    )
    has_indexer = layers_with_indexer(config)
    of_latent = [has_indexer[i] for i in range(len(has_indexer)) if not _is_linear(config, i)]
    if not of_latent[0]:
        raise config.fault("indexer_types", why="in which the first layer of latent attention has no indexer")
    indexer = None
    if predicts or has_indexer[scope.layer_index]:
        query_size = index_query_size(settings, config)
        indexer = GatedGroupIndexer(scope / "indexer", sizes, query_size=query_size)
    return settings.make(
        SparseLatentAttention,
        scope,
        indexer=indexer,
        num_selected=sizes.num_selected,
        hands_on_selection=not (predicts or all(of_latent)),
        latent_norm_epsilon=config["rms_norm_eps"],
    )


def _final_norm(scope: LayerScope) -> StreamsNorm:
    return StreamsNorm(scope, StreamMean())


class Glm5NextForConditionalGeneration(InnerTextPart):
    tower = Glm5NextVision
    text_model_types = ("glm5_next_text", "glm5_next")  # the second in files of the text alone
    layer_class = Glm5NextDecoderLayer
    model_class = StreamsModel
    make_final_norm = _final_norm
    renames = (
        *CONNECTION_RENAMES,
        ("indexer.index_kpool_compress_gate", "indexer.compress_gate.weight"),
    )
    module_renames = tuple((f"self_attn.forget_gate.{name}", f"self_attn.{name}") for name in ("f_a_proj", "f_b_proj"))

    @classmethod
    def check_config(cls, config: HFConfig) -> None:
        ignore_rope(config)
        config.expect_all(moe_layer_freq=1, index_kpool_always_select_tail=True, index_kpool_compress=True, mhc=True)
        config.expect_all(mla_use_nope=True, moe_router_dtype="float32")
        config.ignore("head_dim", because="it is what a rope rotates, and no layer has one")
        config.ignore("rope_interleave", "indexer_rope_interleave", because="no layer has a rope")
        config.ignore("index_share_for_mtp_iteration", because="the prediction layer selects for each draft anew")

    @classmethod
    def prediction_names(cls, config: HFConfig) -> PredictionNames | None:
        return PredictionNames.numbered(config, layer_class=Glm5NextPredictionLayer)


FAMILY = Family(
    "GLM-5.3-Flash",
    (Glm5NextForConditionalGeneration,),
    "four residual streams mixed by doubly stochastic matrices; Kimi Delta Attention in three of four layers; latent "
    "attention without RoPE to the groups of 4 tokens that an indexer selects; a limited unit everywhere",
    formats=("fp8",),
    gguf=("glm5-next",),
    tiny={**TINY_INDEXER, "index_topk": 12, "index_kpool": 4},
)
