"""Which layers have full attention and which a window, from any form in which a config.json says so."""

from __future__ import annotations

from typing import Any

from jaxis.config.attention_span import FULL_CONTEXT, AttentionSpan
from jaxis.config.hf_config import HFConfig
from jaxis.errors import ConfigError

# Settings that config.json lists layer by layer.


def value_of_layer(config: HFConfig, key: str, layer_index: int) -> Any:
    """The layer's entry in config.json's list; None where it has no such list, or null for the layer.

    The list may be longer than the model: more entries are those of layers that predict later tokens.

    Args:
      config: Of the model.
      key: The list's name.
      layer_index: From 0.

    Raises:
      ConfigError: It is no list, or has fewer entries than the model has layers.
    """
    values = config.get(key)
    if values is None:
        return None
    num_layers: int = config["num_hidden_layers"]
    if not isinstance(values, list) or len(values) < num_layers:
        raise ConfigError(
            f"{config.source} has {key}={values!r}, expected a list of {num_layers} entries, one for each layer: "
            "correct the file"
        )
    return values[layer_index]


def settings_of_layer(config: HFConfig, layer_index: int) -> HFConfig:
    """The layer's object in `per_layer_config`, as later versions of the reference write it; empty without one.

    Args:
      config: Of the model.
      layer_index: From 0; in config.json, indices may begin with zeros.

    Raises:
      ConfigError: `per_layer_config` has something else.
    """
    by_layer = config.get("per_layer_config")
    if by_layer is None:
        return HFConfig({})
    if not isinstance(by_layer, HFConfig) or not all(key.isdecimal() for key in by_layer):
        raise ConfigError(f"per_layer_config in {config.source} is not an object with an object for each layer's index")
    settings = next((by_layer[key] for key in by_layer if int(key) == layer_index), HFConfig({}))
    if not isinstance(settings, HFConfig):
        raise ConfigError(
            f"per_layer_config in {config.source} has {settings!r} for layer {layer_index}, expected an object"
        )
    return settings


FULL_ATTENTION = "full_attention"
SLIDING_ATTENTION = "sliding_attention"
CHUNKED_ATTENTION = "chunked_attention"
LINEAR_ATTENTION = "linear_attention"
CONVOLUTION = "conv"


def layer_type(config: HFConfig, layer_index: int, *, full_every: int) -> str:
    """FULL_ATTENTION or SLIDING_ATTENTION: what config.json's `layer_types` says of the layer, or its pattern.

    Args:
      config: Of the model.
      layer_index: From 0.
      full_every: The pattern of a config.json that has neither `layer_types` nor `sliding_window_pattern`: layers
        full_every - 1, 2 * full_every - 1, ... are full, the others have the window.

    Raises:
      ConfigError: `layer_types` does not have a known type for the layer, or the pattern is not a number.
    """
    if (kind := listed_layer_type(config, layer_index, FULL_ATTENTION, SLIDING_ATTENTION)) is not None:
        for key in ("sliding_window_pattern", "_sliding_window_pattern"):
            config.ignore(key, because="layer_types names each layer's type")
        return kind
    pattern = config.get("sliding_window_pattern", config.get("_sliding_window_pattern", full_every))
    if type(pattern) is not int or pattern < 1:
        raise ConfigError(
            f"{config.source} has sliding_window_pattern={pattern!r}, expected an integer of at least 1: "
            "correct the file"
        )
    return SLIDING_ATTENTION if (layer_index + 1) % pattern else FULL_ATTENTION


def listed_layer_type(config: HFConfig, layer_index: int, *known: str) -> str | None:
    """The layer's entry in `layer_types`; None where config.json has no such list.

    Args:
      config: Of the model.
      layer_index: From 0.
      known: The types that the family has.

    Raises:
      ConfigError: The list is too short, or has another type there.
    """
    types = _layer_types(config)
    if types is None:
        return None
    kind = types[layer_index] if layer_index < len(types) else None
    if kind not in known:
        raise ConfigError(
            f"layer_types[{layer_index}]={kind!r} in {config.source} is not supported, "
            f"expected {' or '.join(map(repr, known))}"
        )
    return kind


def _layer_types(config: HFConfig) -> list[Any] | None:
    types = config.get("layer_types")
    if types is not None and not isinstance(types, list):
        raise ConfigError(f"{config.source} has layer_types={types!r}, expected a list: correct the file")
    return types


def uniform_span(config: HFConfig, window: int | None) -> AttentionSpan:
    """The attention span of a family whose layers all have the window, or all see everything.

    Args:
      config: Of the model.
      window: In tokens; None if there is none.

    Raises:
      ConfigError: `layer_types`, which such a family does not need, says otherwise of a layer.
    """
    expected = FULL_ATTENTION if window is None else SLIDING_ATTENTION
    for kind in _layer_types(config) or ():
        if kind != expected:
            raise ConfigError(
                f"layer_types in {config.source} has {kind!r}, expected {expected!r} of all layers, since the family "
                f"has one kind of layers and sliding_window={window!r}"
            )
    return AttentionSpan(window)


def layer_span(config: HFConfig, kind: str, *, default_window: int | None = None) -> AttentionSpan:
    """The attention span of a layer of this type: everything, or config.json's `sliding_window` of tokens.

    Args:
      config: Of the model.
      kind: FULL_ATTENTION or SLIDING_ATTENTION.
      default_window: The family's window where config.json does not have the key; null there is no window.
    """
    if kind == FULL_ATTENTION:
        config.ignore("sliding_window", because="this layer sees everything")
        return FULL_CONTEXT
    return AttentionSpan(config.get("sliding_window", default_window))
