"""What a config asks for, axis by axis. Keys tell; a model's name only where nothing else does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from jaxis.bringup.analyze_axes import AxisTable, Feature, ModelFacts
from jaxis.errors import ConfigError
from jaxis.hf_config import HFConfig
from jaxis.quantization.checkpoint_formats import quantization_of_checkpoint
from jaxis.rope_config import rope_config

AXES = AxisTable()
_ATTENTION = "jaxis.layers.attention:attention"
_GQA = "jaxis.layers.attention:GroupedQueryAttention"
_RECURRENT_FILES = ("layers/kv_cache_spec.py", "engine/kv_cache.py", "engine/block_manager.py")


@AXES.add("sizes")
def _sizes(config: HFConfig, facts: ModelFacts | None) -> Sequence[Feature]:
    layers, width = config.get("num_hidden_layers"), config.get("hidden_size")
    inner = config.get("intermediate_size", config.get("ffn_hidden_size"))
    config.get("intermediate_size_mlp")
    vocabulary, context = config.get("vocab_size"), config.get("max_position_embeddings")
    return [
        Feature(f"{layers} layers, hidden {width}, feed-forward {inner}, vocabulary {vocabulary}, context {context}")
    ]


@AXES.add("attention")
def _attention(config: HFConfig, facts: ModelFacts | None) -> Sequence[Feature]:
    heads = config.get("num_attention_heads", config.get("n_head"))
    features = []
    if (rank := config.get("kv_lora_rank")) is not None:
        sizes = [config.get(key) for key in ("q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")]
        config.get("num_key_value_heads")
        query = f"queries from {sizes[0]}" if sizes[0] else "queries without a latent"
        features.append(
            Feature(
                f"multi-head latent (MLA): {heads} heads of {sizes[1]}+{sizes[2]}/{sizes[3]}, latent {rank}, {query}",
                "jaxis.layers.mla:LatentCacheSpec",
                ("layers/mla.py", "kernels/latent_attention"),
                ("kv_lora_rank",),
            )
        )
    elif heads is not None:
        kv_heads = config.get("num_key_value_heads", heads)
        head_dim = config.get("head_dim", config.get("attention_head_dim"))
        if head_dim is None and isinstance(config.get("hidden_size"), int):
            head_dim = config["hidden_size"] // heads
        kind = "multi-head" if kv_heads == heads else "multi-query" if kv_heads == 1 else "grouped-query"
        features.append(Feature(f"{kind}: {heads} query heads, {kv_heads} key-value heads of {head_dim}"))
    if (top_k := config.get("index_topk")) is not None:
        config.get("index_head_dim"), config.get("index_n_heads")
        features.append(
            Feature(
                f"sparse indexer: each token attends to its best {top_k}",
                None,
                ("layers/mla.py", "kernels/latent_attention", "layers/kv_cache_spec.py"),
                ("index_topk", "index_head_dim", "index_n_heads"),
            )
        )
    if config.get("global_head_dim") not in (None, config.get("head_dim")):
        keys = ("global_head_dim", "num_global_key_value_heads")
        features.append(Feature("heads of another size in full layers", None, ("layers/decoder_layer.py",), keys))
    if config.get("attention_k_eq_v"):
        features.append(Feature("values are the keys", None, ("layers/attention.py",), ("attention_k_eq_v",)))
    if config.get("attn_output_gate") or config.get("model_type") == "qwen3_next":
        features.append(Feature("output gate", None, ("layers/attention.py",), ("attn_output_gate",)))
    if (facts and "self_attn.sinks" in facts.layers) or (not facts and config.get("model_type") == "gpt_oss"):
        features.append(Feature("attention sinks", f"{_ATTENTION}(sinks)"))
    if config.get("use_bidirectional_attention"):
        where = ("layers/attention.py",)
        features.append(Feature("bidirectional attention", None, where, ("use_bidirectional_attention",)))
    if config.get("alibi"):
        features.append(Feature("ALiBi position biases", None, ("layers/attention.py",), ("alibi",)))
    return features


@AXES.add("layer kinds")
def _layer_kinds(config: HFConfig, facts: ModelFacts | None) -> Sequence[Feature]:
    features = []
    types = Counter(config.get("layer_types") or ())
    if not types and (interval := config.get("full_attention_interval")):
        full = config.get("num_hidden_layers", 0) // interval
        types = Counter(linear_attention=config.get("num_hidden_layers", 0) - full, full_attention=full)
    window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    config.get("max_window_layers"), config.get("sliding_window_pattern"), config.get("no_rope_layers")
    config.get("no_rope_layer_interval"), config.get("attn_temperature_tuning"), config.get("floor_scale")
    config.get("attn_scale")
    chunk = config.get("attention_chunk_size")
    words = {
        "full_attention": Feature("full", ""),
        "sliding_attention": Feature(f"window of {window}", f"{_ATTENTION}(sliding_window)"),
        "chunked_attention": Feature(f"chunks of {chunk}", f"{_ATTENTION}(attention_chunk_size)"),
        "linear_attention": _linear_attention(config),
    }
    for kind, count in types.items():
        known = words.get(kind) or Feature(f"{kind!r} layers", None, ("layers/",), ("layer_types",))
        features.append(Feature(f"{count} x {known.value}", known.code, known.files, known.keys))
    if not types and window is not None:
        features.append(Feature(f"window of {window}", f"{_ATTENTION}(sliding_window)"))
    if not types and chunk is not None:
        features.append(Feature(f"chunks of {chunk}, full layers between", f"{_ATTENTION}(attention_chunk_size)"))
    if (pattern := config.get("hybrid_override_pattern")) is not None:
        features += _hybrid(config, Counter(pattern))
    elif any(key in config for key in ("mamba_d_state", "ssm_state_size", "mamba_num_heads", "state_size")):
        features.append(_mamba(config, "Mamba layers"))
    if (shared := config.get("num_kv_shared_layers", 0)) > 0:
        where = ("engine/kv_cache.py", "models/decoder.py")
        features.append(Feature(f"{shared} layers share another's cache", None, where, ("num_kv_shared_layers",)))
    if config.get("hidden_size_per_layer_input", 0) > 0:
        keys = ("hidden_size_per_layer_input", "vocab_size_per_layer_input")
        features.append(Feature("embeddings of each layer's own", None, ("layers/embed.py",), keys))
    return features or [Feature("full")]


def _linear_attention(config: HFConfig) -> Feature:
    """Gated DeltaNet, as the keys of its sizes tell."""
    keys = tuple(f"linear_{name}" for name in ("conv_kernel_dim", "key_head_dim", "num_key_heads"))
    keys += ("linear_num_value_heads", "linear_value_head_dim")
    for key in keys:
        config.get(key)
    name = "Gated DeltaNet" if "linear_num_value_heads" in config else "linear attention"
    return Feature(name, None, ("layers/gated_delta_net.py", *_RECURRENT_FILES), (*keys, "full_attention_interval"))


def _hybrid(config: HFConfig, pattern: Counter[str]) -> list[Feature]:
    features = []
    if mamba := pattern["M"]:
        features.append(_mamba(config, f"{mamba} x Mamba-2"))
    for letter, words in (("*", "attention"), ("-", "feed-forward"), ("E", "mixture of experts")):
        if count := pattern[letter]:
            features.append(Feature(f"{count} x {words} alone"))
    return features


def _mamba(config: HFConfig, words: str) -> Feature:
    prefixes = ("mamba_", "ssm_", "time_step_")
    keys = [key for key in config if key.startswith(prefixes)]
    keys += [key for key in ("hybrid_override_pattern", "conv_kernel", "n_groups", "expand", "chunk_size") if key in config]
    keys += [key for key in ("use_conv_bias", "use_mamba_kernels", "residual_in_fp32") if key in config]
    for key in keys:
        config.get(key)
    return Feature(words, None, ("layers/mamba2.py", *_RECURRENT_FILES), tuple(keys))


@AXES.add("biases")
def _biases(config: HFConfig, facts: ModelFacts | None) -> Sequence[Feature]:
    keys = ("attention_bias", "qkv_bias", "use_qkv_bias", "attention_out_bias", "mlp_bias", "use_bias", "add_bias_linear")
    asked = [key for key in keys if config.get(key, False) is True]
    if facts is not None:
        names = sorted({name.split(".")[-2] for name in facts.layers if name.endswith(".bias")})
        names += sorted({name.rsplit(".", 1)[-1] for name in facts.layers if name.endswith("_bias")})
        return [Feature(", ".join(names) or "none")]
    features = [Feature(key, f"{_GQA}(qkv_bias)" if "mlp" not in key else "", keys=(key,)) for key in asked]
    return features or [Feature("none that config.json names")]


@AXES.add("query-key norm, scale, caps")
def _scores(config: HFConfig, facts: ModelFacts | None) -> Sequence[Feature]:
    features = []
    asked = any([config.get(key, False) for key in ("use_qk_norm", "qk_layernorm", "qk_norm")])
    norm = None if facts is None else facts.layers.get("self_attn.q_norm.weight")
    if norm is not None:
        is_per_head = norm[0][0] * config.get("num_attention_heads", 1) >= config.get("hidden_size", 0)
        is_per_head &= norm[0][0] <= config.get("head_dim", config.get("hidden_size", 0) - 1)
        features.append(Feature(f"RMS norm over {'each head' if is_per_head else 'all heads'} of queries and keys"))
    elif asked:
        features.append(Feature("norm of queries and keys", f"{_ATTENTION}(norms)"))
    for key in ("query_pre_attn_scalar", "attention_multiplier"):
        if (scalar := config.get(key)) is not None:
            features.append(Feature(f"scale from {key} {scalar:g}", f"{_ATTENTION}(scale)"))
    if (cap := config.get("attn_logit_softcapping")) is not None:
        features.append(Feature(f"scores capped at {cap:g}", f"{_ATTENTION}(soft_cap)", keys=("attn_logit_softcapping",)))
    if (cap := config.get("final_logit_softcapping")) is not None:
        features.append(Feature(f"logits capped at {cap:g}"))
    return features or [Feature("scale head_dim ** -0.5")]


@AXES.add("norms")
def _norms(config: HFConfig, facts: ModelFacts | None) -> Sequence[Feature]:
    features = []
    epsilon = config.get("rms_norm_eps", config.get("norm_epsilon"))
    layer_norm = config.get("layer_norm_eps", config.get("layer_norm_epsilon"))
    if epsilon is not None:
        features.append(Feature(f"RMS, epsilon {epsilon:g}"))
    elif layer_norm is not None:
        features.append(Feature(f"LayerNorm, epsilon {layer_norm:g}", "jaxis.layers.norm:JaxLayerNorm"))
    if config.get("use_parallel_residual") or config.get("parallel_attn"):
        keys = ("use_parallel_residual", "parallel_attn")
        features.append(Feature("attention and feed-forward in parallel", None, ("layers/decoder_layer.py",), keys))
    if facts is not None:
        placed = [name.split(".")[0] for name in facts.layers if name.count(".") == 1 and "norm" in name]
        features.append(Feature(f"in a layer: {', '.join(dict.fromkeys(placed))}"))
    return features


@AXES.add("activation")
def _activation(config: HFConfig, facts: ModelFacts | None) -> Sequence[Feature]:
    features = []
    for key in ("hidden_act", "hidden_activation", "mlp_hidden_act", "activation_function"):
        if (name := config.get(key)) is not None:
            features.append(Feature(str(name), f"jaxis.layers.mlp:ACTIVATIONS[{name}]", keys=(key,)))
            break
    config.get("hidden_act")
    if (limit := config.get("swiglu_limit")) is not None:
        features.append(Feature(f"clamped GLU, limit {limit:g}", "jaxis.layers.glu:ClampedGLU", ("layers/mlp.py",)))
    return features


@AXES.add("rope")
def _rope(config: HFConfig, facts: ModelFacts | None) -> Sequence[Feature]:
    keys = tuple(key for key in ("rope_scaling", "rope_parameters", "rope_theta", "partial_rotary_factor") if key in config)
    config.get("rope_local_base_freq"), config.get("rope_interleave"), config.get("original_max_position_embeddings")
    config.get("initial_context_length"), config.get("rotary_pct")
    parameters = config.get("rope_parameters")
    if isinstance(parameters, HFConfig) and any(isinstance(parameters.get(key), HFConfig) for key in parameters):
        features = []
        for kind in parameters:
            plain = {key: value for key, value in config.to_dict().items() if key not in ("rope_scaling", "rope_theta")}
            one = HFConfig(plain | {"rope_parameters": parameters.to_dict()[kind]}, source=config.source)
            parameters.read_object(kind)
            features.append(_one_rope(one, f"{kind}: ", keys))
        return features
    return [_one_rope(config, "", keys)]


def _one_rope(config: HFConfig, prefix: str, keys: tuple[str, ...]) -> Feature:
    try:
        rope = rope_config(config)
    except ConfigError as error:
        return Feature(f"{prefix}{error}", None, ("rope_config.py", "layers/rope.py"), keys)
    words = f"{prefix}{rope.rope_type}, theta {rope.theta:g}"
    if rope.factor is not None:
        words += f", factor {rope.factor:g}"
    if rope.partial_rotary_factor != 1:
        words += f", {rope.partial_rotary_factor:g} of each head"
    return Feature(words)


@AXES.add("experts")
def _experts(config: HFConfig, facts: ModelFacts | None) -> Sequence[Feature]:
    counts = [config.get(key) for key in ("n_routed_experts", "num_local_experts", "num_experts")]
    count = next((count for count in counts if count), None)
    if count is None:
        return [Feature("none: dense")]
    chosen = config.get("num_experts_per_tok", config.get("top_k_experts", config.get("experts_per_token")))
    config.get("experts_per_token"), config.get("moe_intermediate_size"), config.get("n_shared_experts")
    for key in ("first_k_dense_replace", "moe_layer_freq", "decoder_sparse_step", "mlp_only_layers"):
        config.get(key)
    for key in ("interleave_moe_layer_step", "routed_scaling_factor", "norm_topk_prob"):
        config.get(key)
    score = config.get("scoring_func", config.get("score_function", "softmax"))
    code = "jaxis.layers.moe:SparseMoE"
    features = [Feature(f"{chosen} of {count}", code, ("layers/moe.py",))]
    if "scoring_func" in config:
        where = ("layers/routing.py",)
        features.append(Feature(f"{score} scores", f"jaxis.layers.routing:SCORE_FUNCTIONS[{score}]", where, ("scoring_func",)))
    method = config.get("topk_method")
    if method is not None and method not in ("greedy", "group_limited_greedy", "noaux_tc"):
        features.append(Feature(f"top-k method {method!r}", None, ("layers/routing.py",), ("topk_method",)))
    if (groups := config.get("n_group", 1)) and groups > 1:
        words = f"of the best {config.get('topk_group')} of {groups} groups"
        features.append(Feature(words, "jaxis.layers.routing:Routing(num_groups)"))
    if (shared := config.get("n_shared_experts")) not in (None, 0):
        features.append(Feature(f"{shared} shared", "jaxis.layers.moe:SparseMoE(shared_experts)"))
    if config.get("shared_expert_intermediate_size"):
        keys = ("shared_expert_intermediate_size",)
        features.append(Feature("a shared expert behind a gate", "jaxis.layers.moe:GatedSharedExpert", keys=keys))
    if config.get("enable_moe_block"):
        where = ("layers/decoder_layer.py",)
        features.append(Feature("beside a dense feed-forward", None, where, ("enable_moe_block",)))
    return features


@AXES.add("embeddings and head")
def _head(config: HFConfig, facts: ModelFacts | None) -> Sequence[Feature]:
    is_tied = config.get("tie_word_embeddings", False) if facts is None else "lm_head.weight" not in facts.names
    features = [Feature("tied" if is_tied else "a head of its own")]
    for key in ("embedding_multiplier", "residual_multiplier", "logits_scaling", "logit_scale"):
        if (factor := config.get(key)) is not None:
            features.append(Feature(f"{key} {factor:g}", None if facts is None else "", ("models/decoder.py",), (key,)))
    if config.get("num_nextn_predict_layers", 0):
        features.append(Feature("multi-token prediction layers, left out"))
    return features


@AXES.add("other inputs")
def _inputs(config: HFConfig, facts: ModelFacts | None) -> Sequence[Feature]:
    features = []
    for key, words in (("vision_config", "images"), ("audio_config", "audio")):
        if key in config:
            code = None if facts is None else ""
            features.append(Feature(f"{words}: only text runs", code, ("models/",), (key,)))
    if config.get("is_encoder_decoder", False):
        features.append(Feature("an encoder", None, ("models/",), ("is_encoder_decoder",)))
    return features or [Feature("none: text only")]


@AXES.add("checkpoint format")
def _format(config: HFConfig, facts: ModelFacts | None) -> Sequence[Feature]:
    quantization = config.read_object("quantization_config")
    dtype = config.get("dtype", config.get("torch_dtype", "bfloat16"))
    if not quantization:
        return [Feature(f"safetensors, {dtype}")]
    method = quantization.get("quant_method", "unnamed")
    try:
        quantization_of_checkpoint(HFConfig(config.to_dict()), None)
    except ConfigError:
        return [Feature(f"{method} quantization", None, ("quantization/",), ("quantization_config",))]
    return [Feature(f"{method} quantization")]
