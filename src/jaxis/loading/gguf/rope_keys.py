from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from jaxis.config.hf_config import HFConfig
from jaxis.config.rope_config import RopeConfig, rope_config
from jaxis.errors import ConfigError
from jaxis.loading.gguf.config_keys import Keys
from jaxis.loading.gguf.config_reader import FULL, ConfigReader, Values
from jaxis.loading.gguf.names import ROPE_FACTORS_LONG, ROPE_FACTORS_SHORT, ROPE_FREQS
from jaxis.loading.gguf.table import Fact, FileKeys, head_dim

# What Llama 3.1 and later models were published with: (low_freq_factor, high_freq_factor), and the original context.
_LLAMA3_FACTORS = ((1.0, 4.0), (1.0, 1.0))
_LLAMA3_ORIGINAL_CONTEXT = 8192


def rope(
    theta: float = 10_000.0, *, yarn: Callable[[ConfigReader], Values] = lambda _: {}, is_partial: bool = False
) -> Fact:
    """Returns the fact of the rope that all layers share, or full layers.

    `theta` is the base for files that have none, and `yarn` returns further settings of a YaRN rope. `is_partial` is
    for families that usually rotate a part of a head, which config.json says if it is all of it.
    """

    def read(reader: ConfigReader) -> Values:
        keys = reader.keys
        base = keys.typed("rope.freq_base", float, theta)
        values: Values = {"rope_theta": base}
        rotary_dim = keys.get("rope.dimension_count", reader.head_dim)
        if is_partial or rotary_dim != reader.head_dim:
            values["partial_rotary_factor"] = rotary_dim / reader.head_dim
        scaling = _scaling(keys, yarn(reader))
        if (freqs := reader.read_tensor(ROPE_FREQS)) is not None:
            if scaling is not None:
                raise ConfigError(
                    f"{keys.source} scales its rope by keys and by the tensor rope_freqs: one is expected"
                )
            if len(freqs) != rotary_dim // 2:
                raise ConfigError(f"{keys.source} has {len(freqs)} rope_freqs, expected {rotary_dim // 2}")
            scaling = _scaling_of_freqs(freqs, base, keys.get("context_length"))
        return values | ({} if scaling is None else {"rope_scaling": scaling})

    return Fact(read, _write_rope)


def _write_rope(config: HFConfig) -> FileKeys:
    found = rope_config(config, FULL)
    rotated = config.get("qk_rope_head_dim") or head_dim(config)
    keys: FileKeys = {
        "rope.freq_base": found.theta,
        "rope.dimension_count": int(rotated * found.partial_rotary_factor),
    }
    original = found.original_max_position_embeddings or 0
    if found.rope_type == "linear":
        keys |= {"rope.scaling.type": "linear", "rope.scaling.factor": float(found.factor or 1)}
    elif found.rope_type == "yarn":
        keys |= {"rope.scaling.original_context_length": original, **_yarn_keys(config, found)}
    elif found.rope_type == "longrope":
        keys["rope.scaling.original_context_length"] = original
        keys["rope.scaling.attn_factor"] = _longrope_attention_factor(found)
    elif found.rope_type == "dynamic":
        raise ConfigError(f"{config.source}: GGUF has no key for a rope of the type 'dynamic'")
    return keys


def mrope(*, interleaved: bool) -> Fact:
    """Returns the fact of a rope that counts the rows and columns of images (M-RoPE), if the file has one."""

    def read(reader: ConfigReader) -> Values:
        sections = reader.keys.for_layers("rope.dimension_sections", 3)
        if sections is None:
            return {}
        scaling = reader.values.get("rope_scaling") or {"rope_type": "default"}
        return {
            "rope_scaling": scaling | {"mrope_section": sections} | ({"mrope_interleaved": True} if interleaved else {})
        }

    return Fact(read)


