"""Code shared by DeepSeek V4 and V4.1."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxis.config.hf_config import HFConfig
from jaxis.config.rope_config import RopeConfig, rope_config
from jaxis.layers.checkpoint_names import Rename
from jaxis.layers.compressed_attention import BlockAttention, CompressedAttention, CompressedAttentionSizes
from jaxis.layers.glu import LimitedGLU
from jaxis.layers.indexer import IndexerSizes
from jaxis.layers.moe import SparseMoE
from jaxis.layers.rope import RotaryEmbedding, make_rotary_embedding
from jaxis.layers.routing import Routing
from jaxis.layers.scope import LayerScope
from jaxis.models.common.streams import CONNECTION_RENAMES

RENAMES: tuple[Rename, ...] = (
    ("embed", "model.embed_tokens"),
    ("head", "lm_head"),
    ("compressor.norm", "compressor.kv_norm"),
    ("norm", "model.norm"),
    ("layers", "model.layers"),
    *CONNECTION_RENAMES,
    ("attn_norm", "input_layernorm"),
    ("ffn_norm", "post_attention_layernorm"),
    ("attn", "self_attn"),
    ("ffn", "mlp"),
    ("wq_a", "q_a_proj"),
    ("q_norm", "q_a_norm"),
    ("wq_b", "q_b_proj"),
    ("wkv", "kv_proj"),
    ("wo_a", "o_a_proj"),
    ("wo_b", "o_b_proj"),
    ("attn_sink", "sinks"),
    ("gate.bias", "gate.e_score_correction_bias"),
    *(("w1", "gate_proj"), ("w2", "down_proj"), ("w3", "up_proj")),
    ("compressor.wgate", "compressor.gate_proj"),  # the last, so that the way back is not that of experts
)
"""The published names of what both have."""


def check_common_keys(config: HFConfig) -> None:
    """Raises ConfigError if a key that both have is not as published."""
    for key, *values in (
        ("num_key_value_heads", 1),
        ("norm_topk_prob", True),
        ("topk_method", "noaux_tc"),
        *(("attention_bias", False), ("hidden_act", "silu")),
    ):
        config.expect(key, *values)
    config.ignore("expert_dtype", because="the tensors of experts say it")
    for key in (each for each in config if each.startswith("dspark_")):
        config.ignore(key, because="layers that draft tokens do not change logits")


def attention_sizes(config: HFConfig) -> CompressedAttentionSizes:
    return CompressedAttentionSizes(
        num_heads=config["num_attention_heads"],
        head_dim=config["head_dim"],
        q_lora_rank=config["q_lora_rank"],
        window=config["sliding_window"],
        output_groups=config["o_groups"],
        o_lora_rank=config["o_lora_rank"],
    )


def window_attention(scope: LayerScope, **settings: Any) -> CompressedAttention:
    """Creates the attention of a layer without compressed entries, or of one that drafts a block."""
    config, own, sizes = scope.config, scope / "self_attn", attention_sizes(scope.config)
    settings |= {"rope": rotary_embedding(scope, "main"), "group_size": 0}
    size = config.get("dspark_block_size") if scope.layer_index >= config["num_hidden_layers"] else None
    if not size:
        return CompressedAttention(own, sizes, **settings)
    return BlockAttention(own, dataclasses.replace(sizes, window=sizes.window + size), **settings)


def index_sizes(config: HFConfig) -> IndexerSizes:
    return IndexerSizes(config["index_n_heads"], config["index_head_dim"], config["index_topk"])


def rotary_embedding(scope: LayerScope, kind: str) -> RotaryEmbedding:
    """Creates the rope of `rope_of`."""
    return make_rotary_embedding(
        rope_of(scope.config, kind),
        head_dim=rotary_dim(scope.config),
        max_model_len=scope.max_model_len,
        interleaved=True,
    )


def experts(scope: LayerScope, *, by_ids: bool = False) -> SparseMoE:
    """Creates a layer's experts, which token ids choose if `by_ids`."""
    config = scope.config
    routing = Routing.of(
        config,
        score_function=config["scoring_func"],
        renormalize=True,
        scaling_factor=config["routed_scaling_factor"],
        float32_logits=True,
    )
    return SparseMoE(
        scope / "mlp",
        routing,
        gated_unit=LimitedGLU(float(config["swiglu_limit"])),
        use_selection_bias=not by_ids,
        use_token_ids=by_ids,
        shared_size=config["n_shared_experts"] * config["moe_intermediate_size"],
    )


def rotary_dim(config: HFConfig) -> int:
    share = config.get("partial_rotary_factor", 64 / 512)
    return config.get("qk_rope_head_dim", int(config["head_dim"] * share))


def rope_of(config: HFConfig, kind: str) -> RopeConfig:
    """Returns the rope of layers with compressed entries ("compress"), or of windows alone ("main").

    Published files have one object, which is that of the first but for its base.
    """
    section = config.get("rope_parameters")
    theta = config.get("rope_theta", 10_000.0)
    if isinstance(section, HFConfig) and kind in section:
        rope = rope_config(config, kind)
    elif kind == "main":
        rope = RopeConfig(rope_type="default", theta=theta)
    else:
        rope = rope_config(config, theta=config.get("compress_rope_theta", 160_000.0))
    # The rope's scale of queries and keys is not used.
    return dataclasses.replace(rope, partial_rotary_factor=1.0, attention_factor=rope.attention_factor or 1.0)
