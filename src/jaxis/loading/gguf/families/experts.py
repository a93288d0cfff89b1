"""GPT-OSS, Llama 4, MiniMax, Trinity, Mellum 2, K-EXAONE, Hy3, ERNIE 4.5 MoE and Hunyuan: experts in most layers."""

from __future__ import annotations

from jaxis.config.hf_config import HFConfig
from jaxis.errors import ConfigError
from jaxis.loading.gguf.common_facts import (
    ATTENTION_BIAS,
    BASE,
    DENSE_FIRST,
    EXPERT_WIDTH,
    ONE_BASE,
    PREDICTION_LAYERS,
    RMS,
    ROUTED_EXPERTS,
    SIGMOID,
    SOFTMAX,
    experts,
    usual,
    windows,
)
from jaxis.loading.gguf.config_reader import FULL, SLIDING, ConfigReader, Values
from jaxis.loading.gguf.rope_keys import rope
from jaxis.loading.gguf.table import GGUF, Fact, FileKeys, Written, constant, key, only, unused
from jaxis.loading.gguf.tensor_names import NORM_AFTER_ATTENTION, NORMS_AROUND, W1_W3_W2, GateUpOrder, GGUFNames, each

_ALL_LAYERS_ARE_SPARSE = (
    key("intermediate_size", "feed_forward_length", None),
    key("intermediate_size", "expert_feed_forward_length"),
)
_LLAMA4_KINDS = ("chunked_attention", "chunked_attention", "chunked_attention", FULL)


def _read_llama4(reader: ConfigReader) -> Values:
    keys = reader.keys
    if keys.get("attention.sliding_window", 8192) == 0:
        raise ConfigError(f"{keys.source} is a Llama 4 model without chunks, which is not supported")
    if reader.layer_types(full_every=4) != [SLIDING if (i + 1) % 4 else FULL for i in range(reader.num_layers)]:
        raise ConfigError(f"{keys.source} has another pattern of layers than Llama 4: use the original checkpoint")
    chunks = {name: keys.assume(name, 8192) for name in ("attention_chunk_size", "floor_scale")}
    return {
        **chunks,
        "attn_scale": keys.assume("attn_scale", 0.1),
        "use_qk_norm": keys.assume("use_qk_norm", keys.integer("expert_count") != 128),
        "attn_temperature_tuning": True,
    }


def _write_llama4(config: HFConfig) -> FileKeys:
    layers, step = range(config["num_hidden_layers"]), config["interleave_moe_layer_step"]
    for name, expected in (
        ("moe_layers", [i for i in layers if (i + 1) % step == 0]),
        ("no_rope_layers", [int((i + 1) % 4 != 0) for i in layers]),
        ("layer_types", [_LLAMA4_KINDS[i % 4] for i in layers]),
    ):
        if config.get(name) not in (None, [], expected):
            raise ConfigError(f"{config.source}: GGUF has no key for {name}={config.get(name)}, only {expected}")
    return {}


def _kinds_of_layers(reader: ConfigReader) -> Values:
    """MiniMax M3: layers with experts follow the dense ones, and those with an indexer select blocks of tokens."""
    keys, layers = reader.keys, range(reader.num_layers)
    num_dense = keys.integer("leading_dense_block_count", 0)
    is_sparse = [f"blk.{layer}.indexer.q_proj.weight" in keys.tensors for layer in layers]
    return {
        "layer_types": ["minimax_m3_sparse" if sparse else FULL for sparse in is_sparse],
        "mlp_layer_types": ["dense" if layer < num_dense else "sparse" for layer in layers],
    }


def _kinds_by_experts(reader: ConfigReader) -> Values:
    """Reads the layers that have experts, and the number of shared ones; the file says only their width together."""
    names, layers = reader.keys.tensors, range(reader.num_layers)
    width = reader.keys.integer("expert_shared_feed_forward_length")
    return {
        "mlp_layer_types": ["sparse" if f"blk.{i}.ffn_gate_inp.weight" in names else "dense" for i in layers],
        "num_shared_experts": width // reader.values["moe_intermediate_size"],
    }


def _one_width(reader: ConfigReader) -> Values:
    """Hunyuan A13B's experts are as wide as its dense layers."""
    for name in ("expert_feed_forward_length", "expert_shared_feed_forward_length"):
        reader.keys.expect(name, reader.values["intermediate_size"])
    return {}


