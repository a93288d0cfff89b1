"""DeepSeek V4, Qwen3.8-Flash-Next, GLM-5.3-Flash, Kimi K3 and Hy4 as llama.cpp's converters write them in GGUF.

Names are those of `gguf-py/gguf/constants.py`, keys and changes of tensors those of `conversion/*.py`. gguf-py on PyPI
does not know the architectures yet.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

Config = dict[str, Any]
Tensors = dict[str, np.ndarray]
Changed = Iterator[tuple[str, np.ndarray]]

_TOP = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output", "head": "output"}
_USUAL = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    **{f"mlp.{name}_proj": f"ffn_{name}" for name in ("gate", "up", "down")},
    **{f"mlp.shared_experts.{name}_proj": f"ffn_{name}_shexp" for name in ("gate", "up", "down")},
    **{f"mlp.experts.{name}_proj": f"ffn_{name}_exps" for name in ("gate", "up", "down")},
    "mlp.gate": "ffn_gate_inp",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    "self_attn.o_proj": "attn_output",
}
_LATENT = {
    **{f"self_attn.q_{part}_proj": f"attn_q_{part}" for part in "ab"},
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.k_b": "attn_k_b",
    "self_attn.v_b": "attn_v_b",
}
_INDEXER = {
    "self_attn.indexer.wq_b": "indexer.attn_q_b",
    "self_attn.indexer.wk": "indexer.attn_k",
    "self_attn.indexer.k_norm": "indexer.k_norm",
    "self_attn.indexer.weights_proj": "indexer.proj",
}
_DELTA = {
    **{f"self_attn.{each}_proj": f"attn_{each}" for each in "qkv"},
    **{f"self_attn.{each}_conv1d": f"ssm_conv1d_{each}" for each in "qkv"},
    **{f"self_attn.{name}_proj": f"ssm_{name}" for name in ("f_a", "f_b", "g_a", "g_b")},
    "self_attn.b_proj": "ssm_beta",
    "self_attn.A_log": "ssm_a=",
    "self_attn.dt_bias": "ssm_dt.bias",
    "self_attn.o_norm": "ssm_norm",
}
_CONNECTIONS = {
    f"hc_{block}_{part}": f"hc_{block}_{part}" for block in ("attn", "ffn") for part in ("fn", "base", "scale")
}
_DEEPSEEK4 = {
    **_CONNECTIONS,
    **{name: name for name in ("attn_norm", "ffn_norm")},
    "attn.attn_sink": "attn_sinks",
    **{f"attn.wq_{part}": f"attn_q_{part}" for part in "ab"},
    "attn.q_norm": "attn_q_a_norm",
    "attn.wkv": "attn_kv",
    "attn.norm": "attn_kv_a_norm",
    **{f"attn.wo_{part}": f"attn_output_{part}" for part in "ab"},
    **{
        f"attn.{owner}compressor.{name}": f"{prefix}_compressor_{stored}"
        for owner, prefix in (("", "attn"), ("indexer.", "indexer"))
        for name, stored in (("wkv", "kv"), ("wgate", "gate"), ("ape", "ape"), ("norm", "norm"))
    },
    "attn.indexer.wq_b": "indexer.attn_q_b",
    "attn.indexer.weights_proj": "indexer.proj",
    "ffn.gate": "ffn_gate_inp",
    "ffn.gate.bias": "exp_probs_b.bias",
    "ffn.gate.tid2eid": "ffn_gate_tid2eid",
    **{f"ffn.experts.{w}": f"ffn_{name}_exps" for w, name in (("w1", "gate"), ("w2", "down"), ("w3", "up"))},
    **{f"ffn.shared_experts.{w}": f"ffn_{name}_shexp" for w, name in (("w1", "gate"), ("w2", "down"), ("w3", "up"))},
}
_QWEN4EXP = {
    **_USUAL,
    **{name.replace("shared_experts", "shared_expert"): stored for name, stored in _USUAL.items() if "shared" in name},
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    **{
        f"{block}_hyper_connection.{name}": f"hc_{stored_block}_{stored}"
        for block, stored_block in (("attn", "attn"), ("mlp", "ffn"))
        for name, stored in (
            ("hc_norm", "norm"),
            ("input_mix_weight_down", "down"),
            ("input_mix_weight_up", "up"),
            ("block_inject_weight", "inject"),
        )
    },
    **{f"self_attn.{each}_proj": f"attn_{each}" for each in "qkv"},
    **{f"self_attn.{each}_norm": f"attn_{each}_norm" for each in "qk"},
    **{f"self_attn.indexer.{each}_proj": f"indexer.{each}_proj" for each in "qk"},
    **{f"self_attn.indexer.{each}_layernorm": f"indexer.{each}_norm" for each in "qk"},
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "linear_attn.A_log": "ssm_a=",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
    **{f"ple.{name}_proj": f"ple_{name}" for name in ("key", "value")},
    **{f"ple.norm_{name}": f"ple_norm_{name}" for name in ("key", "query", "conv")},
    "ple.conv1d": "ple_conv1d",
}
_GLM5_NEXT = {
    **_USUAL,
    **_LATENT,
    **_INDEXER,
    **_DELTA,
    **_CONNECTIONS,
    "self_attn.indexer.index_kpool_compress_gate": "indexer_compressor_gate",
    "self_attn.indexer.index_kpool_compress_ape": "indexer_compressor_ape",
}
_KIMI_K3 = {
    **_USUAL,
    **{f"mlp.experts.{w}": f"ffn_{name}_exps" for w, name in (("w1", "gate"), ("w2", "down"), ("w3", "up"))},
    **_LATENT,
    **_DELTA,
    "self_attn.g_proj of a state": "ssm_g",
    "self_attn.g_proj": "attn_gate",
    "self_attention_res": "attn_res_score",
    "mlp_res": "ffn_res_score",
    **{f"mlp.routed_expert_{name}_proj": f"ffn_routed_{name}" for name in ("down", "up")},
    "mlp.routed_expert_norm": "ffn_routed_norm",
}
_HY_V4 = {
    **{name.replace(".gate_proj", ".linear_gate"): stored for name, stored in _USUAL.items()},
    **{f"mlp.experts.{name}_proj": f"ffn_{name}_exps" for name in ("gate", "up", "down")},
    **_LATENT,
    **_INDEXER,
    **{
        f"hc_pre.hc_{block}_layer.hc_{part}": f"hc_{stored}_{part}"
        for block, stored in (("attn", "attn"), ("mlp", "ffn"))
        for part in ("fn", "base", "scale")
    },
    "self_attn.linear_gate": "attn_gate",
    "self_attn.learnable_sink_param": "attn_sinks",
}
_HEADS_OF_STREAMS = {
    **{f"hc_head.hc_{part}": f"output_hc_{part}" for part in ("fn", "base", "scale")},
    **{f"hc_pre.hc_head.hc_head_{part}": f"output_hc_{part}" for part in ("fn", "base", "scale")},
    "hyper_connection_mixer.hc_norm": "output_hc_norm",
    **{f"hyper_connection_mixer.input_mix_weight_{part}": f"output_hc_{part}" for part in ("down", "up")},
    "output_attn_res": "output_res_score",
}


def stream_keys(architecture: str, config: Config) -> dict[str, Any]:
    """Keys below the architecture that `set_gguf_parameters` adds to the usual ones, and those it leaves out (None)."""
    return {**_KEYS[architecture](config), "attention.head_count_kv": _kv_heads(architecture, config)}


def stream_tensors(architecture: str, config: Config, tensors: Tensors) -> Tensors:
    """Tensors as `modify_tensors` changes them, by their names in the file."""
    names, change = _ARCHITECTURES[architecture]
    found: Tensors = {}
    shards: list[np.ndarray] = []
    for name, tensor in sorted(_stacked(_with_products(tensors)).items()):
        for changed, value in change(config, re.sub(r"^model\.(language_model\.)?", "", name), tensor):
            if ".shard_" in changed:
                shards.append(value)
            else:
                found[_stored_name(names, changed)] = value
    table = {"per_layer_token_embd.weight": np.concatenate(shards)} if shards else {}
    return found | table


def _kv_heads(architecture: str, config: Config) -> int | list[int]:
    if architecture == "glm5-next":
        return [0 if kind == "linear_attention" else 1 for kind in config["layer_types"]]
    if architecture == "kimi-k3":
        full = config["linear_attn_config"]["full_attn_layers"]
        return [int(i + 1 in full) for i in range(config["num_hidden_layers"])]
    return config["num_key_value_heads"] if architecture == "qwen4exp" else 1


def _stored_name(names: dict[str, str], name: str) -> str:
    """Name in the file; one in a table that ends in `.bias` is whole, and one that ends in "=" has no suffix."""
    of_layer = re.fullmatch(r"layers\.(\d+)\.(.*)", name)
    prefix, name = ("", name) if of_layer is None else (f"blk.{of_layer[1]}.", of_layer[2])
    table = _TOP | _HEADS_OF_STREAMS if of_layer is None else names
    module, _, suffix = name.rpartition(".")
    if name in table or suffix not in ("weight", "bias"):
        module, suffix = name, "weight"
    stored = table[module]
    return prefix + (stored.removesuffix("=") if stored.endswith(("=", ".bias")) else f"{stored}.{suffix}")


def _stacked(tensors: Tensors) -> Tensors:
    """Experts' tensors as one, [X, out, in]."""
    experts: dict[str, dict[int, np.ndarray]] = {}
    others: Tensors = {}
    for name, tensor in tensors.items():
        if match := re.fullmatch(r"(.*\.experts)\.(\d+)\.(\w+)\.weight", name):
            experts.setdefault(f"{match[1]}.{match[3]}.weight", {})[int(match[2])] = tensor
        else:
            others[name] = tensor
    return others | {name: np.stack([of[i] for i in range(len(of))]) for name, of in experts.items()}


