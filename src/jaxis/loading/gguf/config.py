"""Conversion of a GGUF file's keys to a config.json, with one function for each architecture.

Values that the keys leave out are known from llama.cpp's `src/models/*.cpp`, or from the original checkpoints. Each
such value is reported (`Keys.assume`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxis.errors import ConfigError
from jaxis.loading.gguf.classic_config import CLASSICS
from jaxis.loading.gguf.config_keys import Keys
from jaxis.loading.gguf.config_reader import FULL, SLIDING, ConfigReader, ReadTensor, Values
from jaxis.loading.gguf.container import GGUFTensor
from jaxis.loading.gguf.encoder_config import bert, nomic_bert, pooling_values
from jaxis.loading.gguf.experts_config import WITH_EXPERTS
from jaxis.loading.gguf.gemma_config import GEMMAS
from jaxis.loading.gguf.hybrid_config import lfm2, lfm2moe, qwen3next, qwen35, qwen35moe
from jaxis.loading.gguf.later_config import LATER
from jaxis.loading.gguf.mamba_config import WITH_MAMBA
from jaxis.loading.gguf.names import ROPE_FACTORS_LONG, ROPE_FACTORS_SHORT
from jaxis.loading.gguf.stored_part import Sizes


@dataclass(frozen=True)
class GGUFConfig:
    """Config that the keys of a GGUF file describe.

    Attributes:
      architecture: The entry of `architecture_names.NAMES`.
      values: Content of the corresponding config.json.
      assumptions: Sentences about assumed values, as in `GGUFCheckpoint`.
      small_tensors: Tensors of the checkpoint that the file has as keys, float32.
    """

    architecture: str
    values: Values
    sizes: Sizes
    assumptions: tuple[str, ...]
    small_tensors: Mapping[str, np.ndarray]


def read_config(
    metadata: Mapping[str, Any], tensors: Mapping[str, GGUFTensor], read_tensor: ReadTensor, source: str
) -> GGUFConfig:
    """Reads the keys of a file; `read_tensor` reads a tensor of floats, None if there is none of the name.

    Raises ConfigError, which names `source`, if the architecture, or something in the keys, is not supported.
    """
    keys = Keys(metadata, tensors, source)
    family = _FAMILIES.get(keys.architecture)
    if family is None:
        raise ConfigError(
            f"{source} has the architecture {keys.architecture!r}; supported in GGUF files: "
            f"{', '.join(sorted(_FAMILIES))}. Use the original checkpoint if its family is supported"
        )
    reader = ConfigReader(keys, read_tensor)
    values = family(reader) | pooling_values(keys)
    keys.check_all_read()
    sizes = Sizes(
        reader.num_layers,
        values.get("num_attention_heads", 0),
        values.get("num_key_value_heads", reader.num_kv_heads),
        reader.head_dim,
        keys.get("expert_count", 0),
        reader.delta_heads,
        reader.packed_delta_heads,
    )
    return GGUFConfig(reader.names, values, sizes, tuple(keys.assumptions), reader.small_tensors)


def _llama(reader: ConfigReader) -> Values:
    keys = reader.keys
    rest = {**reader.rms(), **reader.dense(), **reader.rope()}
    if "partial_rotary_factor" in rest:
        raise ConfigError(f"{keys.source} rotates a part of each head, which {keys.architecture} files cannot have")
    window = reader.window()
    if keys.get("expert_count", 0):
        keys.expect("expert_weights_scale", 1.0)
        reader.names = "mixtral"
        return {
            **reader.base("MixtralForCausalLM", "mixtral"),
            **rest,
            "num_local_experts": keys.integer("expert_count"),
            "num_experts_per_tok": keys.integer("expert_used_count"),
            "sliding_window": window,
        }
    if window is not None:
        return {**reader.base("MistralForCausalLM", "mistral"), **rest, "sliding_window": window}
    return {**reader.base("LlamaForCausalLM", "llama"), **rest, **_biases(keys)}


def _biases(keys: Keys) -> Values:
    return {
        "attention_bias": keys.has_tensor("attn_q.bias") or keys.has_tensor("attn_qkv.bias"),
        "mlp_bias": keys.has_tensor("ffn_up.bias"),
    }


def _granite(reader: ConfigReader) -> Values:
    keys = reader.keys
    keys.expect("rope.scaling.finetuned", True)
    return {
        **reader.base("GraniteForCausalLM", "granite"),
        **reader.rms(),
        **reader.dense(),
        **reader.rope(),
        **_biases(keys),
        **reader.granite_multipliers(),
    }


def _mistral3(reader: ConfigReader) -> Values:
    """Mistral Small 3.1 and later, or Ministral 3, whose queries grow with their position."""
    keys = reader.keys
    beta = keys.get("attention.temperature_scale", 0.0) or None
    mscale = keys.get("rope.scaling.yarn_log_multiplier")
    rest = {
        **reader.rms(),
        **reader.dense(),
        **reader.rope(yarn={"mscale": mscale, "mscale_all_dim": mscale, "llama_4_scaling_beta": beta}),
        "sliding_window": reader.window(),
    }
    if beta is None:
        return {**reader.base("MistralForCausalLM", "mistral"), **rest}
    if "rope_scaling" not in rest:
        raise ConfigError(f"{keys.source} has attention.temperature_scale without a YaRN rope: use another file")
    return {**reader.base("Ministral3ForCausalLM", "ministral3"), **rest}


def _smollm3(reader: ConfigReader) -> Values:
    """SmolLM3. By llama.cpp, every fourth layer has no rope."""
    values = reader.usual("SmolLM3ForCausalLM", "smollm3")
    reader.keys.assume("no_rope_layer_interval", 4)
    return {**values, **_biases(reader.keys), "no_rope_layer_interval": 4}


def _seed_oss(reader: ConfigReader) -> Values:
    values = reader.usual("SeedOssForCausalLM", "seed_oss")
    has_output_bias = reader.keys.has_tensor("attn_output.bias")
    return {**values, **_biases(reader.keys), "attention_out_bias": has_output_bias}


def _minimax_m2(reader: ConfigReader) -> Values:
    keys = reader.keys
    keys.expect("expert_gating_func", 2)
    keys.expect("expert_weights_scale", 1.0)
    keys.expect("expert_weights_norm", True)
    values = reader.usual("MiniMaxM2ForCausalLM", "minimax_m2")
    values.setdefault("partial_rotary_factor", 1.0)
    return {
        **values,
        "intermediate_size": keys.integer("expert_feed_forward_length"),
        "num_local_experts": keys.integer("expert_count"),
        "num_experts_per_tok": keys.integer("expert_used_count"),
    }


def _qwen2(reader: ConfigReader) -> Values:
    values = reader.usual("Qwen2ForCausalLM", "qwen2")
    reader.keys.expect("attention.sliding_window", 0)
    return values


def _qwen3(reader: ConfigReader) -> Values:
    values = reader.usual("Qwen3ForCausalLM", "qwen3")
    reader.keys.expect("attention.sliding_window", 0)
    return {**values, **reader.attention_bias()}


def _qwen3moe(reader: ConfigReader) -> Values:
    keys = reader.keys
    keys.expect("attention.sliding_window", 0)
    keys.expect("expert_gating_func", 1)
    keys.expect("expert_shared_feed_forward_length", 0)
    keys.expect("expert_weights_scale", 1.0, 0.0)
    return {
        **reader.base("Qwen3MoeForCausalLM", "qwen3_moe"),
        **reader.rms(),
        **reader.dense(),
        **reader.rope(),
        **reader.attention_bias(),
        "num_experts": keys.integer("expert_count"),
        "num_experts_per_tok": keys.integer("expert_used_count"),
        "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
        "norm_topk_prob": keys.get_or_assume("expert_weights_norm", "norm_topk_prob", True),
    }


def _qwen2vl(reader: ConfigReader) -> Values:
    return reader.with_mrope(_qwen2(reader), interleaved=False)


def _qwen3vl(reader: ConfigReader) -> Values:
    reader.keys.ignore("n_deepstack_layers")  # as many as the vision part makes
    return reader.with_mrope(_qwen3(reader), interleaved=True)


def _qwen3vlmoe(reader: ConfigReader) -> Values:
    reader.keys.ignore("n_deepstack_layers")
    return reader.with_mrope(_qwen3moe(reader), interleaved=True)


def _phi3(reader: ConfigReader) -> Values:
    keys = reader.keys
    values = reader.usual("Phi3ForCausalLM", "phi3")
    original = keys.get("rope.scaling.original_context_length", values["max_position_embeddings"])
    long, short = reader.read_tensor(ROPE_FACTORS_LONG), reader.read_tensor(ROPE_FACTORS_SHORT)
    if long is not None and short is not None:
        factors = {"long_factor": long.tolist(), "short_factor": short.tolist()}
        attention_factor = keys.get("rope.scaling.attn_factor")
        values["rope_scaling"] = {"rope_type": "longrope", "attention_factor": attention_factor, **factors}
    return {**values, "original_max_position_embeddings": original, "sliding_window": reader.window()}


def _olmo2(reader: ConfigReader) -> Values:
    keys = reader.keys
    window = reader.window()
    rest = {**reader.rms(), **reader.dense(), **reader.rope(theta=500_000.0), **reader.attention_bias()}
    if window is None:
        return {**reader.base("Olmo2ForCausalLM", "olmo2"), **rest}
    local_theta = keys.get("rope.freq_base_swa")
    local = {} if local_theta is None else {"rope_local_base_freq": local_theta}
    layer_types = reader.layer_types(full_every=4)
    return {
        **reader.base("Olmo3ForCausalLM", "olmo3"),
        **rest,
        **local,
        "sliding_window": window,
        "layer_types": layer_types,
    }


def _gpt_oss(reader: ConfigReader) -> Values:
    keys = reader.keys
    keys.expect("rope.freq_base_swa", keys.get("rope.freq_base"))
    keys.get("feed_forward_length")
    return {
        **reader.base("GptOssForCausalLM", "gpt_oss"),
        **reader.rms(),
        # As it was published: the range between the two betas is not rounded.
        **reader.rope(theta=150_000.0, yarn={"truncate": False}),
        "intermediate_size": keys.integer("expert_feed_forward_length"),
        "num_local_experts": keys.integer("expert_count"),
        "num_experts_per_tok": keys.integer("expert_used_count"),
        "sliding_window": reader.window(128),
        "layer_types": reader.layer_types(full_every=2),
    }


def _starcoder2(reader: ConfigReader) -> Values:
    keys = reader.keys
    window = keys.get("attention.sliding_window")
    if window is None and reader.num_layers in (30, 32, 40):  # those of 3, 7 and 15 billion parameters
        window = keys.assume("sliding_window", 4096)
    return {
        **reader.base("Starcoder2ForCausalLM", "starcoder2"),
        **reader.dense(),
        **reader.rope(),
        "norm_epsilon": keys.require("attention.layer_norm_epsilon"),
        "use_bias": keys.has_tensor("attn_q.bias"),
        "hidden_act": "gelu_pytorch_tanh",
        "sliding_window": window or None,
    }


def _glm4(reader: ConfigReader) -> Values:
    keys = reader.keys
    if "rope.dimension_sections" in keys or reader.num_prediction_layers:
        raise ConfigError(f"{keys.source} is the text part of a GLM-4 vision model, which is not supported")
    values = reader.usual("Glm4ForCausalLM", "glm4")
    values.setdefault("partial_rotary_factor", 1.0)
    return {**values, **reader.attention_bias()}


def _glm4moe(reader: ConfigReader) -> Values:
    keys = reader.keys
    keys.expect("expert_gating_func", 2)
    values = reader.usual("Glm4MoeForCausalLM", "glm4_moe")
    values.setdefault("partial_rotary_factor", 1.0)
    return {
        **values,
        **reader.attention_bias(),
        "use_qk_norm": keys.has_tensor("attn_q_norm.weight"),
        "n_routed_experts": keys.integer("expert_count"),
        "num_experts_per_tok": keys.integer("expert_used_count"),
        "n_shared_experts": keys.integer("expert_shared_count"),
        "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
        "first_k_dense_replace": keys.integer("leading_dense_block_count", 0),
        "routed_scaling_factor": keys.get("expert_weights_scale", 1.0),
        "norm_topk_prob": keys.get_or_assume("expert_weights_norm", "norm_topk_prob", True),
        "n_group": keys.get("expert_group_count", 1),
        "topk_group": keys.get("expert_group_used_count", 1),
        "num_nextn_predict_layers": reader.num_prediction_layers,
    }


def _command_r(reader: ConfigReader) -> Values:
    keys = reader.keys
    return {
        **reader.base("CohereForCausalLM", "cohere"),
        **reader.dense(),
        **reader.rope(),
        "layer_norm_eps": keys.require("attention.layer_norm_epsilon"),
        "logit_scale": keys.require("logit_scale"),
        "use_qk_norm": keys.has_tensor("attn_q_norm.weight"),
        **reader.attention_bias(),
    }


def _cohere2(reader: ConfigReader) -> Values:
    keys = reader.keys
    keys.expect("rope.freq_base_swa", keys.get("rope.freq_base"))
    return {
        **reader.base("Cohere2ForCausalLM", "cohere2"),
        **reader.dense(),
        **reader.rope(),
        "layer_norm_eps": keys.require("attention.layer_norm_epsilon"),
        "logit_scale": keys.require("logit_scale"),
        "sliding_window": keys.integer("attention.sliding_window"),
        "layer_types": reader.layer_types(full_every=4),
    }


def _gemma(reader: ConfigReader, architecture: str, model_type: str, *, large_layers: int) -> Values:
    """Gemma 2 and 3: the models with the most layers scale by the width of the model instead of that of a head."""
    keys = reader.keys
    is_large = reader.num_layers == large_layers
    return {
        **reader.base(architecture, model_type),
        **reader.rms(),
        **reader.dense(),
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": reader.hidden_size // reader.num_heads if is_large else reader.head_dim,
        "final_logit_softcapping": keys.get("final_logit_softcapping"),
    }


def _gemma2(reader: ConfigReader) -> Values:
    keys = reader.keys
    values = _gemma(reader, "Gemma2ForCausalLM", "gemma2", large_layers=46)
    keys.expect("rope.freq_base_swa", keys.get("rope.freq_base"))
    return {
        **values,
        **reader.rope(),
        "attn_logit_softcapping": keys.get_or_assume("attn_logit_softcapping", "attn_logit_softcapping", 50.0),
        "final_logit_softcapping": keys.get_or_assume("final_logit_softcapping", "final_logit_softcapping", 30.0),
        "sliding_window": reader.window(4096),
        "layer_types": reader.layer_types(full_every=2),
    }


def _gemma3(reader: ConfigReader) -> Values:
    keys = reader.keys
    values = {**_gemma(reader, "Gemma3ForCausalLM", "gemma3_text", large_layers=62), **reader.rope(theta=1_000_000.0)}
    window = reader.window()
    if window is None:
        return {**values, "layer_types": [FULL] * reader.num_layers}
    return {
        **values,
        "sliding_window": window,
        "layer_types": reader.layer_types(full_every=6),
        "rope_local_base_freq": keys.get_or_assume("rope.freq_base_swa", "rope_local_base_freq", 10_000.0),
    }


def _gemma_embedding(reader: ConfigReader) -> Values:
    values = _gemma3(reader)
    return {**values, "architectures": ["Gemma3TextModel"], "use_bidirectional_attention": True}


# Published models whose older files lack the groups of experts: number of experts -> (groups, groups chosen).
_EXPERT_GROUPS = {160: (8, 3), 256: (8, 4)}


def _deepseek2(reader: ConfigReader) -> Values:
    keys = reader.keys
    keys.expect("attention.temperature_scale", 0.0)
    keys.get("attention.temperature_length")
    rope_dim, lora_rank = keys.integer("rope.dimension_count"), keys.integer("attention.kv_lora_rank")
    # Files with absorbed attention have the sizes of heads under other names, and one key-value head.
    key_dim = keys.get("attention.key_length_mla") or reader.head_dim
    value_dim = keys.get("attention.value_length_mla") or keys.integer("attention.value_length")
    is_sigmoid = _is_sigmoid(reader)
    groups, chosen = keys.get("expert_group_count"), keys.get("expert_group_used_count")
    num_experts = keys.integer("expert_count")
    if groups is None:
        groups, chosen = _EXPERT_GROUPS.get(num_experts, (1, 1))
        keys.assume("n_group", groups)
        keys.assume("topk_group", chosen)
    log_multiplier = keys.get("rope.scaling.yarn_log_multiplier")
    mscale = None if log_multiplier is None else round(10 * log_multiplier, 6)
    reader.head_dim = rope_dim  # what ropes rotate, all of it
    keys.get("attention.value_length")
    values = {
        "architectures": ["DeepseekV3ForCausalLM" if is_sigmoid else "DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v3" if is_sigmoid else "deepseek_v2",
        "hidden_size": reader.hidden_size,
        "num_hidden_layers": reader.num_layers,
        "num_attention_heads": reader.num_heads,
        "num_key_value_heads": reader.num_heads,
        "max_position_embeddings": keys.integer("context_length"),
        "vocab_size": reader.vocab_size,
        "tie_word_embeddings": "output.weight" not in keys.tensors,
        "dtype": reader.dtype,
        **reader.rms(),
        **reader.dense(),
        **reader.rope(yarn={"mscale": mscale, "mscale_all_dim": mscale}),
        "q_lora_rank": keys.get("attention.q_lora_rank") or None,
        "kv_lora_rank": lora_rank,
        "qk_rope_head_dim": rope_dim,
        "qk_nope_head_dim": key_dim - rope_dim,
        "v_head_dim": value_dim,
        "n_routed_experts": num_experts,
        "num_experts_per_tok": keys.integer("expert_used_count"),
        "n_shared_experts": keys.integer("expert_shared_count", 0),
        "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
        "first_k_dense_replace": keys.integer("leading_dense_block_count", 0),
        "routed_scaling_factor": keys.get("expert_weights_scale", 1.0),
        "norm_topk_prob": bool(keys.get("expert_weights_norm", False)),
        "n_group": groups,
        "topk_group": chosen,
    }
    if is_sigmoid:
        return {**values, "num_nextn_predict_layers": reader.num_prediction_layers}
    return {**values, "topk_method": "group_limited_greedy" if groups > 1 else "greedy"}


def _is_sigmoid(reader: ConfigReader) -> bool:
    """Returns whether experts are chosen by sigmoid scores (V3 and later), not by softmax (V2)."""
    keys = reader.keys
    gating = keys.get("expert_gating_func", 0)
    if gating in (1, 2):
        return gating == 2
    if gating:
        raise ConfigError(f"{keys.source} has {keys.architecture}.expert_gating_func = {gating}, expected 1 or 2")
    # GLM-4.7-Flash.
    is_glm = reader.num_layers in (47, 48) and reader.vocab_size == 154_880
    keys.assume("scoring_func", "sigmoid" if is_glm else "softmax")
    return is_glm


def _llama4(reader: ConfigReader) -> Values:
    keys = reader.keys
    if keys.get("attention.sliding_window", 8192) == 0:
        raise ConfigError(f"{keys.source} is a Llama 4 model without chunks, which is not supported")
    num_experts = keys.integer("expert_count")
    keys.expect("rope.freq_base_swa", keys.get("rope.freq_base"))
    layer_types = reader.layer_types(full_every=4)
    if layer_types != [SLIDING if (i + 1) % 4 else FULL for i in range(reader.num_layers)]:
        raise ConfigError(f"{keys.source} has another pattern of layers than Llama 4: use the original checkpoint")
    for name, value in (("attention_chunk_size", 8192), ("floor_scale", 8192), ("attn_scale", 0.1)):
        keys.assume(name, value)
    return {
        **reader.base("Llama4ForCausalLM", "llama4_text"),
        **reader.rms(),
        **reader.rope(theta=500_000.0),
        "intermediate_size": keys.integer("expert_feed_forward_length"),
        "intermediate_size_mlp": keys.integer("feed_forward_length"),
        "num_local_experts": num_experts,
        "num_experts_per_tok": keys.integer("expert_used_count"),
        "interleave_moe_layer_step": keys.integer("interleave_moe_layer_step"),
        "use_qk_norm": keys.assume("use_qk_norm", num_experts != 128),
        "attention_chunk_size": 8192,
        "attn_temperature_tuning": True,
        "floor_scale": 8192,
        "attn_scale": 0.1,
    }


_FAMILIES: Mapping[str, Callable[[ConfigReader], Values]] = {
    "llama": _llama,
    "granite": _granite,
    "mistral3": _mistral3,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3moe": _qwen3moe,
    "qwen2vl": _qwen2vl,
    "qwen3vl": _qwen3vl,
    "qwen3vlmoe": _qwen3vlmoe,
    "phi3": _phi3,
    "olmo2": _olmo2,
    "gpt-oss": _gpt_oss,
    "starcoder2": _starcoder2,
    "glm4": _glm4,
    "glm4moe": _glm4moe,
    "command-r": _command_r,
    "cohere2": _cohere2,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "deepseek2": _deepseek2,
    "llama4": _llama4,
    "lfm2": lfm2,
    "lfm2moe": lfm2moe,
    "minimax-m2": _minimax_m2,
    "qwen35": qwen35,
    "qwen35moe": qwen35moe,
    "seed_oss": _seed_oss,
    "smollm3": _smollm3,
    **CLASSICS,
    **LATER,
    **WITH_EXPERTS,
    **GEMMAS,
    **WITH_MAMBA,
    "qwen3next": qwen3next,
    "bert": bert,
    "nomic-bert": nomic_bert,
    "gemma-embedding": _gemma_embedding,
}
