"""Conversion of a GGUF file's keys to config.json for architectures with layers other than attention."""

from __future__ import annotations

import re

from jaxis.errors import ConfigError
from jaxis.loading.gguf.config_reader import FULL, ConfigReader, Values
from jaxis.loading.gguf.delta_heads import DeltaHeads, PackedDeltaHeads

_SOFTMAX, _SIGMOID = 1, 2  # of `expert_gating_func`
_DELTA_OUTPUT = re.compile(r"blk\.\d+\.ssm_out\.weight")


def qwen35(reader: ConfigReader) -> Values:
    return {**_qwen_hybrid(reader, "Qwen3_5ForCausalLM", "qwen3_5_text"), **reader.dense()}


def qwen35moe(reader: ConfigReader) -> Values:
    keys = reader.keys
    keys.expect("expert_gating_func", _SOFTMAX)
    keys.expect("expert_weights_scale", 1.0, 0.0)
    keys.expect("expert_weights_norm", True)
    keys.get("feed_forward_length")  # of dense layers, which it does not have
    return {
        **_qwen_hybrid(reader, "Qwen3_5MoeForCausalLM", "qwen3_5_moe_text"),
        "num_experts": keys.integer("expert_count"),
        "num_experts_per_tok": keys.integer("expert_used_count"),
        "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
        "shared_expert_intermediate_size": keys.integer("expert_shared_feed_forward_length"),
    }


def qwen3next(reader: ConfigReader) -> Values:
    """Qwen3-Next: Qwen3.5 with experts and unpacked projections, as files have them."""
    keys = reader.keys
    keys.expect("expert_gating_func", _SOFTMAX)
    keys.expect("expert_weights_scale", 1.0, 0.0)
    keys.expect("expert_weights_norm", True)
    keys.get("feed_forward_length")  # of dense layers, which it does not have
    values = {
        **_qwen_hybrid(reader, "Qwen3_5MoeForCausalLM", "qwen3_5_moe_text"),
        "num_experts": keys.integer("expert_count"),
        "num_experts_per_tok": keys.integer("expert_used_count"),
        "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
        "shared_expert_intermediate_size": keys.integer("expert_shared_feed_forward_length"),
    }
    # The file has the checkpoint's order of heads.
    reader.delta_heads = None
    values["linear_num_key_heads"] = keys.integer("ssm.group_count")
    sizes = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")
    reader.packed_delta_heads = PackedDeltaHeads(*(values[f"linear_{size}"] for size in sizes))
    return values


def _qwen_hybrid(reader: ConfigReader, architecture: str, model_type: str) -> Values:
    keys = reader.keys
    interval = keys.integer("full_attention_interval", 4)
    num_key_heads, num_value_heads = keys.integer("ssm.group_count"), keys.integer("ssm.time_step_rank")
    if not num_key_heads or not num_value_heads or num_value_heads % num_key_heads:
        raise ConfigError(
            f"{keys.source} has {num_value_heads} value heads for {num_key_heads} key heads: a multiple is expected"
        )
    heads = DeltaHeads(
        num_key_heads,
        num_value_heads,
        keys.integer("ssm.state_size"),
        value_dim := keys.integer("ssm.inner_size") // num_value_heads,
        keeps_order=_splits_blocks(reader, value_dim),
    )
    reader.delta_heads = None if num_key_heads == num_value_heads else heads
    values = {**reader.base(architecture, model_type), **reader.rms(), **reader.rope()}
    values.setdefault("partial_rotary_factor", 1.0)
    return {
        **reader.with_mrope(values, interleaved=True),
        "attention_bias": reader.has_tensors("attn_q.bias"),
        "layer_types": ["linear_attention" if (i + 1) % max(interval, 1) else FULL for i in range(reader.num_layers)],
        "linear_num_key_heads": num_key_heads if reader.delta_heads is None else heads.model_key_heads,
        "linear_num_value_heads": num_value_heads,
        "linear_key_head_dim": heads.key_dim,
        "linear_value_head_dim": value_dim,
        "linear_conv_kernel_dim": keys.integer("ssm.conv_kernel"),
    }


def _splits_blocks(reader: ConfigReader, value_dim: int) -> bool:
    """Returns whether blocks of a layer's output projection have columns of two heads."""
    outputs = (tensor for name, tensor in reader.keys.tensors.items() if _DELTA_OUTPUT.fullmatch(name))
    return any(value_dim % tensor.block_type.elements for tensor in outputs)


def lfm2(reader: ConfigReader) -> Values:
    return {
        **_lfm(reader, "Lfm2ForCausalLM", "lfm2"),
        **reader.dense(),
        "block_auto_adjust_ff_dim": False,  # the file has the width itself
    }


def lfm2moe(reader: ConfigReader) -> Values:
    keys = reader.keys
    keys.expect("expert_gating_func", _SIGMOID)
    keys.expect("expert_weights_norm", True)
    return {
        **_lfm(reader, "Lfm2MoeForCausalLM", "lfm2_moe"),
        **reader.dense(),
        "num_experts": keys.integer("expert_count"),
        "num_experts_per_tok": keys.integer("expert_used_count"),
        "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
        "num_dense_layers": keys.integer("leading_dense_block_count", 0),
        "routed_scaling_factor": keys.get("expert_weights_scale", 0.0) or 1.0,
        "use_expert_bias": reader.has_tensors("exp_probs_b.bias"),
    }


def _lfm(reader: ConfigReader, architecture: str, model_type: str) -> Values:
    keys = reader.keys
    keys.expect("attention.sliding_window", 0)
    return {
        **reader.base(architecture, model_type),
        **reader.rope(theta=1_000_000.0),
        "norm_eps": float(keys.require("attention.layer_norm_rms_epsilon")),
        "layer_types": [FULL if heads else "conv" for heads in _kv_heads(reader)],
        "conv_L_cache": keys.integer("shortconv.l_cache"),
        "conv_bias": reader.has_tensors("shortconv.in_proj.bias"),
    }


def _kv_heads(reader: ConfigReader) -> list[int]:
    """Key-value heads of each layer, 0 in those without attention."""
    if reader.kv_heads_of_layers is None:
        raise ConfigError(f"{reader.keys.source} does not say which layers have attention: use another file")
    return reader.kv_heads_of_layers
