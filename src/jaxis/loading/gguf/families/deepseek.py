"""DeepSeek V2, V3 and V4, and other families with its routing: dots.llm1 and Ling 2.0."""

from __future__ import annotations

from jaxis.config.hf_config import HFConfig
from jaxis.errors import ConfigError
from jaxis.loading.gguf.common_facts import (
    ATTENTION_BIAS,
    BASE,
    CONTEXT,
    DENSE,
    DENSE_FIRST,
    HEADS,
    INDEXER,
    PREDICTION_LAYERS,
    RMS,
    ROUTED_EXPERTS,
    SHARED_COUNT,
    SIGMOID,
    SINKHORN,
    SIZES,
    SOFTMAX,
    STREAMS,
    SWIGLU_LIMIT,
    experts,
    usual,
)
from jaxis.loading.gguf.config_reader import ConfigReader, Values
from jaxis.loading.gguf.rope_keys import rope
from jaxis.loading.gguf.table import GGUF, Fact, FileKeys, Written, constant, has, key, only, unused
from jaxis.loading.gguf.tensor_names import CONNECTION_OF_OUTPUT, CONNECTIONS, PACKED, GateUpOrder, GGUFNames, each

LATENT_NAMES = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    # The two parts of kv_b_proj, the first transposed: `LatentHeadsFormat` joins them.
    "attn_k_b": "self_attn.kv_b_proj.k_b=",
    "attn_v_b": "self_attn.kv_b_proj.v_b=",
}
INDEXER_NAMES = {
    **{"indexer.attn_q_b": "self_attn.indexer.wq_b", "indexer.attn_k": "self_attn.indexer.wk"},
    **{"indexer.k_norm": "self_attn.indexer.k_norm", "indexer.proj": "self_attn.indexer.weights_proj"},
}
_NAMES = GGUFNames(LATENT_NAMES)
_NAMES_WITH_INDEXER = GGUFNames(LATENT_NAMES | INDEXER_NAMES)
# Published models whose older files lack the groups of experts: number of experts -> (groups, groups chosen).
_EXPERT_GROUPS = {160: (8, 3), 256: (8, 4)}


def _read_latent_sizes(reader: ConfigReader) -> Values:
    """Reads latent attention. Absorbed, its heads' sizes have other names, and it has one key-value head."""
    keys = reader.keys
    keys.expect("attention.temperature_scale", 0.0)
    keys.get("attention.temperature_length")
    rope_dim = keys.integer("rope.dimension_count")
    key_dim = keys.integer("attention.key_length_mla", 0) or reader.head_dim
    value_dim = keys.get("attention.value_length_mla") or keys.integer(
        "attention.value_length", reader.hidden_size // reader.num_heads
    )
    keys.get("attention.value_length")
    reader.head_dim = rope_dim  # what ropes rotate, all of it
    return {
        "num_key_value_heads": reader.num_heads,
        "qk_rope_head_dim": rope_dim,
        "qk_nope_head_dim": key_dim - rope_dim,
        "v_head_dim": value_dim,
    }


def _write_latent_sizes(config: HFConfig) -> FileKeys:
    """Describes attention to latents: one key-value head, whose key is a latent and a rotated part."""
    rank, rope_dim = config["kv_lora_rank"], config["qk_rope_head_dim"]
    return {
        "attention.head_count_kv": 1,
        "attention.key_length": rank + rope_dim,
        "attention.value_length": rank,
        "attention.key_length_mla": config["qk_nope_head_dim"] + rope_dim,
        "attention.value_length_mla": config["v_head_dim"],
    }


def _mscale(reader: ConfigReader) -> Values:
    log_multiplier = reader.keys.get("rope.scaling.yarn_log_multiplier")
    mscale = None if log_multiplier is None else round(10 * log_multiplier, 6)
    return {"mscale": mscale, "mscale_all_dim": mscale}


def _read_groups(reader: ConfigReader) -> Values:
    keys = reader.keys
    groups, chosen = keys.get("expert_group_count"), keys.get("expert_group_used_count")
    if groups is None:
        groups, chosen = _EXPERT_GROUPS.get(keys.integer("expert_count"), (1, 1))
        keys.assume("n_group", groups)
        keys.assume("topk_group", chosen)
    return {"n_group": groups, "topk_group": chosen}


