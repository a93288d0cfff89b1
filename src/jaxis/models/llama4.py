"""Llama 4: chunked attention with rope, full-context layers without rope, experts that scale their input."""

from __future__ import annotations

from jaxis.config.attention_span import FULL_CONTEXT, AttentionSpan
from jaxis.config.hf_config import HFConfig
from jaxis.config.layer_types import CHUNKED_ATTENTION, FULL_ATTENTION, listed_layer_type
from jaxis.config.rope_config import rope_config
from jaxis.layers.decoder_layer import PreNormDecoderLayer
from jaxis.layers.experts import StackLayout
from jaxis.layers.grouped_query_attention import GroupedQueryAttention, MakeHeadNorm
from jaxis.layers.leaves import rms_norm
from jaxis.layers.mlp import FeedForward, GatedMLP
from jaxis.layers.moe import SparseMoE
from jaxis.layers.query_scale import QueryScale
from jaxis.layers.routing import Routing
from jaxis.layers.scope import LayerScope
from jaxis.models.common.decoder import CausalLM
from jaxis.models.common.family import Family
from jaxis.models.common.no_rope_layers import has_rope
from jaxis.models.common.text_part import TextPart
from jaxis.models.common.towers.llama4 import Llama4Vision


class Llama4DecoderLayer(PreNormDecoderLayer):
    def __init__(self, scope: LayerScope) -> None:
        super().__init__(scope, self_attn=_attention(scope), mlp=_feed_forward(scope))


class Llama4ForCausalLM(CausalLM):
    layer_class = Llama4DecoderLayer
    renames = (
        ("self_attn.qk_norm", "self_attn.k_norm"),  # one module without a weight
        ("self_attn.qk_norm", "self_attn.q_norm"),
        ("feed_forward", "mlp"),
        ("mlp.router", "mlp.gate"),
        ("mlp.shared_expert", "mlp.shared_experts"),
    )
    ignored_keys = (
        ("attention_chunk_size", "layers without chunks see everything"),
        (("floor_scale", "attn_scale"), "only layers without a rope have a temperature"),
        ("interleave_moe_layer_step", "moe_layers, where there is one, names the sparse layers"),
        ("intermediate_size", "dense layers do not have it"),
        ("intermediate_size_mlp", "sparse layers do not have it"),
    )


class Llama4ForConditionalGeneration(TextPart, Llama4ForCausalLM):
    tower = Llama4Vision
    text_module_renames = TextPart.text_renames
    text_model_types = ("llama4_text",)
    other_parts = ("vision_model", "multi_modal_projector")


def _attention(scope: LayerScope) -> GroupedQueryAttention:
    """Attention with a rope, an L2 norm and chunks, or without a rope and with a temperature."""
    config = scope.config
    use_bias, is_rotated = config.get("attention_bias", False), has_rope(scope)
    has_norm, has_temperature = config.get("use_qk_norm", True), config.get("attn_temperature_tuning", True)
    return GroupedQueryAttention(
        scope / "self_attn",
        head_dim=128,
        use_rope=is_rotated,
        rope_settings=rope_config(config),
        interleaved_rope=True,
        qk_norm=_l2_norm(scope) if has_norm and is_rotated else False,
        norm_after_rope=True,
        query_scale=_temperature(config) if has_temperature and not is_rotated else None,
        span=_span(scope),
        use_bias=use_bias,
    )


def _l2_norm(scope: LayerScope) -> MakeHeadNorm:
    """Returns a factory of norms that divide heads by their root mean square."""
    return lambda _, head_dim: rms_norm(scope, head_dim, use_weight=False)


def _temperature(config: HFConfig) -> QueryScale:
    floor_scale, attn_scale = config.get("floor_scale", 8192), config.get("attn_scale", 0.1)
    return QueryScale(attn_scale, floor_scale, config["max_position_embeddings"] - 1, offset=1)


def _span(scope: LayerScope) -> AttentionSpan:
    """Returns the span: chunks in layers by `layer_types` or, without it, in those with a rope."""
    kind = listed_layer_type(scope.config, scope.layer_index, CHUNKED_ATTENTION, FULL_ATTENTION)
    if kind == FULL_ATTENTION or (kind is None and not has_rope(scope)):
        return FULL_CONTEXT
    return AttentionSpan(attention_chunk_size=scope.config.get("attention_chunk_size", 8192))


def _feed_forward(scope: LayerScope) -> FeedForward:
    config, block = scope.config, scope / "mlp"
    routing = Routing(
        num_experts=config["num_local_experts"],
        num_experts_per_token=config.get("num_experts_per_tok", 1),
        score_function="sigmoid",
    )
    if (sparse_layers := config.get("moe_layers")) is not None:
        is_sparse = scope.layer_index in sparse_layers
    else:
        is_sparse = (scope.layer_index + 1) % config.get("interleave_moe_layer_step", 1) == 0
    if not is_sparse:
        return GatedMLP(block, intermediate_size=config["intermediate_size_mlp"])
    expert_size = config["intermediate_size"]
    moe = SparseMoE(
        block,
        routing,
        intermediate_size=expert_size,
        stack_layout=StackLayout(transposed=True),
        shared_size=expert_size,
    )
    moe.experts.scales_input = True
    return moe


FAMILY = Family(
    "Llama 4 Scout, Maverick",
    (Llama4ForCausalLM, Llama4ForConditionalGeneration),
    "attention in chunks of 8192, every fourth layer without RoPE and with a position-dependent attention "
    "temperature, L2 norm after RoPE, experts whose weights scale their input, a shared expert",
    gguf=("llama4",),
    tiny={"intermediate_size_mlp": 112},
)
