"""Detectors of the attention that a config describes: its kind, the kind of each layer, and RoPE."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from jaxis.bringup.analyze.axes import Feature, ModelFacts
from jaxis.config.checkpoint_values import ALWAYS_WITH_ALIBI
from jaxis.config.hf_config import HFConfig
from jaxis.config.rope_config import ROPE_ALIASES, ROPE_TYPES, rope_config
from jaxis.errors import ConfigError

ATTENTION = "jaxis.layers.attention:attention"
_GROUPED = "jaxis.layers.grouped_query_attention:GroupedQueryAttention"
_FULL_LAYER_KEYS = ("global_head_dim", "num_global_key_value_heads", "per_layer_config")
_RECURRENT_FILES = (
    *("layers/kv_cache_spec.py", "engine/execution/cache_specs.py"),
    "engine/scheduling/block_manager.py",
)
_MAMBA_KEYS = (
    *("hybrid_override_pattern", "conv_kernel", "n_groups", "expand", "chunk_size"),
    *("use_conv_bias", "use_mamba_kernels", "residual_in_fp32", "state_size"),
)


def detect_attention(config: HFConfig, facts: ModelFacts | None) -> Sequence[Feature]:
    """Detects heads or latents, and changes to the scores; consults names only of families without a key for it."""
    features = [_latent(config) if config.get("kv_lora_rank") is not None else _grouped(config)]
    features += _indexer(config, facts)
    if config.get("global_head_dim") not in (None, config.get("head_dim")):
        words = f"heads of {config['global_head_dim']} in full layers"
        if (kv_heads := config.get("num_global_key_value_heads")) is not None:
            words = f"{words}, {kv_heads} of them key-value heads"
        features.append(Feature(words, f"{_GROUPED}(layer_head_dim)", keys=_FULL_LAYER_KEYS))
    if config.get("attention_k_eq_v"):
        features.append(Feature("values are the keys", f"{_GROUPED}(values_are_keys)", keys=("attention_k_eq_v",)))
    where = ("layers/attention.py",)
    if (kind := config.get("use_bidirectional_attention")) == "vision":
        sees = facts is not None and facts.has_tower
        words = f"bidirectional between an image's tokens, {'in windows' if sees else 'left out: text runs'}"
        key = "use_bidirectional_attention"
        features.append(Feature(words, None if facts is None else "", where, (key,)))
    elif kind:
        features.append(Feature("bidirectional attention", None, where, ("use_bidirectional_attention",)))
    if _has_alibi(config):
        code = None if facts is None else "jaxis.layers.alibi:Alibi"
        features.append(Feature("ALiBi position biases", code, where, ("alibi",)))
    features += _output_gate(config)
    if "self_attn.sinks" in facts.layers if facts else config.get("model_type") == "gpt_oss":
        features.append(Feature("attention sinks", f"{ATTENTION}(sinks)"))
    return features


def _has_alibi(config: HFConfig) -> bool:
    inner = config.get("attn_config")  # MPT's
    of_attention = inner.get("alibi", False) if isinstance(inner, HFConfig) else False
    return bool(config.get("alibi") or of_attention or config.get("model_type") in ALWAYS_WITH_ALIBI)


def _output_gate(config: HFConfig) -> list[Feature]:
    code = "jaxis.layers.output_gate:OutputGate"
    if config.get("use_head_wise_attn_gate"):
        return [Feature("a gate on each head's output", code)]
    is_gated = config.get("attn_output_gate") or config.get("model_type") == "qwen3_next"
    return [Feature("output gate", code)] if is_gated else []


def _indexer(config: HFConfig, facts: ModelFacts | None) -> list[Feature]:
    """The indexer that selects tokens, and the outputs in groups of a family that has one."""
    features = []
    if (top_k := config.get("index_topk")) is not None:
        has_indexer = facts is None or "self_attn.indexer.wk.weight" in facts.layers
        code = "jaxis.layers.indexer:Indexer" if has_indexer else None
        where = ("layers/mla.py", "layers/sparse_mla.py", "layers/indexer.py")
        keys = ("index_topk", "index_head_dim", "index_n_heads")
        features.append(Feature(f"sparse indexer: a token attends to its best {top_k}", code, where, keys))
    if (groups := config.get("o_groups")) is not None:
        keys = ("o_groups", "o_lora_rank")
        words = f"outputs through a latent of {config.get('o_lora_rank')} in {groups} groups"
        features.append(Feature(words, None, ("layers/",), keys))
    return features


def _latent(config: HFConfig) -> Feature:
    rank, query_rank, heads = config["kv_lora_rank"], config.get("q_lora_rank"), config.get("num_attention_heads")
    plain, turned, value = (config.get(key) for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    queries = f"queries from {query_rank}" if query_rank else "queries without a latent"
    return Feature(
        f"multi-head latent (MLA): latent {rank} + {turned} a token, {heads} heads of {plain}+{turned}, values of "
        f"{value}, {queries}",
        "jaxis.layers.mla:MultiHeadLatentAttention",
        ("layers/mla.py", "kernels/latent_attention"),
        ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
    )


def _grouped(config: HFConfig) -> Feature:
    heads = config.get("num_attention_heads", config.get("n_head"))
    if heads is None:
        return Feature("no number of attention heads", None, ("models/",))
    kv_heads = config.get("num_key_value_heads", config.get("num_attention_groups", heads))
    head_dim = config.get("head_dim", config.get("attention_head_dim"))
    if head_dim is None and isinstance(config.get("hidden_size"), int):
        head_dim = config["hidden_size"] // heads
    kind = "multi-head" if kv_heads == heads else "multi-query" if kv_heads == 1 else "grouped-query"
    words = f"{kind}: {heads} query heads, {kv_heads} key-value heads of {head_dim}"
    if (value_dim := config.get("v_head_dim", head_dim)) == head_dim:
        return Feature(words)
    words = f"{words}, values of {value_dim}, cached with zeros up to {head_dim}"
    return Feature(words, f"{_GROUPED}(value_dim)", keys=("v_head_dim", "swa_v_head_dim"))


def detect_layer_kinds(config: HFConfig, facts: ModelFacts | None) -> Sequence[Feature]:
    """Detects the reach of each layer's attention, and layers that are not attention."""
    window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    chunk = config.get("attention_chunk_size")
    of_type = {
        "full_attention": Feature("full"),
        "sliding_attention": Feature(f"window of {window}", f"{ATTENTION}(span)"),
        "chunked_attention": Feature(f"chunks of {chunk}", f"{ATTENTION}(span)"),
        "linear_attention": _linear_attention(config),
    }
    features = []
    types = _layer_types(config)
    if facts is not None:
        words = {"window": "window of {}", "chunk": "chunks of {}", "full": "full", "latent": "full, of latents"}
        words |= {"state": "recurrent, with a state", "index": "keys of an indexer"}
        features = [Feature(f"{count} x {words[kind].format(tokens)}") for (kind, tokens), count in facts.spans.items()]
        return features + _sharing_and_inputs(config)
    for kind, count in types.items():
        known = of_type.get(kind) or Feature(f"{kind!r} layers", None, ("layers/",), ("layer_types",))
        features.append(Feature(f"{count} x {known.value}", known.code, known.files, known.keys))
    if not types and (window or chunk):
        features.append(of_type["sliding_attention" if window else "chunked_attention"])
    if (pattern := config.get("hybrid_override_pattern")) is not None:
        features += _hybrid(config, Counter(pattern))
    elif any(key in config for key in ("mamba_d_state", "ssm_state_size", "mamba_num_heads", "state_size")):
        features.append(_mamba(config, "Mamba layers"))
    features += _sharing_and_inputs(config)
    return features or [Feature("full")]