def _write_groups(config: HFConfig) -> FileKeys:
    return {"expert_group_count": config.get("n_group", 1), "expert_group_used_count": config.get("topk_group", 1)}


def _is_sigmoid(reader: ConfigReader) -> bool:
    """Returns whether experts are chosen by sigmoid scores (V3 and later), not by softmax (V2)."""
    keys = reader.keys
    gating = keys.get("expert_gating_func", 0)
    if gating in (SOFTMAX, SIGMOID):
        return gating == SIGMOID
    if gating:
        raise ConfigError(f"{keys.source} has {keys.architecture}.expert_gating_func = {gating}, expected 1 or 2")
    # GLM-4.7-Flash.
    is_glm = reader.num_layers in (47, 48) and reader.vocab_size == 154_880
    keys.assume("scoring_func", "sigmoid" if is_glm else "softmax")
    return is_glm


def _method(reader: ConfigReader) -> Values:
    return {"topk_method": "group_limited_greedy" if reader.values["n_group"] > 1 else "greedy"}


def _note_of_v2(config: HFConfig) -> str | None:
    if config.get("n_group", 1) <= 1:
        return None
    return "llama.cpp chooses this model's groups of experts in another way, and gives other logits"


LATENT_ATTENTION = (
    [SIZES, HEADS, CONTEXT, Fact(_read_latent_sizes, _write_latent_sizes), DENSE, RMS, rope(yarn=_mscale)],
    key("q_lora_rank", "attention.q_lora_rank", None),
    key("kv_lora_rank", "attention.kv_lora_rank"),
)
_DEEPSEEK = (
    LATENT_ATTENTION,
    [ROUTED_EXPERTS, Fact(_read_groups, _write_groups), experts("n_routed_experts"), SHARED_COUNT, DENSE_FIRST],
)


_SPARSE = (_DEEPSEEK, PREDICTION_LAYERS, INDEXER, only("expert_gating_func", SIGMOID))


def read_indexer_types(reader: ConfigReader) -> Values:
    """Reads the layers that have an indexer; all, if the file does not say it."""
    listed = reader.keys.for_layers("attention.indexer.types", reader.num_layers)
    return {} if listed is None else {"indexer_types": ["full" if each else "shared" for each in listed]}


def _glm_indexer_types(reader: ConfigReader) -> Values:
    """Files with a long context that do not say it are GLM-5.2's to llama.cpp, not all of whose layers have one."""
    values, keys = read_indexer_types(reader), reader.keys
    if not values and keys.integer("context_length") >= 1 << 20:
        raise ConfigError(f"{keys.source} does not say which layers have an indexer: use a newer file of the model")
    return values


def _long_rope(reader: ConfigReader) -> Values:
    if (scaling := reader.long_factors()) is None:
        return {}
    original = {"original_max_position_embeddings": reader.original_context}
    return {"rope_scaling": scaling | {"attention_factor": 1.0} | original}


def _temperature(reader: ConfigReader) -> Values:
    """llama.cpp's converter leaves out the growth of queries with position, which published models have."""
    beta = reader.keys.assume("llama_4_scaling_beta", 0.1)
    return {"rope_scaling": reader.values["rope_scaling"] | {"llama_4_scaling_beta": beta}}


def _gating(function: int) -> Fact:
    return Fact(write=lambda _: {"expert_gating_func": function})


_COMPRESSOR = (("kv", "kv_proj"), ("gate", "gate_proj"), ("ape", "position_bias="), ("norm", "kv_norm"))
_V4_NAMES = GGUFNames(
    {
        **each("q_a q_b kv", "attn_{}", "self_attn.{}_proj"),
        **{"attn_q_a_norm": "self_attn.q_a_norm", "attn_kv_a_norm": "self_attn.kv_norm"},
        **each("a b", "attn_output_{}", "self_attn.o_{}_proj"),
        "attn_sinks": "self_attn.sinks=",
        **{f"attn_compressor_{stored}": f"self_attn.compressor.{name}" for stored, name in _COMPRESSOR},
        **{f"indexer_compressor_{stored}": f"self_attn.indexer.compressor.{name}" for stored, name in _COMPRESSOR},
        **{"indexer.attn_q_b": "self_attn.indexer.q_b_proj", "indexer.proj": "self_attn.indexer.weights_proj"},
        **CONNECTIONS,
        "ffn_gate_tid2eid": "mlp.gate.tid2eid=",
    },
    top_level=CONNECTION_OF_OUTPUT,
)
_SQRT_SOFTPLUS = 4


