"""Configs of Mamba, Mamba2 and models with such layers, from the keys of GGUF files.

Source: llama.cpp's `src/models/*.cpp` of these architectures, and its converters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from jaxis.errors import ConfigError
from jaxis.loading.gguf.config_reader import ConfigReader, Values
from jaxis.loading.gguf.experts_config import deepseek_experts, granite_experts


def _mamba(reader: ConfigReader) -> Values:
    """Mamba, or Falcon Mamba, whose norms without weights have an epsilon of their own, which the file lacks."""
    keys = reader.keys
    values = {
        **_state_alone(reader, "MambaForCausalLM", "mamba"),
        "intermediate_size": keys.integer("ssm.inner_size"),
        "time_step_rank": keys.integer("ssm.time_step_rank"),
    }
    if not keys.get("ssm.dt_b_c_rms", False):
        return values
    falcon = {"architectures": ["FalconMambaForCausalLM"], "model_type": "falcon_mamba"}
    return {**values, **falcon, "mixer_rms_eps": keys.assume("mixer_rms_eps", 1e-6)}


def _mamba2(reader: ConfigReader) -> Values:
    """Mamba2 and Codestral Mamba."""
    keys = reader.keys
    num_heads, head_dim = _heads(reader)
    if num_heads * head_dim % reader.hidden_size:
        raise ConfigError(f"{keys.source} has {num_heads * head_dim} features, no multiple of {reader.hidden_size}")
    return {
        **_state_alone(reader, "Mamba2ForCausalLM", "mamba2"),
        "num_heads": num_heads,
        "head_dim": head_dim,
        "n_groups": keys.integer("ssm.group_count"),
        "expand": num_heads * head_dim // reader.hidden_size,
    }


def _state_alone(reader: ConfigReader, architecture: str, model_type: str) -> Values:
    keys = reader.keys
    keys.ignore("feed_forward_length", "context_length")  # of neither of which there is any
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "hidden_size": reader.hidden_size,
        "num_hidden_layers": reader.num_layers,
        "vocab_size": reader.vocab_size,
        "tie_word_embeddings": "output.weight" not in keys.tensors,
        "dtype": reader.dtype,
        "layer_norm_epsilon": float(keys.require("attention.layer_norm_rms_epsilon")),
        "state_size": keys.integer("ssm.state_size"),
        "conv_kernel": keys.integer("ssm.conv_kernel"),
        "use_bias": keys.has_tensor("ssm_in.bias"),
        "use_conv_bias": keys.has_tensor("ssm_conv1d.bias"),
    }


def _heads(reader: ConfigReader) -> tuple[int, int]:
    """The heads of Mamba2, which files call the rank of the time steps, and their size."""
    keys = reader.keys
    inner_size, num_heads = keys.integer("ssm.inner_size"), keys.integer("ssm.time_step_rank")
    if not num_heads or inner_size % num_heads:
        raise ConfigError(f"{keys.source} has {num_heads} Mamba2 heads for {inner_size} features: use another file")
    return num_heads, inner_size // num_heads


def _jamba(reader: ConfigReader) -> Values:
    """Jamba. The layers with attention or experts show the periods of layers."""
    keys = reader.keys
    num_experts = keys.integer("expert_count", 1)
    attends = [heads > 0 for heads in reader.kv_heads_of_layers or [reader.num_kv_heads] * reader.num_layers]
    routes = [f"blk.{i}.ffn_gate_inp.weight" in keys.tensors for i in range(reader.num_layers)]
    values = {
        **reader.base("JambaForCausalLM", "jamba"),
        **reader.rms(),
        **reader.dense(),
        **_period(reader, "attn_layer", attends),
        "num_experts": num_experts,
        "num_experts_per_tok": keys.integer("expert_used_count", 1),
        "mamba_d_state": keys.integer("ssm.state_size"),
        "mamba_d_conv": keys.integer("ssm.conv_kernel"),
        "mamba_expand": keys.integer("ssm.inner_size") // reader.hidden_size,
        "mamba_dt_rank": keys.integer("ssm.time_step_rank"),
        "mamba_conv_bias": reader.has_tensors("ssm_conv1d.bias"),
        "mamba_proj_bias": reader.has_tensors("ssm_in.bias"),
    }
    return values | (_period(reader, "expert_layer", routes) if any(routes) else {"num_experts": 1})


def _period(reader: ConfigReader, name: str, chosen: list[bool]) -> Values:
    indices = [i for i, is_chosen in enumerate(chosen) if is_chosen]
    first = indices[0] if indices else 0
    period = indices[1] - first if len(indices) > 1 else max(len(chosen), first + 1)
    if not indices or first >= period or indices != list(range(first, len(chosen), period)):
        raise ConfigError(f"{reader.keys.source} has {name} in the layers {indices}, which follow no period")
    return {f"{name}_period": period, f"{name}_offset": first}


def _granitehybrid(reader: ConfigReader) -> Values:
    """Granite 4 with Mamba2 layers; Bamba's files, whose attention has a rope, are not supported."""
    keys = reader.keys
    keys.expect("rope.scaling.finetuned", False)
    keys.ignore("rope.dimension_count", "rope.freq_base", "expert_used_count")
    has_experts = keys.integer("expert_count", 0) > 0
    shared_size = keys.integer("expert_shared_feed_forward_length", 0)
    kv_heads = reader.kv_heads_of_layers or []
    num_heads, head_dim = _heads(reader)
    return {
        **reader.base("GraniteMoeHybridForCausalLM", "granitemoehybrid"),
        **reader.rms(),
        **reader.granite_multipliers(),
        "attention_bias": reader.has_tensors("attn_q.bias"),
        "intermediate_size": keys.integer("feed_forward_length"),
        "shared_intermediate_size": shared_size or keys.integer("feed_forward_length"),
        **(granite_experts(reader) if has_experts else {"num_local_experts": 0}),
        "position_embedding_type": "nope",
        "layer_types": ["attention" if heads else "mamba" for heads in kv_heads],
        "mamba_n_heads": num_heads,
        "mamba_d_head": head_dim,
        **_prefixed(reader),
        "mamba_expand": num_heads * head_dim // reader.hidden_size,
    }