def _sharing_and_inputs(config: HFConfig) -> list[Feature]:
    features = []
    if ratios := Counter(config.get("compress_ratios") or ()):
        del ratios[0]
        words = " and ".join(f"{count} x {ratio} tokens" for ratio, count in sorted(ratios.items()))
        keys = ("compress_ratios", "compress_rope_parameters", "compress_rope_theta")
        features.append(Feature(f"contexts compressed to one entry for {words}", None, ("layers/", "kernels/"), keys))
    if (streams := config.get("hc_mult")) is not None:
        keys = ("hc_mult", "hc_eps", "hc_sinkhorn_iters")
        words = f"{streams} residual streams (hyper-connections)"
        features.append(Feature(words, None, ("layers/decoder_layer.py",), keys))
    if (shared := config.get("num_kv_shared_layers", 0)) > 0:
        code = "jaxis.layers.shared_cache_attention:SharedCacheAttention"
        features.append(Feature(f"{shared} x another layer's keys and values", code, keys=("num_kv_shared_layers",)))
    if (size := config.get("hidden_size_per_layer_input", 0)) > 0:
        keys = ("hidden_size_per_layer_input", "vocab_size_per_layer_input")
        code = "jaxis.models.common.decoder:DecoderModel"
        features.append(Feature(f"embeddings of each layer's own, {size} a token", code, keys=keys))
    return features


