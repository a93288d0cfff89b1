"""Decoder layers that differ in where their norms are. A family supplies the attention and the feed-forward block.

Norms have the names that they have in the reference implementations' checkpoints: `input_layernorm` and so on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Protocol

import jax

from jaxis.layers.attention_metadata import AttentionMetadata
from jaxis.layers.kv_cache_spec import HasCache
from jaxis.layers.leaves import rms_norm
from jaxis.layers.mlp import FeedForward
from jaxis.layers.module import JaxModule, NamedByCheckpoint
from jaxis.layers.norm import Norm
from jaxis.layers.scale import scaled
from jaxis.layers.scope import LayerScope
from jaxis.layers.state_cache_spec import HasState

LayerCache = Any
"""A layer's cache as its spec has it, a tuple of several, or another's that it shares; without caches, what
`layers.uncached` has."""

LayerOutput = tuple[LayerCache, jax.Array]
"""The updated cache (without one, what stands in its place), and [T, E]."""


class SelfAttention(Protocol):
    """A layer that mixes the tokens of a sequence, by attention or otherwise; a whole decoder layer has the same
    signature."""

    def __call__(self, kv_cache: LayerCache, x: jax.Array, metadata: AttentionMetadata) -> LayerOutput:
        """x [T, E] -> the updated cache (without one, what stands in its place) and [T, E]."""
        ...


class PreNormDecoderLayer(JaxModule):
    """`x = x + self_attn(norm(x))`
    `x = x + mlp(norm(x))`

    Args:
      scope: The layer's scope.
      self_attn, mlp: The two blocks.
      make_norm: Creates each norm from a scope; the default is an RMS norm with config.json's `rms_norm_eps`.
      residual_multiplier: Multiplies each block's output before it is added to x.
      mixer_name: What the checkpoint calls `self_attn`, where layers differ in that.

    Attributes:
      mixer: The block of that name.
      input_norm_name, feed_forward_norm_name, feed_forward_name: What the checkpoint calls the norms and `mlp`.
      input_norm, feed_forward_norm, feed_forward: The modules of those names.
    """

    mixer = NamedByCheckpoint[SelfAttention]("_mixer_name")
    input_norm_name: ClassVar[str] = "input_layernorm"
    feed_forward_norm_name: ClassVar[str] = "post_attention_layernorm"
    feed_forward_name: str = "mlp"
    input_norm = NamedByCheckpoint[Norm]("input_norm_name")
    feed_forward_norm = NamedByCheckpoint[Norm]("feed_forward_norm_name")
    feed_forward = NamedByCheckpoint[FeedForward]("feed_forward_name")

    def __init__(
        self,
        scope: LayerScope,
        *,
        self_attn: SelfAttention,
        mlp: FeedForward,
        make_norm: Callable[[LayerScope], Norm] = rms_norm,
        residual_multiplier: float = 1.0,
        mixer_name: str = "self_attn",
    ) -> None:
        self.residual_multiplier = residual_multiplier
        setattr(self, self.input_norm_name, make_norm(scope))
        self._mixer_name = mixer_name
        setattr(self, mixer_name, self_attn)
        setattr(self, self.feed_forward_norm_name, make_norm(scope))
        setattr(self, self.feed_forward_name, mlp)

    def __call__(self, kv_cache: LayerCache, x: jax.Array, metadata: AttentionMetadata) -> LayerOutput:
        """x [T, E] -> the updated cache (None without one) and [T, E]."""
        kv_cache, attended = self.mixer(kv_cache, self.input_norm(x), metadata)
        x = x + scaled(attended, self.residual_multiplier)
        return kv_cache, x + scaled(self.feed_forward(self.feed_forward_norm(x)), self.residual_multiplier)


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
      make_post_norm: Creates the norms after the blocks; None means `make_norm`.

    Attributes:
      pre_norm_name, post_norm_name: What the checkpoint calls the norms before and after `mlp`.
    """

    pre_norm_name: ClassVar[str] = "pre_feedforward_layernorm"
    post_norm_name: ClassVar[str] = "post_feedforward_layernorm"
    pre_norm = NamedByCheckpoint[Norm]("pre_norm_name")
    post_norm = NamedByCheckpoint[Norm]("post_norm_name")

    def __init__(
        self,
        scope: LayerScope,
        *,
        self_attn: SelfAttention,
        mlp: FeedForward,
        make_norm: Callable[[LayerScope], Norm] = rms_norm,
        make_post_norm: Callable[[LayerScope], Norm] | None = None,
    ) -> None:
        make_post_norm = make_post_norm or make_norm
        self.self_attn = self_attn
        self.mlp = mlp
        self.input_layernorm = make_norm(scope)
        self.post_attention_layernorm = make_post_norm(scope)
        setattr(self, self.pre_norm_name, make_norm(scope))
        setattr(self, self.post_norm_name, make_post_norm(scope))

    def __call__(self, kv_cache: jax.Array | None, x: jax.Array, metadata: AttentionMetadata) -> LayerOutput:
        """x [T, E] -> the updated cache (None without one) and [T, E]."""
        kv_cache, attended = self.self_attn(kv_cache, self.input_layernorm(x), metadata)
        x = x + self.post_attention_layernorm(attended)
        return kv_cache, x + self.post_norm(self.mlp(self.pre_norm(x)))


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


class MixerLayer(JaxModule):
    """`x = x + mixer(norm(x))`, where layers of attention and of feed-forward blocks are not paired.

    Args:
      scope: The layer's scope.
      mixer: The block.
      epsilon: The norm's.
    """

    def __init__(self, scope: LayerScope, mixer: SelfAttention | FeedForward, *, epsilon: float) -> None:
        self.norm = rms_norm(scope, epsilon=epsilon)
        self.mixer: Any = mixer
        self.has_cache = isinstance(mixer, HasCache | HasState)

    def __call__(self, kv_cache: LayerCache, x: jax.Array, metadata: AttentionMetadata) -> LayerOutput:
        """x [T, E] -> the updated cache (None without one) and [T, E]."""
        if self.has_cache:
            kv_cache, mixed = self.mixer(kv_cache, self.norm(x), metadata)
        else:
            mixed = self.mixer(self.norm(x))
        return kv_cache, x + mixed
