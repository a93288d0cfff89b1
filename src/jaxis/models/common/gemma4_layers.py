"""What config.json says of each of Gemma 4's layers."""

from __future__ import annotations

from dataclasses import dataclass

from jaxis.config.attention_span import AttentionSpan
from jaxis.config.hf_config import HFConfig
from jaxis.config.layer_types import FULL_ATTENTION, layer_span, layer_type
from jaxis.config.layer_values import settings_of_layer
from jaxis.config.rope_config import RopeConfig, rope_config
from jaxis.models.common.shared_caches import cache_owner

FULL_EVERY = 6


@dataclass(frozen=True)
class Gemma4Layer:
    """A layer's attention, and the size of its feed-forward block.

    Attributes:
      head_dim: D.
      num_kv_heads: K.
      values_are_keys: Whether one projection gives both.
      shares_cache_of: The layer whose keys and values this one attends to; None if it has its own.
      rope: Its rope.
      span: The tokens that a token sees.
      intermediate_size: F.
    """

    head_dim: int
    num_kv_heads: int
    values_are_keys: bool
    shares_cache_of: int | None
    rope: RopeConfig
    span: AttentionSpan
    intermediate_size: int

    @classmethod
    def of(cls, config: HFConfig, index: int) -> Gemma4Layer:
        """Reads the layer's settings.

        Raises:
          ConfigError: A key is missing, or no layer has the cache that this one should share.
        """
        kind = _kind(config, index)
        kinds = [_kind(config, i) for i in range(config["num_hidden_layers"])]
        owner = cache_owner(config, kinds, index)
        values_are_keys = config.get("attention_k_eq_v", False) and kind == FULL_ATTENTION
        is_wide = config.get("use_double_wide_mlp", False) and owner is not None
        head_dim, num_kv_heads = _head_sizes(config, index, kind)
        return cls(
            head_dim,
            num_kv_heads,
            values_are_keys,
            owner,
            rope_config(config, kind),
            layer_span(config, kind, default_window=512),
            config["intermediate_size"] * (2 if is_wide else 1),
        )


def _kind(config: HFConfig, index: int) -> str:
    """The layer's type; the last layer sees everything, whatever `layer_types` says."""
    kind = layer_type(config, index, full_every=FULL_EVERY)
    return FULL_ATTENTION if index == config["num_hidden_layers"] - 1 else kind


def _head_sizes(config: HFConfig, index: int, kind: str) -> tuple[int, int]:
    """D and K: from `per_layer_config`, as later versions of the reference write them, or by the layer's kind."""
    head_dim: int = config.get("head_dim", 256)
    num_kv_heads: int = config.get("num_key_value_heads", 4)
    if "per_layer_config" in config:
        for key in ("global_head_dim", "num_global_key_value_heads"):
            config.ignore(key, because="per_layer_config has the sizes")
        own = settings_of_layer(config, index)
        return own.get("head_dim", head_dim), own.get("num_key_value_heads", num_kv_heads)
    if kind != FULL_ATTENTION:
        return head_dim, num_kv_heads
    if not config.get("attention_k_eq_v", False):
        config.ignore("num_global_key_value_heads", because="the reference reads it only with attention_k_eq_v")
        return config.get("global_head_dim", 512), num_kv_heads
    return config.get("global_head_dim", 512), config.get("num_global_key_value_heads", num_kv_heads)