def _layer_types(config: HFConfig) -> Counter[str]:
    types: Counter[str] = Counter(config.get("layer_types") or ())
    if not types and (interval := config.get("full_attention_interval")):
        num_layers = config.get("num_hidden_layers", 0)
        full = num_layers // interval
        types = Counter(linear_attention=num_layers - full, full_attention=full)
    return types


def _linear_attention(config: HFConfig) -> Feature:
    if "linear_num_value_heads" in config:
        return Feature("Gated DeltaNet", "jaxis.layers.gated_delta_net:GatedDeltaNet")
    return Feature("linear attention", None, ("layers/", *_RECURRENT_FILES), ("layer_types",))


def _hybrid(config: HFConfig, pattern: Counter[str]) -> list[Feature]:
    features = [_mamba(config, f"{pattern['M']} x Mamba-2")] if pattern["M"] else []
    for letter, words in (("*", "attention"), ("-", "feed-forward"), ("E", "mixture of experts")):
        if count := pattern[letter]:
            features.append(Feature(f"{count} x {words} alone"))
    return features


def _mamba(config: HFConfig, words: str) -> Feature:
    keys = [key for key in config if key.startswith(("mamba_", "ssm_", "time_step_")) or key in _MAMBA_KEYS]
    # Only the first kind projects its time steps from a few features and has no heads.
    is_first = "mamba_dt_rank" in config or ("time_step_rank" in config and "num_heads" not in config)
    layer = "layers/mamba1.py" if is_first else "layers/mamba2.py"
    return Feature(words, None, (layer, *_RECURRENT_FILES), tuple(keys))


def detect_rope(config: HFConfig, facts: ModelFacts | None) -> Sequence[Feature]:
    """Detects the RoPE, or one for each kind of layer."""
    features = _ropes(config)
    if facts is not None and (without := facts.rope_counts.get(False)):
        features.append(Feature(f"none in {without} layers"))
    return features + [Feature(word) for word in facts.rope_kinds] if facts is not None else features


def _ropes(config: HFConfig) -> list[Feature]:
    parameters = config.get("rope_parameters")
    kinds: list[str] = []
    if isinstance(parameters, HFConfig):
        kinds = [key for key in parameters if isinstance(parameters.get(key), HFConfig)]
    if not kinds:
        return [_rope(config, "")]
    values = {key: value for key, value in config.to_dict().items() if key not in ("rope_scaling", "rope_theta")}
    return [
        _rope(HFConfig({**values, "rope_parameters": values["rope_parameters"][kind]}), f"{kind}: ") for kind in kinds
    ]


def _rope(config: HFConfig, prefix: str) -> Feature:
    where = ("config/rope_config.py", "layers/rope.py")
    keys = ("rope_scaling", "rope_parameters", "rope_theta")
    settings = config.get("rope_scaling") or config.get("rope_parameters")
    if isinstance(settings, HFConfig):
        rope_type = settings.get("rope_type", settings.get("type", "default"))
        if rope_type not in (*ROPE_TYPES, *ROPE_ALIASES):
            return Feature(f"{prefix}rope_type {rope_type!r}", None, where, keys)
    try:
        rope = rope_config(config)
    except ConfigError as error:
        return Feature(f"{prefix}{error}", None, where, keys)
    is_named = "rope_theta" in config or (isinstance(settings, HFConfig) and "rope_theta" in settings)
    # The family's own default may differ from the one assumed here.
    words = f"{prefix}{rope.rope_type}, theta {format(rope.theta, 'g') if is_named else 'by default'}"
    if rope.factor is not None:
        words += f", factor {rope.factor:g}"
    if rope.partial_rotary_factor != 1:
        words += f", {rope.partial_rotary_factor:g} of each head"
    return Feature(words)