def _falcon_h1(reader: ConfigReader) -> Values:
    """Falcon-H1. The file has no multipliers: the weights include them."""
    keys = reader.keys
    if "output.weight" not in keys.tensors:
        raise ConfigError(
            f"{keys.source} has no output.weight: what its logits are multiplied by is not in the file. Use the "
            "original checkpoint"
        )
    num_heads, head_dim = _heads(reader)
    ones = ("embedding", "lm_head", "ssm_in", "ssm_out", "attention_in", "attention_out", "key")
    return {
        **reader.usual("FalconH1ForCausalLM", "falcon_h1", theta=1e11),
        **reader.attention_bias(),
        "mlp_bias": keys.has_tensor("ffn_up.bias"),
        "mamba_d_ssm": num_heads * head_dim,
        "mamba_n_heads": num_heads,
        "mamba_d_head": head_dim,
        **_prefixed(reader),
        "projectors_bias": keys.has_tensor("ssm_out.bias"),
        "mamba_rms_norm": keys.has_tensor("ssm_norm.weight"),
        "mamba_norm_before_gate": False,
        **{f"{name}_multiplier": 1.0 for name in ones},
        "ssm_multipliers": [1.0] * 5,
        "mlp_multipliers": [1.0, 1.0],
    }


def _nemotron_h(reader: ConfigReader) -> Values:
    """Nemotron-H and Nemotron Nano 2. Each layer has one part: the one whose size is not 0."""
    sizes = reader.keys.for_layers("feed_forward_length", reader.num_layers) or []
    return {
        **_nemotron(reader, "-"),
        "intermediate_size": max(sizes, default=0),
        "mlp_bias": reader.has_tensors("ffn_up.bias"),
    }


def _nemotron_h_moe(reader: ConfigReader) -> Values:
    """Nemotron 3, with experts for feed-forward blocks; llama.cpp knows that their scores are sigmoids."""
    keys = reader.keys
    keys.expect("expert_gating_func", 2)
    keys.expect("expert_shared_count", 1)
    latent_size = keys.integer("moe_latent_size", 0)
    return {
        **_nemotron(reader, "E"),
        **deepseek_experts(reader),
        "n_routed_experts": keys.integer("expert_count"),
        "n_shared_experts": 1,
        "moe_shared_expert_intermediate_size": keys.integer("expert_shared_feed_forward_length"),
        **({"moe_latent_size": latent_size} if latent_size else {}),
    }


def _nemotron(reader: ConfigReader, feed_forward: str) -> Values:
    keys = reader.keys
    keys.expect("rope.scaling.finetuned", False)
    keys.ignore("rope.dimension_count", "rope.freq_base")  # there is no rope
    epsilon = float(keys.require("attention.layer_norm_rms_epsilon"))
    keys.expect("attention.layer_norm_epsilon", epsilon)
    sizes = keys.for_layers("feed_forward_length", reader.num_layers)
    if sizes is None or reader.kv_heads_of_layers is None:
        raise ConfigError(f"{keys.source} does not say which layers have attention: use another file")
    kinds = [
        "*" if heads else feed_forward if size else "M"
        for heads, size in zip(reader.kv_heads_of_layers, sizes, strict=True)
    ]
    num_heads, head_dim = _heads(reader)
    return {
        **reader.base("NemotronHForCausalLM", "nemotron_h"),
        "hybrid_override_pattern": "".join(kinds),
        "layer_norm_epsilon": epsilon,
        "mamba_num_heads": num_heads,
        "mamba_head_dim": head_dim,
        "ssm_state_size": keys.integer("ssm.state_size"),
        "n_groups": keys.integer("ssm.group_count"),
        "conv_kernel": keys.integer("ssm.conv_kernel"),
        "use_bias": reader.has_tensors("ssm_in.bias"),
        "use_conv_bias": reader.has_tensors("ssm_conv1d.bias"),
    }


def _prefixed(reader: ConfigReader) -> Values:
    keys = reader.keys
    return {
        "mamba_d_state": keys.integer("ssm.state_size"),
        "mamba_n_groups": keys.integer("ssm.group_count"),
        "mamba_d_conv": keys.integer("ssm.conv_kernel"),
        "mamba_conv_bias": reader.has_tensors("ssm_conv1d.bias"),
        "mamba_proj_bias": reader.has_tensors("ssm_in.bias"),
    }


WITH_MAMBA: Mapping[str, Callable[[ConfigReader], Values]] = {
    "mamba": _mamba,
    "mamba2": _mamba2,
    "jamba": _jamba,
    "granitehybrid": _granitehybrid,
    "falcon-h1": _falcon_h1,
    "nemotron_h": _nemotron_h,
    "nemotron_h_moe": _nemotron_h_moe,
}
"""Readers by `general.architecture`."""
