"""Types of layers, with full attention or a window, from any form of config.json."""

from __future__ import annotations

from typing import Any

from jaxis.config.attention_span import FULL_CONTEXT, AttentionSpan
from jaxis.config.hf_config import HFConfig
from jaxis.errors import ConfigError

FULL_ATTENTION = "full_attention"
SLIDING_ATTENTION = "sliding_attention"
CHUNKED_ATTENTION = "chunked_attention"
LINEAR_ATTENTION = "linear_attention"
INDEXED_ATTENTION = "indexed_attention"
CONVOLUTION = "conv"


def layer_type(config: HFConfig, layer_index: int, *, full_every: int) -> str:
    """Returns FULL_ATTENTION or SLIDING_ATTENTION, by config.json's `layer_types` or its pattern.

    A config.json with neither has the layers full_every - 1, 2 * full_every - 1, ... full, and the window in the
    others. Raises ConfigError if `layer_types` does not have a known type for the layer, or the pattern is not a
    number.
    """
    if (kind := listed_layer_type(config, layer_index, FULL_ATTENTION, SLIDING_ATTENTION)) is not None:
        for key in ("sliding_window_pattern", "_sliding_window_pattern"):
            config.ignore(key, because="layer_types names each layer's type")
        return kind
    pattern = config.get("sliding_window_pattern", config.get("_sliding_window_pattern", full_every))
    if type(pattern) is not int or pattern < 1:
        raise config.fault("sliding_window_pattern", why="expected an integer of at least 1: correct the file")
    return SLIDING_ATTENTION if (layer_index + 1) % pattern else FULL_ATTENTION


def listed_layer_type(config: HFConfig, layer_index: int, *known: str) -> str | None:
    """Returns the layer's entry in `layer_types`; None if config.json has no such list.

    Raises ConfigError if the list is too short, or has another type there.
    """
    types = _layer_types(config)
    if types is None:
        return None
    kind = types[layer_index] if layer_index < len(types) else None
    if kind not in known:
        raise ConfigError(
            f"layer_types[{layer_index}]={kind!r} in {config.source} is not supported, "
            f"expected {' or '.join(map(repr, known))}",
            keys=["layer_types"],
        )
    return kind


def _layer_types(config: HFConfig) -> list[Any] | None:
    types = config.get("layer_types")
    if types is not None and not isinstance(types, list):
        raise config.fault("layer_types", why="expected a list: correct the file")
    return types


def uniform_span(config: HFConfig, window: int | None) -> AttentionSpan:
    """Returns the attention span of a family whose layers all have the window of tokens, or (None) all see everything.

    Raises ConfigError if `layer_types`, which such a family does not need, contradicts this for a layer.
    """
    expected = FULL_ATTENTION if window is None else SLIDING_ATTENTION
    for kind in _layer_types(config) or ():
        if kind != expected:
            raise ConfigError(
                f"layer_types in {config.source} has {kind!r}, expected {expected!r} of all layers, since the family "
                f"has one kind of layers and sliding_window={window!r}",
                keys=["layer_types"],
            )
    return AttentionSpan(window)


def layer_span(config: HFConfig, kind: str, *, default_window: int | None = None) -> AttentionSpan:
    """Returns the attention span of a layer of this type: everything, or config.json's `sliding_window` of tokens.

    `default_window` is the family's window if config.json does not have the key; null there is no window.
    """
    if kind == FULL_ATTENTION:
        config.ignore("sliding_window", because="this layer sees everything")
        return FULL_CONTEXT
    return AttentionSpan(config.get("sliding_window", default_window))
