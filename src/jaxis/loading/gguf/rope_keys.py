from __future__ import annotations

import math
from typing import Any

import numpy as np

from jaxis.errors import ConfigError
from jaxis.loading.gguf.config_keys import Keys

# What Llama 3.1 and later models were published with: (low_freq_factor, high_freq_factor), and the original context.
_LLAMA3_FACTORS = ((1.0, 4.0), (1.0, 1.0))
_LLAMA3_ORIGINAL_CONTEXT = 8192


def rope_values(
    keys: Keys,
    *,
    head_dim: int,
    default_theta: float = 10_000.0,
    freqs: np.ndarray | None = None,
    yarn: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Returns `rope_theta`, and `rope_scaling` and `partial_rotary_factor` where the file has any.

    `default_theta` is the base for files that have none, `freqs` the tensor `rope_freqs`, the divisors of the
    frequencies, if any, and `yarn` has further settings of a YaRN rope. Raises ConfigError if the kind of rope is not
    supported.
    """
    theta = float(keys.get("rope.freq_base", default_theta))
    values: dict[str, Any] = {"rope_theta": theta}
    rotary_dim = keys.get("rope.dimension_count", head_dim)
    if rotary_dim != head_dim:
        values["partial_rotary_factor"] = rotary_dim / head_dim
    scaling = _scaling(keys, yarn or {})
    if freqs is not None:
        if scaling is not None:
            raise ConfigError(f"{keys.source} scales its rope by keys and by the tensor rope_freqs: one is expected")
        if len(freqs) != rotary_dim // 2:
            raise ConfigError(f"{keys.source} has {len(freqs)} rope_freqs, expected {rotary_dim // 2}")
        scaling = _scaling_of_freqs(freqs, theta, keys.get("context_length"))
    return values | ({} if scaling is None else {"rope_scaling": scaling})


def _scaling(keys: Keys, yarn: dict[str, Any]) -> dict[str, Any] | None:
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


def _scaling_of_freqs(divisors: np.ndarray, theta: float, context_length: int) -> dict[str, Any]:
    """Returns Llama 3's scaling if it gives exactly these divisors, float32 [D / 2], else the divisors themselves."""
    factor = float(divisors.max())
    for low, high in _LLAMA3_FACTORS:
        expected = llama3_divisors(theta, 2 * len(divisors), factor, low, high, _LLAMA3_ORIGINAL_CONTEXT)
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


def llama3_divisors(
    theta: float, rotary_dim: int, factor: float, low: float, high: float, original_context: int
) -> np.ndarray:
    """Returns the divisors of the frequencies by Llama 3's scaling: float64 [rotary_dim / 2]."""
    wavelengths = 2 * math.pi * theta ** (np.arange(0, rotary_dim, 2) / rotary_dim)
    rotations = original_context / wavelengths
    smooth = np.clip((rotations - low) / (high - low), 0, 1) if high > low else (rotations > low).astype(np.float64)
    return 1 / ((1 - smooth) / factor + smooth)
