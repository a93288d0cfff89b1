"""Rotary position embeddings (arXiv:2104.09864) and their context-extension variants, as plain data.

The variants are those of `transformers.modeling_rope_utils`, whose arithmetic (in float32) is the reference.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxis.config.rope_config import RopeConfig
from jaxis.errors import ConfigError
from jaxis.kernels.rotary_embedding import HeadNorms, rotary_embedding

Number = TypeVar("Number", int, float)


@dataclass(frozen=True)
class RotaryEmbedding:
    """Rotates each pair of a head's first `rotary_dim` dimensions by an angle proportional to the position.

    Attributes:
      inv_freq: Angle per position, for each of the `rotary_dim / 2` pairs.
      attention_scaling: Multiplies cosine and sine (YaRN, LongRoPE).
      interleaved: True for pairs of dimensions (2i, 2i+1), False for (i, i + rotary_dim/2).
      axes: Position of each pair among a token's three: 0, 1, 2 for its time, row and column (M-RoPE,
        arXiv:2409.12191); empty for tokens with one position.
    """

    inv_freq: tuple[float, ...]
    attention_scaling: float = 1.0
    interleaved: bool = False
    axes: tuple[int, ...] = ()

    @property
    def rotary_dim(self) -> int:
        return 2 * len(self.inv_freq)

    def __call__(
        self,
        q: jax.Array,
        k: jax.Array,
        positions: jax.Array,
        sequence_lens: jax.Array | None = None,
        norms: HeadNorms | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        """Rotates queries [T, H, D] and keys [T, K, D], after `norms` of each head, if any.

        `positions` are i32 [T], or [3, T] for a rope with `axes`. `sequence_lens`, i32 [T], are the full lengths of
        each token's sequence if known (unpaged), for variants with frequencies that depend on them.
        """
        by_pair = positions[:, None] if positions.ndim == 1 else positions[np.asarray(self.axes)].T
        angles = by_pair.astype(jnp.float32) * self.frequencies(sequence_lens)
        cos = jnp.cos(angles) * self.attention_scaling
        sin = jnp.sin(angles) * self.attention_scaling
        return rotary_embedding(q, k, cos, sin, interleaved=self.interleaved, norms=norms)

    def frequencies(self, sequence_lens: jax.Array | None) -> jax.Array:
        """Returns angles per position: f32 [1 or T, rotary_dim / 2]."""
        del sequence_lens
        return jnp.asarray(np.asarray(self.inv_freq, np.float32))[None]


@dataclass(frozen=True, kw_only=True, eq=False)
class ScaledRotaryEmbedding(RotaryEmbedding):
    """Frequencies times learned `factors`, float32 [rotary_dim / 2] (LeRoPE)."""

    factors: jax.Array

    def frequencies(self, sequence_lens: jax.Array | None) -> jax.Array:
        return super().frequencies(sequence_lens) * self.factors


@dataclass(frozen=True, kw_only=True)
class DynamicNTKRotaryEmbedding(RotaryEmbedding):
    """Frequencies whose base grows with the sequence once it is longer than `max_position_embeddings`."""

    theta: float
    factor: float
    max_position_embeddings: int

    def frequencies(self, sequence_lens: jax.Array | None) -> jax.Array:
        if sequence_lens is None:
            return super().frequencies(None)
        dim = self.rotary_dim
        length = jnp.maximum(sequence_lens, self.max_position_embeddings).astype(jnp.float32)[:, None]
        growth = self.factor * length / self.max_position_embeddings - (self.factor - 1)
        base = self.theta * growth ** (dim / (dim - 2))
        return 1.0 / base ** (jnp.arange(0, dim, 2, dtype=jnp.float32) / dim)


@dataclass(frozen=True, kw_only=True)
class LongRotaryEmbedding(RotaryEmbedding):
    """LongRoPE (arXiv:2402.13753): one set of frequencies for short sequences, another for long ones.

    `inv_freq` is the short set. A paged engine cannot switch sets in the middle of a sequence, so it uses the long set
    for every request if `serve_long`, that is, if it was started for sequences longer than the original context.
    """

    long_inv_freq: tuple[float, ...]
    original_max_position_embeddings: int
    serve_long: bool

    def frequencies(self, sequence_lens: jax.Array | None) -> jax.Array:
        short = super().frequencies(None)
        long = jnp.asarray(np.asarray(self.long_inv_freq, np.float32))[None]
        if sequence_lens is None:
            return long if self.serve_long else short
        return jnp.where((sequence_lens > self.original_max_position_embeddings)[:, None], long, short)


def make_rotary_embedding(
    config: RopeConfig, *, head_dim: int, max_model_len: int, interleaved: bool = False
) -> RotaryEmbedding:
    """Returns the rope of a config.json, whose settings `jaxis.config.rope_config.rope_config` reads.

    Args:
      config: Settings of the rope.
      head_dim: D; `partial_rotary_factor` is the share of it that is rotated.
      max_model_len: Longest sequence that this engine will serve.
      interleaved: True for pairs of neighbouring dimensions.

    Raises:
      ConfigError: The number of LongRoPE factors is not the number of pairs.
    """
    rope = _rope_of_type(config, head_dim, max_model_len, interleaved)
    axes = _axes(config, len(rope.inv_freq))
    return dataclasses.replace(rope, axes=axes) if axes else rope


def _axes(config: RopeConfig, num_pairs: int) -> tuple[int, ...]:
    """Returns the position of each pair among three; empty if the config has no sections for this number of pairs."""
    if config.mrope_section is None:
        return ()
    if config.mrope_interleaved:
        # Pairs take turns, until the share of rows or columns is used up; the rest goes by time.
        rounds = range(num_pairs)
        return tuple(i % 3 if i < 3 * config.mrope_section[i % 3] else 0 for i in rounds)
    axes = [axis % 3 for axis, count in enumerate(config.mrope_section) for _ in range(count)]
    return tuple(axes) if len(axes) == num_pairs else ()


def _rope_of_type(config: RopeConfig, head_dim: int, max_model_len: int, interleaved: bool) -> RotaryEmbedding:
    rotary_dim = int(head_dim * config.partial_rotary_factor)
    # theta ** (2i / rotary_dim), in float32 as the reference computes it.
    exponents = np.arange(0, rotary_dim, 2, dtype=np.float32) / np.float32(rotary_dim)
    powers = np.power(np.float32(config.theta), exponents)
    match config.rope_type:
        case "linear":
            return RotaryEmbedding(_floats(1.0 / powers / _given(config.factor)), interleaved=interleaved)
        case "ntk":
            # https://kexue.fm/archives/9706: a larger base, and each pair slower by that base's share of one pair.
            factor = _given(config.factor)
            powers = np.power(np.float32(config.theta * factor), exponents) * np.float32(factor ** (2 / rotary_dim))
            return RotaryEmbedding(_floats(1.0 / powers), interleaved=interleaved)
        case "dynamic":
            return DynamicNTKRotaryEmbedding(
                _floats(1.0 / powers),
                interleaved=interleaved,
                theta=config.theta,
                factor=_given(config.factor),
                max_position_embeddings=_given(config.max_position_embeddings),
            )
        case "llama3":
            return RotaryEmbedding(_llama3_inv_freq(config, powers), interleaved=interleaved)
        case "yarn":
            inv_freq = _yarn_inv_freq(config, powers)
            return RotaryEmbedding(inv_freq, _yarn_attention_factor(config), interleaved)
        case "proportional":
            return RotaryEmbedding(_proportional_inv_freq(config, head_dim), interleaved=interleaved)
        case "longrope":
            return _longrope(config, powers, max_model_len, interleaved)
        case _:
            return RotaryEmbedding(_floats(1.0 / powers), interleaved=interleaved)


def _proportional_inv_freq(config: RopeConfig, head_dim: int) -> tuple[float, ...]:
    """Returns frequencies of the whole head, 0 past the rotated share (Gemma 4)."""
    num_rotated = int(config.partial_rotary_factor * head_dim // 2)
    exponents = np.arange(0, 2 * num_rotated, 2, dtype=np.float32) / np.float32(head_dim)
    rotated = 1.0 / np.power(np.float32(config.theta), exponents) / (config.factor or 1.0)
    return _floats(np.pad(rotated, (0, head_dim // 2 - num_rotated)))


def _llama3_inv_freq(config: RopeConfig, powers: np.ndarray) -> tuple[float, ...]:
    factor, low, high = _given(config.factor), _given(config.low_freq_factor), _given(config.high_freq_factor)
    original = _given(config.original_max_position_embeddings)
    inv_freq = (1.0 / powers).astype(np.float32)
    wavelength = 2 * math.pi / inv_freq
    # If both are equal (Llama 4 Scout), no wavelength lies between them.
    smooth = (original / wavelength - low) / (high - low or 1.0)
    interpolated = (1 - smooth) * inv_freq / factor + smooth * inv_freq
    scaled = np.where(wavelength > original / low, inv_freq / factor, inv_freq)
    is_medium = (wavelength >= original / high) & (wavelength <= original / low)
    return _floats(np.where(is_medium, interpolated, scaled))


def _yarn_inv_freq(config: RopeConfig, powers: np.ndarray) -> tuple[float, ...]:
    """Returns YaRN's frequencies (arXiv:2309.00071)."""
    dim, original, factor = 2 * len(powers), _given(config.original_max_position_embeddings), _given(config.factor)

    def correction_dim(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(config.theta))

    low, high = correction_dim(config.beta_fast), correction_dim(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = np.clip((np.arange(dim // 2, dtype=np.float32) - low) / (high - low), 0, 1)
    return _floats(1.0 / (factor * powers) * ramp + 1.0 / powers * (1 - ramp))


def _yarn_attention_factor(config: RopeConfig) -> float:
    factor = _given(config.factor)

    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if config.attention_factor is not None:
        return config.attention_factor
    if config.mscale and config.mscale_all_dim:
        return mscale(config.mscale) / mscale(config.mscale_all_dim)
    return mscale(1.0)


def _longrope(config: RopeConfig, powers: np.ndarray, max_model_len: int, interleaved: bool) -> LongRotaryEmbedding:
    original, attention_factor = _given(config.original_max_position_embeddings), config.attention_factor
    if attention_factor is None:
        factor = _given(config.factor)
        attention_factor = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    for name in ("short_factor", "long_factor"):
        if len(getattr(config, name)) != len(powers):
            found = len(getattr(config, name))
            raise ConfigError(f"{name} in config.json has {found} entries, expected {len(powers)}", keys=[name])
    return LongRotaryEmbedding(
        _floats(1.0 / (np.asarray(config.short_factor, np.float32) * powers)),
        attention_factor,
        interleaved,
        long_inv_freq=_floats(1.0 / (np.asarray(config.long_factor, np.float32) * powers)),
        original_max_position_embeddings=original,
        serve_long=max_model_len > original,
    )


def _given(value: Number | None) -> Number:
    """Returns the value of a setting that `rope_config` always reads for this rope type."""
    if value is None:
        raise ConfigError("the rope's settings lack one that its rope_type needs: make them with rope_config")
    return value


def _floats(values: np.ndarray) -> tuple[float, ...]:
    return tuple(float(v) for v in values.astype(np.float32))
