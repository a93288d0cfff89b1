"""Decoder layers that differ in where their norms are. A family supplies the attention and the feed-forward block.

Norms have the names that they have in the reference implementations' checkpoints: `input_layernorm` and so on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, Protocol

import jax

from jaxis.layers.attention_metadata import AttentionMetadata
from jaxis.layers.leaves import rms_norm
from jaxis.layers.mlp import FeedForward
from jaxis.layers.module import JaxModule, NamedByCheckpoint
from jaxis.layers.norm import Norm
from jaxis.layers.scale import scaled
from jaxis.layers.scope import LayerScope

LayerOutput = tuple[jax.Array | None, jax.Array]
"""The updated cache (None without one), and [T, E]."""


class SelfAttention(Protocol):
    """A layer that mixes the tokens of a sequence; a whole decoder layer has the same signature."""

    def __call__(self, kv_cache: jax.Array | None, x: jax.Array, metadata: AttentionMetadata) -> LayerOutput:
        """x [T, E] -> the updated cache (None without one) and [T, E]."""
        ...


class PreNormDecoderLayer(JaxModule):
    """`x = x + self_attn(norm(x))`
    `x = x + mlp(norm(x))`

    Args:
      scope: The layer's scope.
      self_attn, mlp: The two blocks.
      make_norm: Creates each norm from a scope; the default is an RMS norm with config.json's `rms_norm_eps`.
      residual_multiplier: Multiplies each block's output before it is added to x.

    Attributes:
      feed_forward_name: What the checkpoint calls `mlp`.
      feed_forward: The block of that name.
    """

    feed_forward_name: ClassVar[str] = "mlp"
    feed_forward = NamedByCheckpoint[FeedForward]("feed_forward_name")

    def __init__(
        self,
        scope: LayerScope,
        *,
        self_attn: SelfAttention,
        mlp: FeedForward,
        make_norm: Callable[[LayerScope], Norm] = rms_norm,
        residual_multiplier: float = 1.0,
    ) -> None:
        self.residual_multiplier = residual_multiplier
        self.input_layernorm = make_norm(scope)
        self.self_attn = self_attn
        self.post_attention_layernorm = make_norm(scope)
        setattr(self, self.feed_forward_name, mlp)

    def __call__(self, kv_cache: jax.Array | None, x: jax.Array, metadata: AttentionMetadata) -> LayerOutput:
        """x [T, E] -> the updated cache (None without one) and [T, E]."""
        kv_cache, attended = self.self_attn(kv_cache, self.input_layernorm(x), metadata)
        x = x + scaled(attended, self.residual_multiplier)
        return kv_cache, x + scaled(self.feed_forward(self.post_attention_layernorm(x)), self.residual_multiplier)


class PostNormDecoderLayer(JaxModule):
    """`x = x + norm(self_attn(x))`
    `x = x + norm(mlp(x))`

    Args:
      scope, self_attn, mlp: See `PreNormDecoderLayer`.
    """

    def __init__(self, scope: LayerScope, *, self_attn: SelfAttention, mlp: FeedForward) -> None:
        self.self_attn = self_attn
        self.mlp = mlp
        self.post_attention_layernorm = rms_norm(scope)
        self.post_feedforward_layernorm = rms_norm(scope)

    def __call__(self, kv_cache: jax.Array | None, x: jax.Array, metadata: AttentionMetadata) -> LayerOutput:
        """x [T, E] -> the updated cache (None without one) and [T, E]."""
        kv_cache, attended = self.self_attn(kv_cache, x, metadata)
        x = x + self.post_attention_layernorm(attended)
        return kv_cache, x + self.post_feedforward_layernorm(self.mlp(x))


class SandwichNormDecoderLayer(JaxModule):
    """`x = x + norm(self_attn(norm(x)))`
    `x = x + norm(mlp(norm(x)))`

    Args:
      scope, self_attn, mlp, make_norm: See `PreNormDecoderLayer`.
    """

    def __init__(
        self,
        scope: LayerScope,
        *,
        self_attn: SelfAttention,
        mlp: FeedForward,
        make_norm: Callable[[LayerScope], Norm] = rms_norm,
    ) -> None:
        self.self_attn = self_attn
        self.mlp = mlp
        self.input_layernorm = make_norm(scope)
        self.post_attention_layernorm = make_norm(scope)
        self.pre_feedforward_layernorm = make_norm(scope)
        self.post_feedforward_layernorm = make_norm(scope)

    def __call__(self, kv_cache: jax.Array | None, x: jax.Array, metadata: AttentionMetadata) -> LayerOutput:
        """x [T, E] -> the updated cache (None without one) and [T, E]."""
        kv_cache, attended = self.self_attn(kv_cache, self.input_layernorm(x), metadata)
        x = x + self.post_attention_layernorm(attended)
        return kv_cache, x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))


class ParallelDecoderLayer(JaxModule):
    """`y = norm(x)`
    `x = x + self_attn(y) + mlp(y)`

    Args:
      scope, self_attn, mlp, make_norm: See `PreNormDecoderLayer`.
    """

    def __init__(
        self,
        scope: LayerScope,
        *,
        self_attn: SelfAttention,
        mlp: FeedForward,
        make_norm: Callable[[LayerScope], Norm] = rms_norm,
    ) -> None:
        self.input_layernorm = make_norm(scope)
        self.self_attn = self_attn
        self.mlp = mlp

    def __call__(self, kv_cache: jax.Array | None, x: jax.Array, metadata: AttentionMetadata) -> LayerOutput:
        """x [T, E] -> the updated cache (None without one) and [T, E]."""
        normalised = self.input_layernorm(x)
        kv_cache, attended = self.self_attn(kv_cache, normalised, metadata)
        return kv_cache, x + attended + self.mlp(normalised)
