"""Qwen3-Next, Qwen 3.5 and Qwen3.8-Flash-Next, most of whose layers are gated delta networks."""

from __future__ import annotations

import re

import numpy as np

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
from jaxis.loading.gguf.table import GGUF, Fact, constant, key, only, unused
from jaxis.loading.gguf.tensor_names import NORM_AFTER_ATTENTION, OF_TABLE, GGUFNames, each

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
_MIXER = (("norm", "hc_norm"), ("down", "input_mix_weight_down"), ("up", "input_mix_weight_up"))


def _indexed_layers(reader: ConfigReader) -> Values:
    """Attention of Qwen3.8-Flash-Next selects among groups of as many tokens as a layer's ratio says."""
    keys = reader.keys
    ratios = reader.of_layers("attention.compress_ratios")
    if len(sizes := {ratio for ratio in ratios if ratio}) != 1:
        raise ConfigError(f"{keys.source} has groups of {sorted(sizes)} tokens, of which one size is supported")
    keys.ignore("attention.recurrent_layers")  # which the ratios say
    kinds = ["indexed_attention" if ratio else "linear_attention" for ratio in ratios]
    return {"layer_types": kinds, "indexer_compress_ratio": sizes.pop()}


def _ngrams(reader: ConfigReader) -> Values:
    """Reads the n-grams of one layer, with the numbers of their hash, which loading compares with the config's."""
    keys = reader.keys
    layers = keys.array("ple.layers", [])
    keys.ignore("ple.image_token_id")
    if not layers:
        return {}
    if len(layers) > 1:
        raise ConfigError(f"{keys.source} has n-grams in the layers {layers}, of which one is supported")
    reader.table_layer = layers[0]
    order, heads = keys.integer("ple.ngram_size"), keys.integer("ple.heads_per_ngram")
    moduli = keys.array("ple.head_vocab_sizes")
    for name, numbers in (
        ("layer_multipliers", keys.array("ple.layer_multipliers")),
        ("ngram_heads_offsets", keys.array("ple.head_offsets")),
        ("ngram_heads_vocab_sizes", moduli),
    ):
        reader.small_tensors[f"model.layers.{layers[0]}.ple.ple_embedding.{name}"] = np.array(numbers, np.int64)
    return {
        "ple_layer_ids": [layers[0] + 1],
        "ngram_size": order,
        "heads_per_ngram": heads,
        "ple_embed_dim": keys.integer("embedding_length_per_layer_input") * heads * (order - 1),
        "ple_conv_kernel_size": keys.integer("ple.conv_kernel"),
        "ngram_vocab_size_base": min(moduli),  # of which the moduli are the next primes
        "make_ngram_vocab_size_divisible_by": reader.rows_of("per_layer_token_embd.weight"),
        "eos_token_id": keys.integer("ple.eos_token_id"),
    }


GGUFS = (
    GGUF(
        ("qwen35", "qwen3_5_text", "Qwen3_5ForCausalLM"),
        (_HYBRID, DENSE),
        _NAMES,
    ),
    GGUF(("qwen35moe", *_MOE_MODEL), _HYBRID_MOE, _NAMES),
    # As Qwen 3.5 with unpacked projections, which files have.
    GGUF(("qwen3next", *_MOE_MODEL), (_HYBRID_MOE, Fact(_checkpoint_order)), _NAMES),
    GGUF(
        ("qwen4exp", "qwen4_exp_text", "Qwen4ExpForCausalLM"),
        (
            [_HYBRID_MOE, Fact(_indexed_layers), Fact(_ngrams), constant("norm_topk_prob", True)],
            key("hc_count", "hyper_connection.count"),
            key("hc_lowrank", "hyper_connection.low_rank"),
            key("indexer_n_heads", "attention.indexer.head_count"),
            key("indexer_head_dim", "attention.indexer.key_length"),
            key("indexer_budget", "attention.indexer.top_k"),
            constant("output_gate_type", "sigmoid"),
        ),
        GGUFNames(
            {
                **_BLOCK,
                **{
                    f"hc_{block}_{stored}": f"{block}_hc.{name}"
                    for block in ("attn", "ffn")
                    for stored, name in (*_MIXER, ("inject", "block_inject_weight"))
                },
                **{f"indexer.{part}_proj": f"self_attn.indexer.index_qk_proj[{i}]" for i, part in enumerate("qk")},
                **each("q k", "indexer.{}_norm", "self_attn.indexer.{}_layernorm"),
                **each("key value", "ple_{}", "ple.{}_proj"),
                **each("key query conv", "ple_norm_{}", "ple.norm_{}"),
                "ple_conv1d": "ple.conv1d",
            },
            top_level={
                **{f"output_hc_{stored}": f"model.norm.{name}" for stored, name in _MIXER},
                "per_layer_token_embd": f"model.layers.{OF_TABLE}.ple.ple_embedding.ngram_embedding",
            },
            adds_one_to_norms=True,
        ),
    ),
)
