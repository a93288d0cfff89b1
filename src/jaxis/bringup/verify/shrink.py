"""The tiny twin of a config.json: every size small, every feature still in use.

A twin is small enough to make with random weights and to compare with the reference in seconds, on any machine. For
that to prove something about the model, every feature must stay active: at least two layers of each kind, query heads
that share key-value heads and experts chosen in groups as in the model, windows, chunks and the context after which a
RoPE changes shorter than the prompts, soft caps as low as the scores that they cap, and epsilons as large as the mean
squares that they are added to.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxis.config.architecture import architectures_of
from jaxis.config.hf_config import HFConfig
from jaxis.config.usual_keys import own_names, with_defaults
from jaxis.errors import ConfigError
from jaxis.models.common.family import TinySizes
from jaxis.models.registry import family_of

LAYERS_OF_EACH_KIND = 2
HIDDEN_SIZE = 64
VOCAB_SIZE = 131
NUM_HEADS = 4
HEAD_DIM = 16
MAX_POSITION_EMBEDDINGS = 1024
ORIGINAL_MAX_POSITION_EMBEDDINGS = 128
NUM_EXPERTS = 8
NUM_GROUPS = 4

# Sizes that several families have; `Family.tiny` has the others. Different ones for different dimensions, so that a
# mix-up shows. What is null, absent or 0 stays so.
_SIZES = {
    "hidden_size": HIDDEN_SIZE,
    "intermediate_size": 96,
    "moe_intermediate_size": 48,
    "expert_hidden_dim": 48,
    "moe_shared_expert_intermediate_size": 48,
    "shared_expert_intermediate_size": 80,
    "vocab_size": VOCAB_SIZE,
    "sliding_window": 11,
    "sliding_window_size": 11,
    "attention_chunk_size": 16,
    "max_position_embeddings": MAX_POSITION_EMBEDDINGS,
    # Latent attention.
    "q_lora_rank": 40,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "qk_head_dim": 24,
    "v_head_dim": 12,
    # Llama 4's temperature: positions per step.
    "floor_scale": 8,
    # The twin's scores and logits are smaller too.
    "attn_logit_softcapping": 3.0,
    "final_logit_softcapping": 3.0,
    "query_pre_attn_scalar": 20,
}
_EPSILON_SCALE, _EPSILON_OFFSET = 1000.0, 0.05  # as large as mean squares: a wrong one, or one not read, must show
_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_EXPERTS_PER_TOKEN = (
    *("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "top_k_experts", "moe_k", "moe_top_k"),
)
_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
# How far a layer attends, or positions count: far beyond the prompts if the config leaves it to the family.
_REACHES = ("sliding_window", "attention_chunk_size", "floor_scale")
# Lists of layer numbers.
_LAYER_NUMBERS = ("mlp_only_layers", "moe_layers")
# Of each period of layers one is another kind, at an offset (Jamba).
_LAYER_PERIODS = ("attn_layer", "expert_layer")
_DROPPED = ("quantization_config", "auto_map", "_name_or_path", "_commit_hash")


def tiny_twin(config: Mapping[str, Any], complete: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Makes the config.json of the model's tiny twin, with the same keys: unquantized, without names of special tokens.

    If the config has a `text_config`, the twin is of that. `complete` has the reference's values for missing keys, such
    as layer types. Raises ConfigError if the config does not give the number of layers or heads.
    """
    try:
        family = family_of(architectures_of(HFConfig(config))[0])
    except ConfigError:  # names none
        family = None
    return _twin(config, complete or {}, family.tiny if family is not None else {})


def _twin(config: Mapping[str, Any], complete: Mapping[str, Any], tiny: TinySizes) -> dict[str, Any]:
    twin = copy.deepcopy(with_defaults(config))
    if isinstance(text := twin.get("text_config"), dict):
        twin["text_config"] = _twin(text, complete.get("text_config") or {}, tiny)
        parts = {key for key, value in complete.items() if key.endswith("_config") and isinstance(value, Mapping)}
        for key in parts - {"text_config", "quantization_config"}:
            twin[key] = _smallest(complete[key])
        return twin
    attends = "state_size" not in twin or "num_attention_heads" in twin
    _check_sizes(twin, ("num_hidden_layers", "num_attention_heads") if attends else ("num_hidden_layers",))
    for key in _DROPPED:
        twin.pop(key, None)
    # Some references need a token to pad with, and 0 is in the twin's vocabulary.
    twin |= {key: 0 if key == "pad_token_id" and twin[key] == 0 else None for key in _TOKEN_IDS if key in twin}
    for key in _REACHES:
        if key not in twin and complete.get(key) is not None:
            twin[key] = complete[key]
    _select_layers(twin, complete)
    if attends:
        _shrink_heads(twin)
    for key, size in (_SIZES | dict(tiny)).items():
        if twin.get(key) and not isinstance(twin[key], str):
            twin[key] = size(twin) if callable(size) else size
    _shrink_experts(twin)
    _shrink_rope(twin)
    _enlarge_epsilons(twin)
    return _named_as_in(config, twin)


