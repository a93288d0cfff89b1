"""Decoder layers with different places of norms, which have the names of most checkpoints: `input_layernorm`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import jax

from jaxis.layers.attention_metadata import AttentionMetadata
from jaxis.layers.kv_cache_spec import HasCache
from jaxis.layers.leaves import rms_norm
from jaxis.layers.mlp import FeedForward
from jaxis.layers.module import JaxModule
from jaxis.layers.norm import Norm
from jaxis.layers.scale import scaled
from jaxis.layers.scope import LayerScope
from jaxis.layers.state_cache_spec import HasState
from jaxis.layers.streams import StreamConnection

LayerCache = Any
"""A layer's cache: the array of its spec, a tuple of several, or another layer's that it shares; without caches, as in
`layers.uncached`.
"""

LayerOutput = tuple[LayerCache, jax.Array]
"""The updated cache, and [T, E]."""


class SelfAttention(Protocol):
    """A layer that mixes the tokens of a sequence, by attention or otherwise; a whole decoder layer is one, too."""

    def __call__(self, kv_cache: LayerCache, x: jax.Array, metadata: AttentionMetadata) -> LayerOutput:
        """Returns the updated cache (None, or an `UncachedKeysAndValues`, without caches) and [T, E] for x [T, E]."""
        ...


class PreNormDecoderLayer(JaxModule):
    """`x = x + self_attn(norm(x))`
    `x = x + mlp(norm(x))`

    Args:
      self_attn, mlp: The two blocks.
      make_norm: Function that creates a norm from a scope; None means the family's, `scope.make_norm`.
      residual_multiplier: Multiplies each block's output before it is added to x.
      mixer_name: Name of the first block if it is not `self_attn`.
    """

    def __init__(
        self,
        scope: LayerScope,
        *,
        self_attn: SelfAttention,
        mlp: FeedForward,
        make_norm: Callable[[LayerScope], Norm] | None = None,
        residual_multiplier: float = 1.0,
        mixer_name: str = "self_attn",
    ) -> None:
        make_norm = make_norm or scope.make_norm or rms_norm
        self.residual_multiplier = residual_multiplier
        self.input_layernorm = make_norm(scope)
        self._mixer_name = mixer_name
        setattr(self, mixer_name, self_attn)
        self.post_attention_layernorm = make_norm(scope)
        self.mlp = mlp

    @property
    def mixer(self) -> Any:
        return getattr(self, self._mixer_name)

    def __call__(
        self, kv_cache: LayerCache, x: jax.Array, metadata: AttentionMetadata, *mixer_inputs: jax.Array
    ) -> LayerOutput:
        """x [T, E] -> the updated cache and [T, E]; `mixer_inputs` are further inputs of the first block."""
        kv_cache, attended = self.mixer(kv_cache, self.input_layernorm(x), metadata, *mixer_inputs)
        x = x + scaled(attended, self.residual_multiplier)
        return kv_cache, x + scaled(self.mlp(self.post_attention_layernorm(x), metadata), self.residual_multiplier)


class PostNormDecoderLayer(JaxModule):
    """`x = x + norm(self_attn(x))`
    `x = x + norm(mlp(x))`
    """

    def __init__(self, scope: LayerScope, *, self_attn: SelfAttention, mlp: FeedForward) -> None:
        self.self_attn = self_attn
        self.mlp = mlp
        self.post_attention_layernorm = rms_norm(scope)
        self.post_feedforward_layernorm = rms_norm(scope)

    def __call__(self, kv_cache: jax.Array | None, x: jax.Array, metadata: AttentionMetadata) -> LayerOutput:
        kv_cache, attended = self.self_attn(kv_cache, x, metadata)
        x = x + self.post_attention_layernorm(attended)
        return kv_cache, x + self.post_feedforward_layernorm(self.mlp(x, metadata))


class SandwichNormDecoderLayer(JaxModule):
    """`x = x + norm(self_attn(norm(x)))`
    `x = x + norm(mlp(norm(x)))`

    `make_post_norm` creates the norms after the blocks; None means `make_norm`.
    """

    def __init__(
        self,
        scope: LayerScope,
        *,
        self_attn: SelfAttention,
        mlp: FeedForward,
        make_norm: Callable[[LayerScope], Norm] | None = None,
        make_post_norm: Callable[[LayerScope], Norm] | None = None,
        mixer_name: str = "self_attn",
    ) -> None:
        make_norm = make_norm or scope.make_norm or rms_norm
        make_post_norm = make_post_norm or make_norm
        self._mixer_name = mixer_name
        setattr(self, mixer_name, self_attn)
        self.mlp = mlp
        self.input_layernorm = make_norm(scope)
        self.post_attention_layernorm = make_post_norm(scope)
        self.pre_feedforward_layernorm = make_norm(scope)
        self.post_feedforward_layernorm = make_post_norm(scope)

    @property
    def mixer(self) -> Any:
        return getattr(self, self._mixer_name)

    def __call__(self, kv_cache: jax.Array | None, x: jax.Array, metadata: AttentionMetadata) -> LayerOutput:
        kv_cache, attended = self.mixer(kv_cache, self.input_layernorm(x), metadata)
        x = x + self.post_attention_layernorm(attended)
        fed = self.mlp(self.pre_feedforward_layernorm(x), metadata)
        return kv_cache, x + self.post_feedforward_layernorm(fed)


class ParallelDecoderLayer(JaxModule):
    """`y = norm(x)`
    `x = x + self_attn(y) + mlp(y)`

    With `has_mlp_norm`, the feed-forward block has a norm of its own: `x = x + self_attn(norm(x)) + mlp(norm(x))`.
    """

    def __init__(
        self,
        scope: LayerScope,
        *,
        self_attn: SelfAttention,
        mlp: FeedForward,
        make_norm: Callable[[LayerScope], Norm] | None = None,
        has_mlp_norm: bool = False,
    ) -> None:
        make_norm = make_norm or scope.make_norm or rms_norm
        self.input_layernorm = make_norm(scope)
        self.self_attn = self_attn
        self.post_attention_layernorm = make_norm(scope) if has_mlp_norm else None
        self.mlp = mlp

    def __call__(self, kv_cache: jax.Array | None, x: jax.Array, metadata: AttentionMetadata) -> LayerOutput:
        normalised = self.input_layernorm(x)
        kv_cache, attended = self.self_attn(kv_cache, normalised, metadata)
        if self.post_attention_layernorm is not None:
            normalised = self.post_attention_layernorm(x)
        return kv_cache, x + attended + self.mlp(normalised, metadata)


class StreamsDecoderLayer(JaxModule):
    """Residual streams x [T, S, E]:

    `u, update = attn_hc(x); x = update.into(x, self_attn(norm(u)))`
    `u, update = ffn_hc(x); x = update.into(x, mlp(norm(u)))`

    Attributes:
      uses_token_ids: True if the layer also takes the ids i32 [T] of the tokens.

    Args:
      make_connection: Function that creates the two blocks' connections from scopes.
      make_norm: Function that creates a norm from a scope; None if connections norm what they read.
    """

    uses_token_ids = False

    def __init__(
        self,
        scope: LayerScope,
        *,
        self_attn: SelfAttention,
        mlp: FeedForward,
        make_connection: Callable[[LayerScope], StreamConnection],
        make_norm: Callable[[LayerScope], Norm] | None = rms_norm,
        mixer_name: str = "self_attn",
    ) -> None:
        self._mixer_name = mixer_name
        setattr(self, mixer_name, self_attn)
        self.mlp = mlp
        self.attn_hc = make_connection(scope / "attn_hc")
        self.ffn_hc = make_connection(scope / "ffn_hc")
        self.input_layernorm = make_norm and make_norm(scope)
        self.post_attention_layernorm = make_norm and make_norm(scope)

    @property
    def mixer(self) -> Any:
        return getattr(self, self._mixer_name)

    def __call__(
        self, kv_cache: LayerCache, x: jax.Array, metadata: AttentionMetadata, *mlp_inputs: jax.Array
    ) -> LayerOutput:
        """x [T, S, E] -> the updated cache and [T, S, E]; `mlp_inputs` are further inputs of `mlp`."""
        read, update = self.attn_hc(x)
        normed = read if self.input_layernorm is None else self.input_layernorm(read)
        kv_cache, attended = self.mixer(kv_cache, normed, metadata)
        x = update.into(x, attended)
        read, update = self.ffn_hc(x)
        normed = read if self.post_attention_layernorm is None else self.post_attention_layernorm(read)
        return kv_cache, update.into(x, self.mlp(normed, metadata, *mlp_inputs))


class MixerLayer(JaxModule):
    """`x = x + mixer(norm(x))`, for models that do not pair layers of attention with feed-forward blocks."""

    def __init__(self, scope: LayerScope, mixer: SelfAttention | FeedForward, *, epsilon: float) -> None:
        self.norm = rms_norm(scope, epsilon=epsilon)
        self.mixer: Any = mixer
        self.has_cache = isinstance(mixer, HasCache | HasState)

    def __call__(self, kv_cache: LayerCache, x: jax.Array, metadata: AttentionMetadata) -> LayerOutput:
        if self.has_cache:
            kv_cache, mixed = self.mixer(kv_cache, self.norm(x), metadata)
        else:
            mixed = self.mixer(self.norm(x), metadata)
        return kv_cache, x + mixed
