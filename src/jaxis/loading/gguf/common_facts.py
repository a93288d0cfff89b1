"""Facts that many families share."""

from __future__ import annotations

from collections.abc import Callable

from jaxis.config.expert_counts import num_experts
from jaxis.config.hf_config import HFConfig
from jaxis.loading.gguf.config_keys import REQUIRED
from jaxis.loading.gguf.config_reader import ConfigReader, Values
from jaxis.loading.gguf.rope_keys import rope
from jaxis.loading.gguf.table import Fact, Facts, FileKeys, constant, has, head_dim, key

SOFTMAX, SIGMOID = 1, 2
"""Values of `expert_gating_func`."""


def _read_kv_heads(reader: ConfigReader) -> Values:
    if len({count for count in reader.kv_heads_of_layers or () if count}) > 1:
        reader.keys.get("attention.head_count_kv")  # says what differs
    return {"num_key_value_heads": reader.num_kv_heads}


def _write_kv_heads(config: HFConfig) -> FileKeys:
    return {"attention.head_count_kv": config.get("num_key_value_heads", config["num_attention_heads"])}


def _read_head_dim(reader: ConfigReader) -> Values:
    reader.keys.expect("attention.value_length", reader.head_dim)
    return {"head_dim": reader.head_dim}


def _write_head_dim(config: HFConfig) -> FileKeys:
    return dict.fromkeys(("attention.key_length", "attention.value_length"), head_dim(config))


def _read_tables(reader: ConfigReader) -> Values:
    is_tied = "output.weight" not in reader.keys.tensors
    return {"vocab_size": reader.vocab_size, "tie_word_embeddings": is_tied, "dtype": reader.dtype}


def _one_base(reader: ConfigReader) -> Values:
    reader.keys.expect("rope.freq_base_swa", reader.keys.get("rope.freq_base"))
    return {}


SIZES = (
    key("hidden_size", "embedding_length"),
    Fact(
        lambda reader: {"num_hidden_layers": reader.num_layers},
        lambda config: {"block_count": config["num_hidden_layers"]},
    ),
    Fact(_read_tables, lambda config: {"vocab_size": config["vocab_size"]}),
)
HEADS = Fact(
    lambda reader: {"num_attention_heads": reader.num_heads},
    lambda config: {"attention.head_count": config["num_attention_heads"]},
)
HEAD_DIM = Fact(_read_head_dim, _write_head_dim)
CONTEXT = key("max_position_embeddings", "context_length")
BASE = (SIZES, HEADS, Fact(_read_kv_heads, _write_kv_heads), HEAD_DIM, CONTEXT)
DENSE = key("intermediate_size", "feed_forward_length")
RMS = key("rms_norm_eps", "attention.layer_norm_rms_epsilon", kind=float)
LAYER_NORM = key("layer_norm_eps", "attention.layer_norm_epsilon", kind=float)


def usual(
    theta: float = 10_000.0, *, yarn: Callable[[ConfigReader], Values] = lambda _: {}, is_partial: bool = False
) -> Facts:
    """Returns the facts of a decoder with RMS norms and ropes; the arguments are those of `rope`."""
    return (BASE, DENSE, RMS, rope(theta, yarn=yarn, is_partial=is_partial))


ONE_BASE = Fact(_one_base)
"""Fact of families whose layers with and without a window have one rope."""


def windows(full_every: int, published: int | None = None) -> Fact:
    """Returns the fact of a window in all but every `full_every`-th layer; older files lack the `published` one."""

    def read(reader: ConfigReader) -> Values:
        window = reader.keys.typed("attention.sliding_window", int, REQUIRED if published is None else None)
        if window is None:
            window = reader.keys.assume("sliding_window", published)
        return {"sliding_window": window or None, "layer_types": reader.layer_types(full_every=full_every)}

    return Fact(read, lambda config: {"attention.sliding_window": config["sliding_window"]})


CLASSIC = (BASE, DENSE, LAYER_NORM)
"""Facts of families with layer norms; their configs have no HEAD_SIZES."""
HEAD_SIZES = ("head_dim", "num_key_value_heads")

ATTENTION_BIAS = has("attention_bias", "attn_q.bias")
MLP_BIAS = has("mlp_bias", "ffn_up.bias")
WINDOW = key("sliding_window", "attention.sliding_window", None)
GELU = constant("hidden_activation", "gelu_pytorch_tanh")
EXPERTS_PER_TOKEN = key("num_experts_per_tok", "expert_used_count")
EXPERT_WIDTH = key("moe_intermediate_size", "expert_feed_forward_length")
SHARED_EXPERT_WIDTH = key("shared_expert_intermediate_size", "expert_shared_feed_forward_length")
ROUTED_EXPERTS = (
    EXPERTS_PER_TOKEN,
    EXPERT_WIDTH,
    key("routed_scaling_factor", "expert_weights_scale", 1.0, float),
    key("norm_topk_prob", "expert_weights_norm", False, bool),
    key("n_group", "expert_group_count", 1),
    key("topk_group", "expert_group_used_count", 1),
)
"""Facts of DeepSeek V3's routing."""
INDEXER = (
    key("index_n_heads", "attention.indexer.head_count"),
    key("index_head_dim", "attention.indexer.key_length"),
    key("index_topk", "attention.indexer.top_k"),
)
STREAMS = (
    key("hc_mult", "hyper_connection.count"),
    key("hc_eps", "hyper_connection.epsilon", kind=float),
)
SINKHORN = key("hc_sinkhorn_iters", "hyper_connection.sinkhorn_iterations")


def _swiglu_limit(reader: ConfigReader) -> Values:
    """All experts have one limit, also the shared ones."""
    limit = reader.keys.typed("swiglu_clamp_exp", float)
    reader.keys.expect("swiglu_clamp_shexp", limit)
    return {"swiglu_limit": limit}


SWIGLU_LIMIT = Fact(_swiglu_limit)
DENSE_FIRST = key("first_k_dense_replace", "leading_dense_block_count", 0)
SHARED_COUNT = key("n_shared_experts", "expert_shared_count", 0)
PREDICTION_LAYERS = Fact(lambda reader: {"num_nextn_predict_layers": reader.num_prediction_layers})


def experts(count: str, used: str = "num_experts_per_tok") -> Facts:
    """Returns the facts of the number of experts and of those that a token goes to, by their names in config.json."""
    return Fact(
        lambda reader: {count: reader.keys.integer("expert_count")},
        lambda config: {"expert_count": num_experts(config) or config[count]},  # under any of its names
    ), key(used, "expert_used_count")