def _with_products(tensors: Tensors) -> Tensors:
    """Products of the norms and projections of Kimi K3's residuals, in place of both."""
    found: Tensors = {}
    for name, tensor in tensors.items():
        if name.endswith("_res_norm.weight"):
            name, tensor = name.replace("_norm", ""), tensor * tensors[name.replace("_norm", "_proj")].reshape(-1)
        if not name.endswith("_res_proj.weight"):
            found[name] = tensor
    return found


def _indexer_keys(config: Config) -> dict[str, Any]:
    return {
        "attention.indexer.head_count": config["index_n_heads"],
        "attention.indexer.key_length": config["index_head_dim"],
        "attention.indexer.top_k": config["index_topk"],
    }


def _latent_keys(config: Config) -> dict[str, Any]:
    rope, rank = config["qk_rope_head_dim"], config["kv_lora_rank"]
    return {
        "vocab_size": config["vocab_size"],
        "rope.dimension_count": rope,
        "attention.q_lora_rank": config["q_lora_rank"],
        "attention.kv_lora_rank": rank,
        "attention.key_length": rank + rope,
        "attention.value_length": rank,
        "attention.key_length_mla": config["qk_nope_head_dim"] + rope,
        "attention.value_length_mla": config["v_head_dim"],
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "expert_shared_count": config.get("n_shared_experts", config.get("num_shared_experts")),
        "expert_weights_scale": config["routed_scaling_factor"],
        "expert_weights_norm": config.get("norm_topk_prob", config.get("moe_renormalize")),
        "leading_dense_block_count": config["first_k_dense_replace"],
    }


