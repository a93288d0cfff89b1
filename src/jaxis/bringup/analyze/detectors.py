"""The table of axes: the features that a config asks for on each. A model's name is consulted only if no key tells."""

from __future__ import annotations

import re
from collections.abc import Sequence

from jaxis.bringup.analyze.attention_detectors import ATTENTION, detect_attention, detect_layer_kinds, detect_rope
from jaxis.bringup.analyze.axes import AxisRow, Feature, ModelFacts
from jaxis.config.expert_counts import experts_per_token, num_experts
from jaxis.config.hf_config import HFConfig
from jaxis.errors import ConfigError
from jaxis.quantization.checkpoint_formats import quantization_of_checkpoint

_OF_OTHER_INPUTS = re.compile(r"(image|video|audio|vision|bo[ai]|eo[ai])_")
_BIASES = (
    *("attention_bias", "qkv_bias", "use_qkv_bias", "attention_out_bias"),
    *("mlp_bias", "use_bias", "add_bias_linear"),
)


def _sizes(config: HFConfig, _facts: ModelFacts | None) -> Sequence[Feature]:
    keys = ("num_hidden_layers", "hidden_size", "intermediate_size", "vocab_size", "max_position_embeddings")
    layers, width, inner, vocabulary, context = (config.get(key) for key in keys)
    feed_forward = f", feed-forward {inner}" if inner else ""
    return [Feature(f"{layers} layers, hidden {width}{feed_forward}, vocabulary {vocabulary}, context {context}")]


def _biases(config: HFConfig, facts: ModelFacts | None) -> Sequence[Feature]:
    asked = [key for key in _BIASES if config.get(key, False) is True]
    if facts is None:
        return [Feature(key) for key in asked] or [Feature("none that config.json names")]
    owners = {name.split(".")[-2] for name in facts.layers if name.endswith(".bias") and "norm" not in name}
    stacks = {name.rpartition(".")[2].removesuffix("_bias") for name in facts.layers if name.endswith("_proj_bias")}
    return [Feature(", ".join(sorted(owners) + [f"{name} of experts" for name in sorted(stacks)]) or "none")]


def _scores(config: HFConfig, facts: ModelFacts | None) -> Sequence[Feature]:
    features = []
    if facts is not None and (norm := facts.layers.get("self_attn.q_norm.weight")) is not None:
        shape, count = norm
        features.append(Feature(f"queries and keys normed in {count} layers, weights {list(shape)}"))
    elif any(config.get(key, False) for key in ("use_qk_norm", "qk_layernorm", "qk_norm")):
        features.append(Feature("queries and keys normed", f"{ATTENTION}(norms)"))
    features += [
        Feature(f"scale from {key} {scalar:g}", f"{ATTENTION}(scale)")
        for key in ("query_pre_attn_scalar", "attention_multiplier")
        if (scalar := config.get(key)) is not None
    ]
    if (cap := config.get("attn_logit_softcapping")) is not None:
        features.append(Feature(f"scores capped at {cap:g}", f"{ATTENTION}(soft_cap)"))
    if (cap := config.get("final_logit_softcapping")) is not None:
        features.append(Feature(f"logits capped at {cap:g}"))
    return features or [Feature("none")]


def _norms(config: HFConfig, facts: ModelFacts | None) -> Sequence[Feature]:
    features = []
    if (epsilon := config.get("rms_norm_eps", config.get("norm_eps"))) is not None:
        features.append(Feature(f"RMS, epsilon {epsilon:g}"))
    elif (epsilon := config.get("layer_norm_eps", config.get("layer_norm_epsilon"))) is not None:
        features.append(Feature(f"LayerNorm, epsilon {epsilon:g}", "jaxis.layers.norm:JaxLayerNorm"))
    if facts is None and (config.get("use_parallel_residual") or config.get("parallel_attn")):
        keys = ("use_parallel_residual", "parallel_attn")
        features.append(Feature("attention and feed-forward in parallel", None, ("layers/decoder_layer.py",), keys))
    if facts is not None:
        features.append(Feature(f"in a layer: {', '.join(facts.norms) or 'none'}"))
    return features


def _activation(config: HFConfig, _facts: ModelFacts | None) -> Sequence[Feature]:
    features = []
    keys = ("hidden_activation", "hidden_act", "mlp_hidden_act", "activation_function")
    if (key := next((key for key in keys if key in config), None)) is not None:
        name = config[key]
        place = "jaxis.layers.xielu:XIELU" if name == "xielu" else f"jaxis.layers.mlp:ACTIVATIONS[{name}]"
        features.append(Feature(str(name), place, keys=(key,)))
    if (limit := config.get("swiglu_limit")) is not None:
        features.append(Feature(f"clamped GLU, limit {limit:g}", "jaxis.layers.glu:ClampedGLU"))
    return features or [Feature("none that config.json names")]