def _compression(reader: ConfigReader) -> Values:
    return {"compress_ratios": reader.of_layers("attention.compress_ratios")}


GGUFS = (
    GGUF(
        ("deepseek2", "deepseek_v3", "DeepseekV3ForCausalLM"),
        (_DEEPSEEK, PREDICTION_LAYERS, _gating(SIGMOID)),
        _NAMES,
        when=_is_sigmoid,
        written=Written(),
    ),
    GGUF(
        ("deepseek2", "deepseek_v2", "DeepseekV2ForCausalLM"),
        (_DEEPSEEK, Fact(_method), _gating(SOFTMAX)),
        _NAMES,
        written=Written(note=_note_of_v2),
    ),
    GGUF(("deepseek32", "deepseek_v32", "DeepseekV32ForCausalLM"), _SPARSE, _NAMES_WITH_INDEXER),
    GGUF(
        ("glm-dsa", "glm_moe_dsa", "GlmMoeDsaForCausalLM"),
        (_SPARSE, Fact(_glm_indexer_types)),
        _NAMES_WITH_INDEXER,
    ),
    GGUF(
        ("minicpm3", "minicpm3", "MiniCPM3ForCausalLM"),
        (
            [LATENT_ATTENTION, Fact(_long_rope)],
            # As in llama.cpp's code.
            constant("scale_emb", 12, is_assumed=True),
            constant("scale_depth", 1.4, is_assumed=True),
            constant("dim_model_base", 256, is_assumed=True),
        ),
        _NAMES,
    ),
    GGUF(
        ("mistral4", "mistral4", "Mistral4ForCausalLM"),
        (_DEEPSEEK, only("expert_gating_func", SOFTMAX, 0), Fact(_temperature)),
        GGUFNames(LATENT_NAMES, stack=GateUpOrder(outputs_first=True)),
    ),
    GGUF(
        ("deepseek4", "deepseek_v4", "DeepseekV4ForCausalLM"),
        (
            [BASE, RMS, rope(), Fact(_compression), ROUTED_EXPERTS, experts("n_routed_experts"), SHARED_COUNT, INDEXER],
            [STREAMS, only("expert_gating_func", _SQRT_SOFTPLUS), constant("scoring_func", "sqrtsoftplus")],
            key("qk_rope_head_dim", "rope.dimension_count"),
            key("q_lora_rank", "attention.q_lora_rank"),
            key("sliding_window", "attention.sliding_window"),
            key("o_groups", "attention.output_group_count"),
            key("o_lora_rank", "attention.output_lora_rank"),
            key("compress_rope_theta", "attention.compress_rope_freq_base", kind=float),
            key("num_hash_layers", "hash_layer_count"),
            [SINKHORN, SWIGLU_LIMIT, PREDICTION_LAYERS],
            unused("embedding_length_out", "feed_forward_length"),
        ),
        _V4_NAMES,
    ),
    GGUF(
        ("dots1", "dots1", "Dots1ForCausalLM"),
        (
            [usual(), ATTENTION_BIAS, ROUTED_EXPERTS, experts("n_routed_experts"), SHARED_COUNT, DENSE_FIRST],
            only("expert_gating_func", SIGMOID),
            constant("sliding_window", None),
        ),
    ),
    GGUF(
        ("bailingmoe2", "bailing_moe", "BailingMoeV2ForCausalLM"),
        (
            [usual(is_partial=True), ROUTED_EXPERTS, experts("num_experts"), DENSE_FIRST, PREDICTION_LAYERS],
            only("expert_gating_func", SIGMOID),
            # As large as the shared experts are together, or as one of them.
            unused("expert_shared_feed_forward_length"),
            key("num_shared_experts", "expert_shared_count"),
            has("use_qkv_bias", "attn_qkv.bias"),
        ),
        GGUFNames(PACKED),
    ),
)