def _stream_count(config: Config) -> dict[str, Any]:
    return {"hyper_connection.count": config["hc_mult"], "hyper_connection.epsilon": config["hc_eps"]}


def _deepseek4_keys(config: Config) -> dict[str, Any]:
    rates = {"sliding_attention": 0, **config["compress_rates"]}
    compress, layers = config["rope_parameters"]["compress"], config["num_hidden_layers"]
    return {
        **_indexer_keys(config),
        **_stream_count(config),
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": float(compress["factor"]),
        "rope.scaling.original_context_length": compress["original_max_position_embeddings"],
        "rope.freq_base": float(config["rope_parameters"]["main"]["rope_theta"]),
        "rope.dimension_count": config["qk_rope_head_dim"],
        "attention.q_lora_rank": config["q_lora_rank"],
        "attention.sliding_window": config["sliding_window"],
        "attention.output_group_count": config["o_groups"],
        "attention.output_lora_rank": config["o_lora_rank"],
        "attention.compress_ratios": [
            *(rates[kind] for kind in config["layer_types"]),
            0,
        ],  # and the prediction layer's
        "attention.compress_rope_freq_base": float(compress["rope_theta"]),
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "expert_shared_count": config["n_shared_experts"],
        "expert_weights_scale": config["routed_scaling_factor"],
        "expert_weights_norm": True,
        "expert_gating_func": 4,
        "swiglu_clamp_exp": [config["swiglu_limit"]] * layers,
        "swiglu_clamp_shexp": [config["swiglu_limit"]] * layers,
        "hyper_connection.sinkhorn_iterations": config["hc_sinkhorn_iters"],
        "hash_layer_count": config["mlp_layer_types"].count("hash_moe"),
        "embedding_length_out": config["hidden_size"] * config["hc_mult"],
    }