def _enlarge_epsilons(config: dict[str, Any]) -> None:
    """Makes different epsilons large and still different."""
    for key in config:
        if {"eps", "epsilon"} & set(key.split("_")) and config[key]:
            config[key] = _EPSILON_OFFSET + _EPSILON_SCALE * config[key]


def _named_as_in(config: Mapping[str, Any], twin: dict[str, Any]) -> dict[str, Any]:
    """Renames the twin's keys to the config's own names, since the reference may not know the usual ones."""
    renamed = own_names(config).items()
    own = {usual: name for name, usual in renamed if name in config and usual not in config}
    return {own.get(key, key): value for key, value in twin.items()}


def _check_sizes(config: Mapping[str, Any], keys: Sequence[str]) -> None:
    for key in keys:
        if not isinstance(config.get(key), int):
            raise ConfigError(
                f"config.json has {key}={config.get(key)!r}, so there is nothing to shrink: give a number"
            )


def _smallest(config: Mapping[str, Any]) -> dict[str, Any]:
    """Makes a small config of a part that is created and never run, such as a vision tower: one layer, small sizes."""
    small = copy.deepcopy(dict(config))
    for key, value in small.items():
        if key.endswith(("_size", "_dim")) and isinstance(value, int):
            small[key] = min(value, HIDDEN_SIZE)
        elif key == "num_attention_heads":
            small[key] = NUM_HEADS
        elif key.startswith("num_") and key.endswith("_layers"):
            small[key] = 1
    return small


def _shrink_heads(config: dict[str, Any]) -> None:
    num_heads, num_kv_heads = config["num_attention_heads"], config.get("num_key_value_heads")
    if (head_dim := config.get("head_dim")) is not None:
        usual = head_dim * num_heads == config.get("hidden_size")
        # With latent attention, head_dim is the part that is rotated.
        config["head_dim"] = (config.get("qk_rope_head_dim") and _SIZES["qk_rope_head_dim"]) or HEAD_DIM * (
            1 if usual else 2
        )
        if config.get("rotary_dim"):
            config["rotary_dim"] = config["rotary_dim"] * config["head_dim"] // head_dim
    if num_kv_heads is not None:
        config["num_key_value_heads"] = NUM_HEADS if num_kv_heads == num_heads else 1 if num_kv_heads == 1 else 2
    config["num_attention_heads"] = NUM_HEADS


def _shrink_experts(config: dict[str, Any]) -> None:
    for key in _EXPERT_COUNTS:
        if config.get(key):
            config[key] = NUM_EXPERTS
    for key in _EXPERTS_PER_TOKEN:
        if config.get(key):
            config[key] = min(config[key], 3)
    if config.get("n_group") and config["n_group"] > 1:
        config["topk_group"] = NUM_GROUPS // 2 if config["topk_group"] < config["n_group"] else NUM_GROUPS
        config["n_group"] = NUM_GROUPS


def _shrink_rope(config: dict[str, Any]) -> None:
    """Makes the contexts at which a RoPE changes shorter than the longest prompts."""
    for key in ("rope_scaling", "rope_parameters"):
        settings = config.get(key)
        if isinstance(settings, dict):
            # One object, or one for each type of layer.
            for rope in [settings, *(value for value in settings.values() if isinstance(value, dict))]:
                _shrink_rope_settings(config, rope)
    for key in ("original_max_position_embeddings", "initial_context_length"):
        if config.get(key) is not None:
            config[key] = ORIGINAL_MAX_POSITION_EMBEDDINGS