def rope_tensors(config: HFConfig) -> dict[str, np.ndarray]:
    """Returns the float32 tensors of a config's rope, which describe what no key can."""
    rope = rope_config(config, FULL)
    if rope.rope_type == "longrope":
        factors = {ROPE_FACTORS_LONG: rope.long_factor, ROPE_FACTORS_SHORT: rope.short_factor}
        return {name: np.asarray(factor, np.float32) for name, factor in factors.items()}
    if rope.rope_type == "llama3":
        low, high = rope.low_freq_factor or 1.0, rope.high_freq_factor or 1.0
        original = rope.original_max_position_embeddings or 1
        divisors = _llama3_divisors(rope.theta, head_dim(config), rope.factor or 1.0, low, high, original)
        return {ROPE_FREQS: divisors.astype(np.float32)}
    return {}


def _yarn_keys(config: HFConfig, rope: RopeConfig) -> FileKeys:
    if rope.attention_factor is not None:
        raise ConfigError(f"{config.source}: GGUF has no key for the attention_factor of a yarn rope")
    keys: FileKeys = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": float(rope.factor or 1),
        "rope.scaling.yarn_beta_fast": float(rope.beta_fast),
        "rope.scaling.yarn_beta_slow": float(rope.beta_slow),
    }
    if rope.mscale_all_dim is not None:
        keys["rope.scaling.yarn_log_multiplier"] = 0.1 * rope.mscale_all_dim
    return keys


def _longrope_attention_factor(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor
    factor, original = rope.factor or 1.0, rope.original_max_position_embeddings or 1
    return math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0


def _scaling(keys: Keys, yarn: Values) -> Values | None:
    # "linear" by one is llama.cpp's default, and means none.
    kind = keys.get("rope.scaling.type", "linear")
    factor = keys.get("rope.scaling.factor", keys.get("rope.scale_linear", 1.0)) or 1.0
    original = keys.get("rope.scaling.original_context_length")
    attention_factor = keys.get("rope.scaling.attn_factor")
    yarn_keys = {
        "attention_factor": keys.get("rope.scaling.yarn_attn_factor"),
        "beta_fast": keys.get("rope.scaling.yarn_beta_fast"),
        "beta_slow": keys.get("rope.scaling.yarn_beta_slow"),
    }
    keys.expect("rope.scaling.yarn_ext_factor", 1.0, -1.0)
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": float(factor)}
    if kind == "yarn":
        settings = {"rope_type": "yarn", "factor": float(factor), "original_max_position_embeddings": original}
        given = {name: value for name, value in {**yarn_keys, **yarn}.items() if value is not None}
        return settings | given
    if kind == "longrope":
        return {"rope_type": "longrope", "attention_factor": attention_factor}
    raise ConfigError(f"{keys.source} has a rope scaling of the type {kind!r}: supported are linear, yarn and longrope")


def _scaling_of_freqs(divisors: np.ndarray, theta: float, context_length: int) -> Values:
    """Returns Llama 3's scaling if it gives exactly these divisors, float32 [D / 2], else the divisors themselves."""
    factor = float(divisors.max())
    for low, high in _LLAMA3_FACTORS:
        expected = _llama3_divisors(theta, 2 * len(divisors), factor, low, high, _LLAMA3_ORIGINAL_CONTEXT)
        if np.allclose(divisors, expected, rtol=1e-6, atol=0):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": _LLAMA3_ORIGINAL_CONTEXT,
            }
    explicit = [float(divisor) for divisor in divisors]
    return {
        "rope_type": "longrope",
        "short_factor": explicit,
        "long_factor": explicit,
        "factor": 1.0,
        "attention_factor": 1.0,
        "original_max_position_embeddings": context_length,
    }


def _llama3_divisors(
    theta: float, rotary_dim: int, factor: float, low: float, high: float, original_context: int
) -> np.ndarray:
    """Returns the divisors of the frequencies by Llama 3's scaling: float64 [rotary_dim / 2]."""
    wavelengths = 2 * math.pi * theta ** (np.arange(0, rotary_dim, 2) / rotary_dim)
    rotations = original_context / wavelengths
    smooth = np.clip((rotations - low) / (high - low), 0, 1) if high > low else (rotations > low).astype(np.float64)
    return 1 / ((1 - smooth) / factor + smooth)