def _experts(config: HFConfig, facts: ModelFacts | None) -> Sequence[Feature]:
    count = num_experts(config)
    if not count:
        return [Feature("none: dense")]
    where = ("layers/routing.py",)
    features = [Feature(f"{experts_per_token(config)} of {count}", "jaxis.layers.moe:SparseMoE")]
    if (hashed := config.get("num_hash_layers", 0)) > 0:
        words = f"by a hash of the token's id in {hashed} layers"
        features.append(Feature(words, None, where, ("num_hash_layers",)))
    if (score := config.get("scoring_func")) is not None:
        code = f"jaxis.layers.routing:SCORE_FUNCTIONS[{score}]"
        features.append(Feature(f"{score} scores", code, keys=("scoring_func",)))
    method = config.get("topk_method")
    if method not in (None, "greedy", "group_limited_greedy", "noaux_tc"):
        features.append(Feature(f"top-k method {method!r}", None, where, ("topk_method",)))
    if (groups := config.get("n_group") or 1) > 1:
        words = f"from the best {config.get('topk_group')} of {groups} groups"
        features.append(Feature(words, "jaxis.layers.routing:Routing(num_groups)"))
    if shared := config.get("n_shared_experts", 0):
        features.append(Feature(f"{shared} shared", "jaxis.layers.moe:SparseMoE(shared_experts)"))
    if config.get("shared_expert_intermediate_size"):
        keys = ("shared_expert_intermediate_size",)
        features.append(Feature("a shared expert", "jaxis.layers.moe:SparseMoE(shared_experts)", keys=keys))
    if config.get("enable_moe_block"):
        code = None if facts is None else ""
        files = ("layers/decoder_layer.py",)
        features.append(Feature("beside a dense feed-forward", code, files, ("enable_moe_block",)))
    return features


def _head(config: HFConfig, facts: ModelFacts | None) -> Sequence[Feature]:
    is_tied = config.get("tie_word_embeddings", False)
    if facts is not None:
        is_tied = facts.is_tied
    features = [Feature("tied" if is_tied else "a head of its own")]
    features += [
        Feature(f"{key} {factor:g}", None if facts is None else "", ("models/common/decoder.py",), (key,))
        for key in ("embedding_multiplier", "residual_multiplier", "logits_scaling", "logit_scale")
        if (factor := config.get(key)) is not None
    ]
    if config.get("num_nextn_predict_layers", 0):
        features.append(Feature("multi-token prediction layers, left out"))
    return features


def _inputs(config: HFConfig, facts: ModelFacts | None) -> Sequence[Feature]:
    features = []
    for key, words in (("vision_config", "images"), ("audio_config", "audio")):
        if key in config and facts is None:
            keys = (key, *(other for other in config if _OF_OTHER_INPUTS.match(other)))
            features.append(Feature(words, None, ("models/",), keys))
        elif key == "vision_config" and key in config and facts is not None and facts.has_tower:
            features.append(Feature("images, by the vision tower"))
        elif key in config:
            features.append(Feature(f"{words}, left out: text runs"))
    if config.get("is_encoder_decoder", False):
        features.append(Feature("an encoder", None, ("models/",), ("is_encoder_decoder",)))
    return features or [Feature("none: text only")]


def _format(config: HFConfig, _facts: ModelFacts | None) -> Sequence[Feature]:
    quantization = config.read_object("quantization_config")
    if not quantization:
        return [Feature(f"safetensors, {config.get('dtype', config.get('torch_dtype', 'bfloat16'))}")]
    name = f"{quantization.get('quant_method', 'unnamed')} quantization"
    try:
        quantization_of_checkpoint(HFConfig(config.to_dict()), None)
    except ConfigError:
        return [Feature(name, None, ("quantization/",), ("quantization_config",))]
    return [Feature(name)]


AXES = (
    AxisRow("sizes", _sizes, ("intermediate_size_mlp",)),
    AxisRow(
        "attention",
        detect_attention,
        ("num_key_value_heads", "head_dim", "qk_head_dim", "index_n_heads", "index_head_dim"),
    ),
    AxisRow(
        "layer kinds",
        detect_layer_kinds,
        (
            *("max_window_layers", "sliding_window_pattern", "no_rope_layers", "no_rope_layer_interval"),
            *("attn_temperature_tuning", "floor_scale", "attn_scale"),
        ),
    ),
    AxisRow("biases", _biases),
    AxisRow("query-key norm, scale, caps", _scores),
    AxisRow("norms", _norms, ("layer_norm_epsilon",)),
    AxisRow("activation", _activation, ("hidden_act",)),
    AxisRow(
        "rope",
        detect_rope,
        (
            *("rope_local_base_freq", "rope_interleave", "original_max_position_embeddings"),
            *("initial_context_length", "partial_rotary_factor"),
        ),
    ),
    AxisRow(
        "experts",
        _experts,
        (
            *("experts_per_token", "moe_intermediate_size", "first_k_dense_replace", "moe_layer_freq", "moe_layers"),
            *("decoder_sparse_step", "mlp_only_layers", "interleave_moe_layer_step", "routed_scaling_factor"),
            *("norm_topk_prob", "n_group", "topk_group"),
        ),
    ),
    AxisRow("embeddings and head", _head, ("num_nextn_predict_layers",)),
    AxisRow("other inputs", _inputs),
    AxisRow("checkpoint format", _format),
)