def _shrink_rope_settings(config: dict[str, Any], rope: dict[str, Any]) -> None:
    kind = rope.get("rope_type", rope.get("type"))
    if rope.get("original_max_position_embeddings") is not None:
        rope["original_max_position_embeddings"] = ORIGINAL_MAX_POSITION_EMBEDDINGS
    if kind == "dynamic" or (kind == "yarn" and rope.get("original_max_position_embeddings") is None):
        config["max_position_embeddings"] = ORIGINAL_MAX_POSITION_EMBEDDINGS
    if rope.get("max_position_embeddings") is not None:
        rope["max_position_embeddings"] = config["max_position_embeddings"]
    if config.get("qk_rope_head_dim") and rope.get("partial_rotary_factor", 1) != 1:
        rope["partial_rotary_factor"] = config["qk_rope_head_dim"] / (
            config["qk_rope_head_dim"] + config["qk_nope_head_dim"]
        )
    head_dim = config.get("head_dim") or HIDDEN_SIZE // NUM_HEADS
    rotated = int(head_dim * rope.get("partial_rotary_factor", config.get("partial_rotary_factor") or 1.0))
    for key in ("short_factor", "long_factor"):
        if isinstance(factors := rope.get(key), list):
            rope[key] = [factors[i * len(factors) // (rotated // 2)] for i in range(rotated // 2)]


@dataclass(frozen=True)
class _Axis:
    """A way in which layers of one model differ: the kind of each layer, and a change of the config to fewer layers."""

    kind: Callable[[int], Any]
    rewrite: Callable[[Sequence[int]], None]


def _select_layers(config: dict[str, Any], complete: Mapping[str, Any]) -> None:
    """Keeps LAYERS_OF_EACH_KIND layers of each kind, in an order that the model could have."""
    _drop_prediction_layers(config)
    _spell_out_periods(config)
    _spell_out_kinds(config)
    axes = _axes(config)
    kinds = [tuple(axis.kind(i) for axis in axes) for i in range(config["num_hidden_layers"])]
    unsaid = _kinds_not_said(config, complete, kinds)
    chosen = _choose(kinds) if unsaid is None else _first_layers_with(list(zip(kinds, unsaid, strict=True)))
    for axis in axes:
        axis.rewrite(chosen)
    config["num_hidden_layers"] = len(chosen)
    if config.get("moe_layer_end_index"):
        config["moe_layer_end_index"] = len(chosen) - 1


def _kinds_not_said(
    config: dict[str, Any], complete: Mapping[str, Any], kinds: Sequence[Any]
) -> list[tuple[Any, ...]] | None:
    """Returns each layer's kind along axes that the family derives from its number alone; None if there are none."""
    lists = []
    for key, value in complete.items():
        if isinstance(value, list) and not config.get(key):
            if key in _LAYER_NUMBERS:
                lists.append([i in value for i in range(len(kinds))])
            elif len(value) == len(kinds):
                lists.append(value)
    lists += [
        [i % period == config.get(f"{name}_offset", 0) for i in range(len(kinds))]
        for name in _LAYER_PERIODS
        if isinstance(period := config.get(f"{name}_period"), int) and period > 1
    ]
    unsaid = list(zip(*lists, strict=True))
    # What follows from the config's keys does not count.
    return unsaid if len(set(zip(kinds, unsaid, strict=False))) > len(set(kinds)) else None


def _first_layers_with(kinds: Sequence[Any]) -> list[int]:
    """Returns the first layers until there are LAYERS_OF_EACH_KIND of each kind, or all layers."""
    for count in range(1, len(kinds)):
        if all(kinds[:count].count(kind) >= LAYERS_OF_EACH_KIND for kind in set(kinds)):
            return list(range(count))
    return list(range(len(kinds)))


def _choose(kinds: Sequence[Any]) -> list[int]:
    chosen: list[int] = []
    for _ in range(LAYERS_OF_EACH_KIND):
        for kind in dict.fromkeys(kinds):
            numbers = [i for i, other in enumerate(kinds) if other == kind]
            later = [i for i in numbers if chosen and i > chosen[-1]]
            unused = [i for i in numbers if i not in chosen]
            chosen.append((later or unused or numbers)[0])
    return sorted(chosen)


def _drop_prediction_layers(config: dict[str, Any]) -> None:
    """Drops the entries of layers that predict later tokens, where lists go on past the model's own."""
    num_layers, extra = config["num_hidden_layers"], config.get("num_nextn_predict_layers") or 0
    for key, value in config.items():
        if extra and isinstance(value, list) and len(value) == num_layers + extra:
            config[key] = value[:num_layers]
            config["num_nextn_predict_layers"] = 0


def _spell_out_kinds(config: dict[str, Any]) -> None:
    """Replaces makers' own names of layers' kinds, which the reference does not read, by names that it reads."""
    if flags := config.pop("hybrid_layer_pattern", None):
        config["layer_types"] = ["sliding_attention" if flag else "full_attention" for flag in flags]
    if isinstance(flags := config.get("moe_layer_freq"), list):
        del config["moe_layer_freq"]
        config["mlp_layer_types"] = ["sparse" if flag else "dense" for flag in flags]
    if isinstance(numbers := config.get("moe_layers_enum"), str):
        del config["moe_layers_enum"]
        sparse = {int(number) for number in numbers.split(",")}
        num_layers = config["num_hidden_layers"]
        config["mlp_layer_types"] = ["sparse" if i in sparse else "dense" for i in range(num_layers)]


def _spell_out_periods(config: dict[str, Any]) -> None:
    """Replaces periods in a config by explicit lists, if the family reads lists too."""
    num_layers = config["num_hidden_layers"]
    if "no_rope_layers" in config and not config["no_rope_layers"]:
        interval = config.get("no_rope_layer_interval") or 4
        config["no_rope_layers"] = [int((i + 1) % interval != 0) for i in range(num_layers)]
    if (step := config.get("interleave_moe_layer_step")) and step > 1 and not config.get("moe_layers"):
        config["moe_layers"] = list(range(step - 1, num_layers, step))
    if (step := config.get("decoder_sparse_step")) and step > 1:
        dense = {i for i in range(num_layers) if (i + 1) % step}
        config["mlp_only_layers"] = sorted(dense | set(config.get("mlp_only_layers") or ()))
        config["decoder_sparse_step"] = 1


def _axes(config: dict[str, Any]) -> list[_Axis]:
    num_layers = config["num_hidden_layers"]
    axes = []
    for key, value in config.items():
        if isinstance(value, list) and key in _LAYER_NUMBERS:
            axes.append(_numbered(config, key))
        elif isinstance(value, list) and len(value) == num_layers > 1:
            axes.append(_listed(config, key))
    firsts = ("first_k_dense_replace", "moe_layer_start_index")
    axes += [_first_layers(config, key) for key in firsts if config.get(key)]
    if config.get("num_kv_shared_layers"):
        axes.append(_last_layers(config, "num_kv_shared_layers"))
    if config.get("layer_types") is None:
        if config.get("use_sliding_window") and config.get("max_window_layers") is not None:
            axes.append(_first_layers(config, "max_window_layers"))
        if isinstance(period := config.get("sliding_window_pattern"), int) and period > 1:
            axes.append(_every(config, "sliding_window_pattern"))
    return axes


def _listed(config: dict[str, Any], key: str) -> _Axis:
    values = config[key]

    def rewrite(chosen: Sequence[int]) -> None:
        config[key] = [values[i] for i in chosen]

    return _Axis(lambda i: values[i], rewrite)


def _numbered(config: dict[str, Any], key: str) -> _Axis:
    numbers = set(config[key])

    def rewrite(chosen: Sequence[int]) -> None:
        config[key] = [place for place, i in enumerate(chosen) if i in numbers]

    return _Axis(lambda i: i in numbers, rewrite)


def _first_layers(config: dict[str, Any], key: str) -> _Axis:
    count = config[key]

    def rewrite(chosen: Sequence[int]) -> None:
        config[key] = sum(i < count for i in chosen)

    return _Axis(lambda i: i < count, rewrite)


def _last_layers(config: dict[str, Any], key: str) -> _Axis:
    first = config["num_hidden_layers"] - config[key]

    def rewrite(chosen: Sequence[int]) -> None:
        config[key] = sum(i >= first for i in chosen)

    return _Axis(lambda i: i >= first, rewrite)


def _every(config: dict[str, Any], key: str) -> _Axis:
    """Handles layers that differ once in a period: every other one of the layers kept."""
    period = config[key]

    def rewrite(_: Sequence[int]) -> None:
        config[key] = 2

    return _Axis(lambda i: (i + 1) % period == 0, rewrite)
