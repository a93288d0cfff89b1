"""Which layers of a model see everything and which a window, from any of the ways in which a config.json says it."""

from __future__ import annotations

from jaxis.config.hf_config import HFConfig
from jaxis.errors import ConfigError

FULL_ATTENTION = "full_attention"
SLIDING_ATTENTION = "sliding_attention"


def layer_type(config: HFConfig, layer_index: int, *, full_every: int) -> str:
    """FULL_ATTENTION or SLIDING_ATTENTION: what config.json's `layer_types` says of the layer, or its pattern.

    Args:
      config: Of the model.
      layer_index: From 0.
      full_every: Where there is no `layer_types`, the last of each so many layers is full; `sliding_window_pattern` in
        config.json says another number.

    Raises:
      ConfigError: `layer_types` does not have a known type for the layer.
    """
    pattern = config.get("sliding_window_pattern", config.get("_sliding_window_pattern", full_every))
    types = config.get("layer_types")
    if types is None:
        return SLIDING_ATTENTION if (layer_index + 1) % pattern else FULL_ATTENTION
    kind = types[layer_index] if layer_index < len(types) else None
    if kind not in (FULL_ATTENTION, SLIDING_ATTENTION):
        raise ConfigError(
            f"layer_types in {config.source} has {kind!r} for layer {layer_index}, expected {FULL_ATTENTION!r} or "
            f"{SLIDING_ATTENTION!r}"
        )
    return kind


def layer_window(config: HFConfig, kind: str, *, default: int | None = None) -> int | None:
    """The sliding window of a layer of this type, in tokens; None for a full one.

    Args:
      config: Of the model.
      kind: FULL_ATTENTION or SLIDING_ATTENTION.
      default: The family's window where config.json does not have the key; null there is no window.
    """
    window = config.get_nullable("sliding_window", default)
    return window if kind == SLIDING_ATTENTION else None