def _deepseek4(config: Config, name: str, tensor: np.ndarray) -> Changed:
    yield name, tensor.astype(np.int32) if name.endswith("tid2eid") else tensor


def _qwen4exp_keys(config: Config) -> dict[str, Any]:
    indexed = [kind == "indexed_attention" for kind in config["layer_types"]]
    rope = config["rope_parameters"]
    return {
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "expert_shared_feed_forward_length": config["shared_expert_intermediate_size"],
        "ssm.conv_kernel": config["linear_conv_kernel_dim"],
        "ssm.state_size": config["linear_key_head_dim"],
        "ssm.group_count": config["linear_num_key_heads"],
        "ssm.time_step_rank": config["linear_num_value_heads"],
        "ssm.inner_size": config["linear_value_head_dim"] * config["linear_num_value_heads"],
        "attention.recurrent_layers": [not each for each in indexed],
        "full_attention_interval": 4,
        "rope.dimension_count": int(config["head_dim"] * rope["partial_rotary_factor"]),
        "rope.dimension_sections": [*rope.get("mrope_section", (11, 11, 10)), 0],
        "hyper_connection.count": config["hc_count"],
        "hyper_connection.low_rank": config["hc_lowrank"],
        "attention.indexer.head_count": config["indexer_n_heads"],
        "attention.indexer.key_length": config["indexer_head_dim"],
        "attention.indexer.top_k": config["indexer_budget"],
        "attention.compress_ratios": [config["indexer_compress_ratio"] * each for each in indexed],
        "ple.layers": [layer - 1 for layer in config["ple_layer_ids"]],
        "ple.ngram_size": config["ngram_size"],
        "ple.heads_per_ngram": config["heads_per_ngram"],
        "ple.conv_kernel": config["ple_conv_kernel_size"],
        "ple.eos_token_id": config["eos_token_id"],
        "embedding_length_per_layer_input": config["ple_embed_dim"]
        // (config["heads_per_ngram"] * (config["ngram_size"] - 1)),
    }


def ngram_keys(tensors: Tensors) -> dict[str, list[int]]:
    """Numbers of the hash of n-grams, whole, which files of Qwen3.8-Flash-Next have as keys."""
    prefix = "model.layers.0.ple.ple_embedding."
    return {
        f"ple.{key}": tensors[prefix + name].tolist()
        for key, name in (
            ("layer_multipliers", "layer_multipliers"),
            ("head_offsets", "ngram_heads_offsets"),
            ("head_vocab_sizes", "ngram_heads_vocab_sizes"),
        )
        if prefix + name in tensors
    }


def _qwen4exp(config: Config, name: str, tensor: np.ndarray) -> Changed:
    if re.search(r"ple_embedding\.(layer_mult|ngram_heads)", name):
        return
    if ".ngram_embedding.shard_" in name:
        yield name, tensor
    elif name.endswith("index_qk_proj.weight"):
        rows = config["indexer_n_heads"] * config["indexer_head_dim"]
        for each, part in (("q", tensor[:rows]), ("k", tensor[rows:])):
            yield name.replace("index_qk_proj", f"{each}_proj"), part
    elif name.endswith("ple.conv1d.weight"):
        yield name, tensor.squeeze(1)
    elif ".ple.norm_" in name:
        yield name, tensor + 1
    else:
        yield name, tensor