GGUFS = (
    GGUF(
        ("gpt-oss", "gpt_oss", "GptOssForCausalLM"),
        (
            # As it was published: the range between the two betas is not rounded.
            [BASE, RMS, rope(150_000.0, yarn=lambda _: {"truncate": False}), ONE_BASE],
            [_ALL_LAYERS_ARE_SPARSE, experts("num_local_experts"), windows(2, 128)],
        ),
        GGUFNames(NORM_AFTER_ATTENTION | {"attn_sinks": "self_attn.sinks="}, stack=GateUpOrder(interleaved=True)),
        written=Written(biases=True, window=True),
    ),
    GGUF(
        ("llama4", "llama4_text", "Llama4ForCausalLM"),
        (
            [BASE, RMS, rope(500_000.0), ONE_BASE, experts("num_local_experts"), Fact(_read_llama4, _write_llama4)],
            key("intermediate_size", "expert_feed_forward_length"),
            key("intermediate_size_mlp", "feed_forward_length"),
            key("interleave_moe_layer_step", "interleave_moe_layer_step"),
        ),
        GGUFNames(stack=GateUpOrder()),
        written=Written(window=True),
    ),
    GGUF(
        ("afmoe", "afmoe", "AfmoeForCausalLM"),
        (
            [usual(), experts("num_experts"), EXPERT_WIDTH, windows(4), only("expert_gating_func", SIGMOID)],
            key("num_shared_experts", "expert_shared_count", 0),
            key("num_dense_layers", "leading_dense_block_count", 0),
            key("route_scale", "expert_weights_scale", 1.0, float),
            [only("expert_weights_norm", True), constant("mup_enabled", True)],
        ),
        GGUFNames({**NORMS_AROUND, "attn_gate": "self_attn.gate_proj"}),
    ),
    GGUF(
        ("mellum", "mellum", "MellumForCausalLM"),
        (
            [usual(500_000.0), experts("num_experts"), EXPERT_WIDTH, windows(4)],
            key("rope_local_base_freq", "rope.freq_base_swa", lambda reader: reader.values["rope_theta"], float),
        ),
    ),
    GGUF(
        ("exaone-moe", "exaone_moe", "ExaoneMoeForCausalLM"),
        (
            [usual(1_000_000.0), ROUTED_EXPERTS, experts("num_experts"), DENSE_FIRST, windows(4), ONE_BASE],
            [only("expert_gating_func", SIGMOID), unused("expert_shared_feed_forward_length")],
            key("num_shared_experts", "expert_shared_count", 1),
        ),
    ),
    GGUF(
        ("hy_v3", "hy_v3", "HYV3ForCausalLM"),
        (
            [usual(), ATTENTION_BIAS, experts("num_experts"), EXPERT_WIDTH, Fact(_kinds_by_experts), PREDICTION_LAYERS],
            key("router_scaling_factor", "expert_weights_scale", 1.0, float),
            [only("expert_gating_func", SIGMOID), only("expert_weights_norm", True)],
        ),
    ),
    GGUF(
        ("minimax-m2", "minimax_m2", "MiniMaxM2ForCausalLM"),
        (
            [usual(is_partial=True), _ALL_LAYERS_ARE_SPARSE, experts("num_local_experts")],
            only("expert_gating_func", SIGMOID),
            only("expert_weights_norm", True),
        ),
        GGUFNames(projections=W1_W3_W2),
    ),
    GGUF(
        ("minimax-m3", "minimax_m3_vl_text", "MiniMaxM3SparseForCausalLM"),
        (
            [usual(5_000_000.0, is_partial=True), experts("num_local_experts"), Fact(_kinds_of_layers)],
            key("dense_intermediate_size", "feed_forward_length"),
            key("intermediate_size", "expert_feed_forward_length"),
            key("shared_intermediate_size", "expert_feed_forward_length"),
            key("routed_scaling_factor", "expert_weights_scale", 1.0, float),
            key("index_n_heads", "attention.indexer.head_count"),
            key("index_head_dim", "attention.indexer.key_length"),
            key("index_block_size", "attention.indexer.block_size"),
            key("index_topk_blocks", "attention.indexer.top_k"),
            [only("attention.indexer.local_blocks", 1), only("expert_shared_count", 1)],
            [only("expert_gating_func", SIGMOID), only("expert_weights_norm", True)],
        ),
        GGUFNames(
            each("q_proj k_proj q_norm k_norm", "indexer.{}", "self_attn.indexer.{}"),
            projections=W1_W3_W2,
            adds_one_to_norms=True,
        ),
    ),
    GGUF(
        ("ernie4_5-moe", "ernie4_5_moe", "Ernie4_5_MoeForCausalLM"),
        (
            [usual(500_000.0), experts("moe_num_experts", "moe_k"), EXPERT_WIDTH],
            only("expert_gating_func", SOFTMAX),
            unused("expert_shared_feed_forward_length"),  # the converter's guess, of other sizes
            key("moe_num_shared_experts", "expert_shared_count", 0),
            key("moe_layer_start_index", "leading_dense_block_count", 0),
            key("moe_layer_interval", "interleave_moe_layer_step", 1),
        ),
    ),
    # The files of Hunyuan have the rope's base with alpha.
    GGUF(
        ("hunyuan-moe", "hunyuan_v1_moe", "HunYuanMoEV1ForCausalLM"),
        (
            [usual(), ATTENTION_BIAS, experts("num_experts", "moe_topk"), Fact(_one_width)],
            only("expert_shared_count", 1),
        ),
    ),
)
