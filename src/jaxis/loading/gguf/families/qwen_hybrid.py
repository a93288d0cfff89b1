"""Qwen3-Next and Qwen 3.5, most of whose layers are gated delta networks."""

from __future__ import annotations

import re

from jaxis.errors import ConfigError
from jaxis.loading.gguf.common_facts import (
    ATTENTION_BIAS,
    BASE,
    DENSE,
    EXPERT_WIDTH,
    RMS,
    SHARED_EXPERT_WIDTH,
    SOFTMAX,
    experts,
)
from jaxis.loading.gguf.config_reader import FULL, ConfigReader, Values
from jaxis.loading.gguf.delta_heads import DeltaHeads, PackedDeltaHeads
from jaxis.loading.gguf.rope_keys import mrope, rope
from jaxis.loading.gguf.table import GGUF, Fact, key, only, unused
from jaxis.loading.gguf.tensor_names import NORM_AFTER_ATTENTION, GGUFNames

_BLOCK = {
    **NORM_AFTER_ATTENTION,
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_dt": "linear_attn.dt_bias=",
    "ssm_a": "linear_attn.A_log=",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
_DELTA_OUTPUT = re.compile(r"blk\.\d+\.ssm_out\.weight")


def _delta_layers(reader: ConfigReader) -> Values:
    keys = reader.keys
    interval = keys.integer("full_attention_interval", 4)
    num_key_heads, num_value_heads = keys.integer("ssm.group_count"), keys.integer("ssm.time_step_rank")
    if not num_key_heads or not num_value_heads or num_value_heads % num_key_heads:
        raise ConfigError(
            f"{keys.source} has {num_value_heads} value heads for {num_key_heads} key heads: a multiple is expected"
        )
    value_dim = keys.integer("ssm.inner_size") // num_value_heads
    heads = DeltaHeads(
        num_key_heads,
        num_value_heads,
        keys.integer("ssm.state_size"),
        value_dim,
        keeps_order=_splits_blocks(reader, value_dim),
    )
    reader.delta_heads = None if num_key_heads == num_value_heads else heads
    return {
        "layer_types": ["linear_attention" if (i + 1) % max(interval, 1) else FULL for i in range(reader.num_layers)],
        "linear_num_key_heads": num_key_heads if reader.delta_heads is None else heads.model_key_heads,
        "linear_num_value_heads": num_value_heads,
        "linear_key_head_dim": heads.key_dim,
        "linear_value_head_dim": value_dim,
    }


def _splits_blocks(reader: ConfigReader, value_dim: int) -> bool:
    """Returns whether blocks of a layer's output projection have columns of two heads."""
    outputs = (tensor for name, tensor in reader.keys.tensors.items() if _DELTA_OUTPUT.fullmatch(name))
    return any(value_dim % tensor.block_type.elements for tensor in outputs)


def _checkpoint_order(reader: ConfigReader) -> Values:
    """Qwen3-Next's file has the checkpoint's order of heads."""
    reader.delta_heads = None
    values = reader.values | {"linear_num_key_heads": reader.keys.integer("ssm.group_count")}
    sizes = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")
    reader.packed_delta_heads = PackedDeltaHeads(*(values[f"linear_{size}"] for size in sizes))
    return values


_HYBRID = (
    [BASE, RMS, rope(is_partial=True), mrope(interleaved=True), ATTENTION_BIAS, Fact(_delta_layers)],
    key("linear_conv_kernel_dim", "ssm.conv_kernel"),
)
_HYBRID_MOE = (
    [_HYBRID, experts("num_experts"), EXPERT_WIDTH, SHARED_EXPERT_WIDTH],
    unused("feed_forward_length"),  # of dense layers, which it does not have
    only("expert_gating_func", SOFTMAX),
    only("expert_weights_norm", True),
)
_NAMES = GGUFNames(_BLOCK, adds_one_to_norms=True)
_MOE_MODEL = ("qwen3_5_moe_text", "Qwen3_5MoeForCausalLM")

GGUFS = (
    GGUF(
        ("qwen35", "qwen3_5_text", "Qwen3_5ForCausalLM"),
        (_HYBRID, DENSE),
        _NAMES,
    ),
    GGUF(("qwen35moe", *_MOE_MODEL), _HYBRID_MOE, _NAMES),
    # As Qwen 3.5 with unpacked projections, which files have.
    GGUF(("qwen3next", *_MOE_MODEL), (_HYBRID_MOE, Fact(_checkpoint_order)), _NAMES),
)
