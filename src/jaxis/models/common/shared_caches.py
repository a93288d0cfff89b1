"""Models whose last layers attend to the keys and values of earlier layers (Gemma 3n, Gemma 4)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import jax
import numpy as np

from jaxis.config.attention_span import AttentionSpan
from jaxis.config.hf_config import HFConfig
from jaxis.config.rope_config import RopeConfig
from jaxis.layers.decoder_layer import SelfAttention
from jaxis.layers.grouped_query_attention import GroupedQueryAttention
from jaxis.layers.module import named_modules
from jaxis.layers.norm import UnweightedRmsNorm
from jaxis.layers.scope import LayerScope
from jaxis.layers.shared_cache_attention import SharedCacheAttention
from jaxis.models.common.decoder import CausalLM

_KEYS_AND_VALUES = ("k_proj", "v_proj", "k_norm", "v_norm")


def cache_owner(config: HFConfig, kinds: Sequence[str], index: int, *, default_sharing: int = 0) -> int | None:
    """Returns the layer whose keys and values a layer attends to: the last of its kind that has its own.

    None for a layer with its own keys and values: all but the last `num_kv_shared_layers`, or `default_sharing` if
    config.json lacks the key. `kinds` has the type of each layer. Raises ConfigError if there is no such layer.
    """
    num_layers = len(kinds)
    num_owners = num_layers - config.get("num_kv_shared_layers", default_sharing)
    if index < num_owners:
        return None
    for owner in reversed(range(num_owners)):
        if kinds[owner] == kinds[index]:
            return owner
    raise config.fault(
        "num_kv_shared_layers",
        why=f"but layer {index} of {num_layers} shares the keys and values of an earlier {kinds[index]!r} layer, and "
        f"none of the first {max(0, num_owners)} is one",
    )


class SharingLayer(Protocol):
    """Settings of a layer that may share a cache."""

    @property
    def shares_cache_of(self) -> int | None:
        """Layer whose keys and values this one attends to; None if it has its own."""
        ...

    @property
    def rope(self) -> RopeConfig: ...

    @property
    def span(self) -> AttentionSpan:
        """Tokens that a token sees."""
        ...


class NormedValuesAttention(GroupedQueryAttention):
    """Attention with an RMS norm, without a weight, over each head's values."""

    def __init__(self, scope: LayerScope, **options: Any) -> None:
        super().__init__(scope, **options)
        self.v_norm = UnweightedRmsNorm(epsilon=scope.config["rms_norm_eps"])

    def values(self, v: jax.Array) -> jax.Array:
        return self.v_norm(v)


def own_or_shared_attention(
    scope: LayerScope,
    layer: SharingLayer,
    *,
    head_dim: int,
    num_kv_heads: int | None = None,
    own: type[NormedValuesAttention] = NormedValuesAttention,
) -> SelfAttention:
    """Attention to the layer's own keys and values or to another layer's, with head norms and unscaled scores.

    `own` is the class of a layer with its own, `head_dim` D, and `num_kv_heads` K. Raises ConfigError if config.json's
    rope is not supported.
    """
    use_bias = scope.config.get("attention_bias", False)
    if layer.shares_cache_of is not None:
        return SharedCacheAttention(
            scope,
            shares_cache_of=layer.shares_cache_of,
            head_dim=head_dim,
            rope_settings=layer.rope,
            scale=1.0,
            use_bias=use_bias,
            span=layer.span,
        )
    return own(
        scope,
        num_kv_heads=num_kv_heads,
        layer_head_dim=head_dim,
        rope_settings=layer.rope,
        scale=1.0,
        qkv_bias=use_bias,
        o_bias=use_bias,
        qk_norm=True,
        span=layer.span,
    )


class SharedCacheCausalLM(CausalLM):
    def without_redundant_tensors(self, weights: Iterable[tuple[str, np.ndarray]]) -> Iterable[tuple[str, np.ndarray]]:
        """Also drops keys and values of layers that attend to another layer's, which checkpoints contain."""
        modules = named_modules(self.decoder, "model")
        sharing = [name for name, module in modules if isinstance(module, SharedCacheAttention)]
        unused = tuple(f"{name}.{part}." for name in sharing for part in _KEYS_AND_VALUES)
        return super().without_redundant_tensors(
            (name, tensor) for name, tensor in weights if not name.startswith(unused)
        )
