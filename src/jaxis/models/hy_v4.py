"""Hy4: four residual streams, gated latent attention with sinks to selected tokens, experts with a limited unit."""

from __future__ import annotations

from functools import partial

from jaxis.config.hf_config import HFConfig
from jaxis.layers.decoder_layer import PreNormDecoderLayer, StreamsDecoderLayer
from jaxis.layers.experts import StackLayout
from jaxis.layers.glu import LimitedGLU
from jaxis.layers.indexer import key_norm
from jaxis.layers.mlp import FeedForward
from jaxis.layers.output_gate import OutputGate
from jaxis.layers.scope import LayerScope
from jaxis.layers.sparse_mla import SparseLatentAttention
from jaxis.layers.streams import HyperConnection
from jaxis.models.common.decoder import CausalLM
from jaxis.models.common.deepseek import LatentAttentionSettings
from jaxis.models.common.family import Family
from jaxis.models.common.prediction_layers import PredictionNames
from jaxis.models.common.sparse_latent import TINY_INDEXER, layers_with_indexer, token_indexer
from jaxis.models.common.sparse_layers import (
    dense_or_sparse,
    is_sparse_layer,
    sigmoid_routing,
)
from jaxis.models.common.streams import StreamsModel, mixing_norm, num_streams


class HYV4DecoderLayer(StreamsDecoderLayer):
    def __init__(self, scope: LayerScope) -> None:
        super().__init__(
            scope,
            self_attn=_attention(scope / "self_attn"),
            mlp=_feed_forward(scope),
            make_connection=_connection,
        )


class HYV4PredictionLayer(PreNormDecoderLayer):
    """The layer that predicts later tokens, with its own indexer and without streams, as `HYV4MTP` in vLLM."""

    def __init__(self, scope: LayerScope) -> None:
        super().__init__(scope, self_attn=_attention(scope / "self_attn", predicts=True), mlp=_feed_forward(scope))


def _feed_forward(scope: LayerScope) -> FeedForward:
    config = scope.config
    limit = config.get("swiglu_limit", 10.0)
    return dense_or_sparse(
        scope,
        sigmoid_routing(config, 2.827),
        is_sparse=is_sparse_layer(config, scope.layer_index, default_first_sparse=1),
        num_shared_experts=config.get("n_shared_experts", 1),
        gated_unit=LimitedGLU(limit) if limit > 0 else None,
        stack_layout=StackLayout(transposed=False),
    )


def _attention(scope: LayerScope, *, predicts: bool = False) -> SparseLatentAttention:
    config = scope.config
    settings, has_indexer = LatentAttentionSettings.of(scope), _layers_with_indexer(config)
    indexer = None
    if predicts or has_indexer[scope.layer_index]:
        make_key_norm = partial(key_norm, epsilon=config["rms_norm_eps"])
        indexer = token_indexer(
            scope / "indexer", settings, interleaved=False, rotates_last=True, make_key_norm=make_key_norm
        )
    return settings.make(
        SparseLatentAttention,
        scope,
        interleaved=False,
        indexer=indexer,
        num_selected=config["index_topk"],
        hands_on_selection=not (predicts or all(has_indexer)),
        output_gate=OutputGate("gate_proj"),
        use_sinks=True,
    )


def _layers_with_indexer(config: HFConfig) -> list[bool]:
    if config.get("indexer_types") is not None:
        return layers_with_indexer(config)
    return [i == 0 or i % 4 == 1 for i in range(config["num_hidden_layers"])]


def _connection(scope: LayerScope) -> HyperConnection:
    config = scope.config
    epsilon = config.get("hc_eps", 1e-6)
    return HyperConnection(
        scope,
        num_streams(config),
        epsilon=epsilon,
        sinkhorn_iterations=None,
        magnitude=config.get("hc_magnitude", 2.0),
        write_epsilon=epsilon,
    )


_PARTS = (("fn", "fn.weight"), ("base", "base"), ("scale", "scale"))


class HYV4ForCausalLM(CausalLM):
    layer_class = HYV4DecoderLayer
    model_class = StreamsModel
    make_final_norm = mixing_norm
    default_prediction_layers = 1
    prediction_modules = ("model.mtp_layers.",)
    renames = (
        *((f"hc_attn_layer.hc_pre.hc_{name}", f"attn_hc.{here}") for name, here in _PARTS),
        *((f"hc_mlp_layer.hc_pre.hc_{name}", f"ffn_hc.{here}") for name, here in _PARTS),
        *((f"hc_head.hc_head_{name}", f"norm.mixer.{here}") for name, here in _PARTS),
        ("self_attn.linear_gate", "self_attn.gate_proj"),
        ("self_attn.learnable_sink_param", "self_attn.sinks"),
    )
    # In files that transformers saves, of which it renames too much.
    other_names = (
        ("mlp.linear_gate", "mlp.gate_proj"),
        ("shared_experts.linear_gate", "shared_experts.gate_proj"),
        ("hc_pre.hc_attn_layer", "hc_attn_layer.hc_pre"),
        ("hc_pre.hc_mlp_layer", "hc_mlp_layer.hc_pre"),
        ("hc_pre.hc_head", "hc_head"),
    )

    @classmethod
    def check_config(cls, config: HFConfig) -> None:
        config.ignore("head_dim", because="the reference overwrites it with qk_rope_head_dim")
        config.ignore("learnable_sink_init", because="it is for training")
        if unknown := set(config.get("layer_types", ())) - {"indexed_attention"}:
            raise config.fault("layer_types", why=f"with {min(map(repr, unknown))}, of which none is supported")

    @classmethod
    def prediction_names(cls, config: HFConfig) -> PredictionNames | None:
        return PredictionNames.numbered(
            config,
            module="model.mtp_layers.0",
            norm="final_layernorm",
            shared=("embed_tokens", "shared_head"),
            layer_class=HYV4PredictionLayer,
        )


FAMILY = Family(
    "Hy4 preview",
    (HYV4ForCausalLM,),
    "four residual streams whose reads and writes depend on the token; latent attention with a gate and sinks to the "
    "tokens that an indexer selects; experts by sigmoid with a selection bias and a limited unit",
    gguf=("hy_v4",),
    tiny=TINY_INDEXER,
)