def _glm5_next_keys(config: Config) -> dict[str, Any]:
    return {
        **_latent_keys(config),
        **_indexer_keys(config),
        **_stream_count(config),
        "attention.layer_norm_epsilon": 1e-6,
        "ssm.conv_kernel": config["linear_conv_kernel_dim"],
        "kda.head_dim": config["linear_head_dim"],
        "kda.gate_lower_bound": config["linear_lower_bound"],
        "attention.indexer.kpool": config["index_kpool"],
        "attention.indexer.kpool_select_tail": True,
        "attention.indexer.types": [kind == "full" for kind in config["indexer_types"]],
        "hyper_connection.sinkhorn_iterations": config["hc_sinkhorn_iters"],
        "swiglu_clamp_exp": [config["swiglu_limit"]] * config["num_hidden_layers"],
        "swiglu_clamp_shexp": [config["swiglu_limit"]] * config["num_hidden_layers"],
    }


def _kimi_k3_keys(config: Config) -> dict[str, Any]:
    linear = config["linear_attn_config"]
    return {
        **_latent_keys(config),
        "ssm.conv_kernel": linear["short_conv_kernel_size"],
        "kda.head_dim": linear["head_dim"],
        "kda.gate_lower_bound": linear["gate_lower_bound"],
        "expert_used_count": config["num_experts_per_token"],
        "expert_gating_func": 2,
        "expert_latent_length": config["routed_expert_hidden_size"],
        "activation.situ_beta": config["activation_situ_beta"],
        "activation.situ_linear_beta": config["activation_situ_linear_beta"],
        "attn_res.block_size": config["attn_res_block_size"],
    }


def _hy_v4_keys(config: Config) -> dict[str, Any]:
    return {
        **_latent_keys(config),
        **_indexer_keys(config),
        **_stream_count(config),
        **dict.fromkeys(("expert_group_count", "expert_group_used_count")),
        "expert_gating_func": 2,
        "attention.indexer.types": [kind == "full" for kind in config["indexer_types"]],
        "hyper_connection.magnitude": config["hc_magnitude"],
        "swiglu_clamp_exp": [config["swiglu_limit"]] * config["num_hidden_layers"],
    }


def _of_latents(config: Config, name: str, tensor: np.ndarray) -> Changed:
    """Heads of latent attention apart, convolutions of four axes, rates of decay of each head."""
    name = name.replace("block_sparse_moe.", "mlp.")
    if name.endswith("kv_b_proj.weight"):
        key_dim = config["qk_nope_head_dim"]
        heads = tensor.reshape(config["num_attention_heads"], -1, tensor.shape[1])
        yield name.replace("kv_b_proj", "k_b"), heads[:, :key_dim].swapaxes(1, 2)
        yield name.replace("kv_b_proj", "v_b"), heads[:, key_dim:]
    elif name.endswith("_conv1d.weight"):
        yield name, tensor.reshape(1, -1, 1, tensor.shape[-1])
    elif name.endswith(".A_log"):
        yield name, -np.exp(tensor.reshape(-1)[: config["num_attention_heads"]])
    elif name.endswith(".g_proj.weight") and int(name.split(".")[1]) + 1 in config["linear_attn_config"]["kda_layers"]:
        yield name.replace("g_proj", "g_proj of a state"), tensor
    elif name.endswith("experts.gate_up_proj"):
        for each, part in zip(("gate", "up"), np.split(tensor, 2, axis=1), strict=True):
            yield name.replace("gate_up_proj", f"{each}_proj"), part
    else:
        yield name, tensor


_ARCHITECTURES: dict[str, tuple[dict[str, str], Callable[[Config, str, np.ndarray], Changed]]] = {
    "deepseek4": (_DEEPSEEK4, _deepseek4),
    "qwen4exp": (_QWEN4EXP, _qwen4exp),
    "glm5-next": (_GLM5_NEXT, _of_latents),
    "kimi-k3": (_KIMI_K3, _of_latents),
    "hy_v4": (_HY_V4, _of_latents),
}
_KEYS: dict[str, Callable[[Config], dict[str, Any]]] = {
    "deepseek4": _deepseek4_keys,
    "qwen4exp": _qwen4exp_keys,
    "glm5-next": _glm5_next_keys,
    "kimi-k3": _kimi_k3_keys,
    "hy_v4": _hy_v4_keys,
}
